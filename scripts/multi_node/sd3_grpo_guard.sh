#!/usr/bin/env bash
# Train SD3.5-medium by GRPO-Guard to write text: 2 machines of 8 GPUs, on each
#   MASTER_ADDR=MACHINE_0 bash scripts/multi_node/sd3_grpo_guard.sh RANK [SETTING ...]
# RANK is 0 to 1, a SETTING --config.KEY=VALUE. Also from the environment: MASTER_PORT,
# NUM_MACHINES, NUM_PROCESSES, CONFIG, SCRIPT, ACCELERATE_CONFIG. See scripts/launch.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SCRIPT="${SCRIPT:-scripts/train_sd3.py}"
CONFIG="${CONFIG:-config/grpo_guard.py:general_ocr_sd3_rationorm}"
NUM_MACHINES="${NUM_MACHINES:-2}"
PER_MACHINE=8
source scripts/launch.sh
launch_machine "$@"
