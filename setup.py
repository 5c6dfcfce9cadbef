"""Package metadata. Tested versions are pinned in constraints.txt; here are only lower bounds."""

import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = re.search(r'__version__ = "(.+)"', Path("flow_grpo/__init__.py").read_text()).group(1)

# Every bound admits the newest release that still supports Python 3.10.
BASE = [
    "torch>=2.7",
    "diffusers>=0.41",
    "transformers>=5.20",
    "accelerate>=1.10",
    "peft>=0.18",
    "huggingface_hub>=1.0",
    "tokenizers>=0.22",
    "ml_collections>=1.0",
    "absl-py>=2.1",
    "numpy>=2.0",
    "pillow>=11.0",
    "safetensors>=0.5",
    "tqdm>=4.66",
    "pyyaml>=6.0",
    # What a run leaves behind: report.html and the trackers everyone has.
    "jinja2>=3.1",
    "markupsafe>=2.1",
    "matplotlib>=3.9",
    "tensorboard>=2.17",
    "wandb>=0.19",
    # The OCR reward is the default reward, so its engine is no extra. The models lie inside the
    # wheel, and a release before 3.10 brings other ones: other models are another reward.
    "rapidocr>=3.10",
    "onnxruntime>=1.20",
    "opencv-python-headless>=4.10",
    "rapidfuzz>=3.9",
    # SD3's third text encoder: a T5 folder with only spiece.model needs both of these, and the
    # error without them names another package. Together they are 2 MB, so they are no extra.
    "sentencepiece>=0.2",
    "protobuf>=5.0",
]

EXTRAS = {
    "deepspeed": ["deepspeed>=0.19"],
    "swanlab": ["swanlab>=0.7"],  # needs protobuf < 7
    "trackio": ["trackio>=0.20"],  # needs pillow < 13
    "edit": ["torchvision>=0.22"],  # for the processor of Qwen-Image-Edit; it fixes torch's version
    "quant": ["bitsandbytes>=0.48"],
    "test": ["pytest>=8.0", "ruff>=0.12", "deepspeed>=0.19"],
}
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

setup(
    name="flow_grpo",
    version=VERSION,
    description="Train flow-matching image models by online reinforcement learning",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["flow_grpo", "flow_grpo.*"]), "config"],
    package_data={"flow_grpo": ["assets/**/*"]},
    install_requires=BASE,
    extras_require=EXTRAS,
)
