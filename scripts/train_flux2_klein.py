"""Train FLUX.2 klein by online reinforcement learning.

accelerate launch scripts/train_flux2_klein.py --config config/grpo.py:general_ocr_flux2_klein
"""

from flow_grpo.cli import run
from flow_grpo.models.flux2_klein import Flux2Klein

if __name__ == "__main__":
    run(Flux2Klein)
