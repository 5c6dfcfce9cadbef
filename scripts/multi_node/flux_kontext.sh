#!/usr/bin/env bash
# Train FLUX.1-Kontext by GRPO to count when it edits: 4 machines of 7 GPUs, on each
#   MASTER_ADDR=MACHINE_0 bash scripts/multi_node/flux_kontext.sh RANK [SETTING ...]
# RANK is 0 to 3, a SETTING --config.KEY=VALUE. Also from the environment: MASTER_PORT,
# NUM_MACHINES, NUM_PROCESSES, CONFIG, SCRIPT, ACCELERATE_CONFIG. See scripts/launch.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SCRIPT="${SCRIPT:-scripts/train_flux_kontext.py}"
CONFIG="${CONFIG:-config/grpo.py:counting_flux_kontext}"
NUM_MACHINES="${NUM_MACHINES:-4}"
PER_MACHINE=7
source scripts/launch.sh
launch_machine "$@"
