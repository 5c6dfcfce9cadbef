#!/usr/bin/env bash
# Install into .venv if needed and train the shipped small SD3 pipeline to write words.
# Results: runs/quickstart/report.html. Run it again to go on after an interruption; other
# settings go behind it: bash scripts/quickstart.sh --config.seed=1 --config.run_name=seed1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh
install_package

# One process needs no launcher, and is better off without: accelerate launch would set
# OMP_NUM_THREADS=1, apply the user's own multi-GPU default_config.yaml, and die at the Ctrl-C
# that the trainer answers by finishing its epoch.
exec "$VENV_PYTHON" scripts/train_sd3.py \
    --config config/grpo.py:tiny_ocr --config.run_name=quickstart "$@"
