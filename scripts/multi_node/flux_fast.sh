#!/usr/bin/env bash
# Train FLUX.1-dev by Flow-GRPO-Fast on PickScore: 4 machines of 8 GPUs, on each
#   MASTER_ADDR=MACHINE_0 bash scripts/multi_node/flux_fast.sh RANK [SETTING ...]
# RANK is 0 to 3, a SETTING --config.KEY=VALUE. Also from the environment: MASTER_PORT,
# NUM_MACHINES, NUM_PROCESSES, CONFIG, SCRIPT, ACCELERATE_CONFIG. See scripts/launch.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SCRIPT="${SCRIPT:-scripts/train_flux.py}"
CONFIG="${CONFIG:-config/grpo.py:pickscore_flux_fast}"
NUM_MACHINES="${NUM_MACHINES:-4}"
PER_MACHINE=8
source scripts/launch.sh
launch_machine "$@"
