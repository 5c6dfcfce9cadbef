"""Train Qwen-Image-Edit, which edits images, by online reinforcement learning.

accelerate launch scripts/train_qwenimage_edit.py --config config/grpo.py:counting_qwenimage_edit

Qwen-Image-Edit-2509 and -2511 are another pipeline: scripts/train_qwenimage_edit_plus.py.
"""

from flow_grpo.cli import run
from flow_grpo.models.qwenimage_edit import QwenImageEdit

if __name__ == "__main__":
    run(QwenImageEdit)
