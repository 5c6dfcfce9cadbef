"""Train Stable Diffusion 3 or 3.5 by online reinforcement learning.

accelerate launch scripts/train_sd3.py --config config/grpo.py:general_ocr_sd3
"""

from flow_grpo.cli import run
from flow_grpo.models.sd3 import SD3

if __name__ == "__main__":
    run(SD3)
