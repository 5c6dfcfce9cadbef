"""Train FLUX.1-dev by online reinforcement learning.

accelerate launch scripts/train_flux.py --config config/grpo.py:pickscore_flux
"""

from flow_grpo.cli import run
from flow_grpo.models.flux import Flux

if __name__ == "__main__":
    run(Flux)
