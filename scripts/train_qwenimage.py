"""Train Qwen-Image by online reinforcement learning.

accelerate launch scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage
"""

from flow_grpo.cli import run
from flow_grpo.models.qwenimage import QwenImage

if __name__ == "__main__":
    run(QwenImage)
