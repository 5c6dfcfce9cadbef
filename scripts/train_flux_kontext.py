"""Train FLUX.1-Kontext-dev, which edits images, by online reinforcement learning.

accelerate launch scripts/train_flux_kontext.py --config config/grpo.py:counting_flux_kontext
"""

from flow_grpo.cli import run
from flow_grpo.models.flux_kontext import FluxKontext

if __name__ == "__main__":
    run(FluxKontext)
