#!/usr/bin/env bash
# Train Wan2.1-1.3B by GRPO to write text in its clips on this machine, with one GPU:
#   bash scripts/single_node/grpo_wan.sh [SETTING ...]
# A SETTING is --config.KEY=VALUE. From the environment: CONFIG, SCRIPT, NUM_PROCESSES, MASTER_PORT,
# ACCELERATE_CONFIG. See scripts/launch.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SCRIPT="${SCRIPT:-scripts/train_wan2_1.py}"
CONFIG="${CONFIG:-config/grpo.py:general_ocr_wan2_1}"
NUM_PROCESSES="${NUM_PROCESSES:-1}"
source scripts/launch.sh
launch "$@"
