"""Train flow-matching models with online reinforcement learning."""

__version__ = "0.1.0"
