"""Train Qwen-Image-Edit-2509 or -2511, which edit one to three images, by reinforcement learning.

accelerate launch scripts/train_qwenimage_edit_plus.py \\
    --config config/grpo.py:dual_ref_qwenimage_edit_plus_fast
"""

from flow_grpo.cli import run
from flow_grpo.models.qwenimage_edit_plus import QwenImageEditPlus

if __name__ == "__main__":
    run(QwenImageEditPlus)
