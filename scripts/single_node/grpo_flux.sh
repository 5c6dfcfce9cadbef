#!/usr/bin/env bash
# Train FLUX.1-dev by GRPO on PickScore on this machine, which has 8 GPUs:
#   bash scripts/single_node/grpo_flux.sh [SETTING ...]
# A SETTING is --config.KEY=VALUE. From the environment: CONFIG, SCRIPT, NUM_PROCESSES, MASTER_PORT,
# ACCELERATE_CONFIG. See scripts/launch.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SCRIPT="${SCRIPT:-scripts/train_flux.py}"
CONFIG="${CONFIG:-config/grpo.py:pickscore_flux_8gpu}"
NUM_PROCESSES="${NUM_PROCESSES:-8}"
source scripts/launch.sh
launch "$@"
