"""Presets: one function per experiment. `config/base.py` holds every field once."""
