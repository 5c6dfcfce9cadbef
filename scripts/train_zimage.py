"""Train Z-Image by online reinforcement learning.

accelerate launch scripts/train_zimage.py --config config/grpo.py:general_ocr_zimage
"""

from flow_grpo.cli import run
from flow_grpo.models.zimage import ZImage

if __name__ == "__main__":
    run(ZImage)
