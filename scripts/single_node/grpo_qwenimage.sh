#!/usr/bin/env bash
# Train Qwen-Image by GRPO on PickScore on this machine, which has 8 GPUs:
#   bash scripts/single_node/grpo_qwenimage.sh [SETTING ...]
# A SETTING is --config.KEY=VALUE. From the environment: CONFIG, SCRIPT, NUM_PROCESSES, MASTER_PORT,
# ACCELERATE_CONFIG. See scripts/launch.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SCRIPT="${SCRIPT:-scripts/train_qwenimage.py}"
CONFIG="${CONFIG:-config/grpo.py:pickscore_qwenimage_8gpu}"
NUM_PROCESSES="${NUM_PROCESSES:-8}"
source scripts/launch.sh
launch "$@"
