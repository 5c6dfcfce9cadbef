#!/usr/bin/env bash
# Train SD3.5-medium by Flow-GRPO-Fast on PickScore, without guidance: 4 machines of 8 GPUs, on each
#   MASTER_ADDR=MACHINE_0 bash scripts/multi_node/sd3_fast/pickscore.sh RANK [SETTING ...]
# RANK is 0 to 3, a SETTING --config.KEY=VALUE. Also from the environment: MASTER_PORT,
# NUM_MACHINES, NUM_PROCESSES, CONFIG, SCRIPT, ACCELERATE_CONFIG. See scripts/launch.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

SCRIPT="${SCRIPT:-scripts/train_sd3.py}"
CONFIG="${CONFIG:-config/grpo.py:pickscore_sd3_fast_nocfg}"
NUM_MACHINES="${NUM_MACHINES:-4}"
PER_MACHINE=8
source scripts/launch.sh
launch_machine "$@"
