#!/usr/bin/env bash
# Train SD3.5-medium on its own best images for GenEval on this machine, with one GPU:
#   bash scripts/single_node/sft.sh [SETTING ...]
# A SETTING is --config.KEY=VALUE. From the environment: CONFIG, SCRIPT, NUM_PROCESSES, MASTER_PORT,
# ACCELERATE_CONFIG. See scripts/launch.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SCRIPT="${SCRIPT:-scripts/train_sd3.py}"
CONFIG="${CONFIG:-config/sft.py:geneval_sd3}"
NUM_PROCESSES="${NUM_PROCESSES:-1}"
source scripts/launch.sh
launch "$@"
