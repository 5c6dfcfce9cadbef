#!/usr/bin/env bash
# Train Qwen-Image-Edit by GRPO to count when it edits on this machine, which has 8 GPUs:
#   bash scripts/single_node/grpo_qwenimage_edit.sh [SETTING ...]
# A SETTING is --config.KEY=VALUE. From the environment: CONFIG, SCRIPT, NUM_PROCESSES, MASTER_PORT,
# ACCELERATE_CONFIG. See scripts/launch.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SCRIPT="${SCRIPT:-scripts/train_qwenimage_edit.py}"
CONFIG="${CONFIG:-config/grpo.py:counting_qwenimage_edit_8gpu}"
NUM_PROCESSES="${NUM_PROCESSES:-8}"
source scripts/launch.sh
launch "$@"
