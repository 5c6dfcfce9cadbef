"""Train Wan 2.1 text-to-video by online reinforcement learning.

accelerate launch scripts/train_wan2_1.py --config config/grpo.py:general_ocr_wan2_1
"""

from flow_grpo.cli import run
from flow_grpo.models.wan2_1 import Wan21

if __name__ == "__main__":
    run(Wan21)
