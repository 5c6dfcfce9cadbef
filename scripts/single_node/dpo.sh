#!/usr/bin/env bash
# Train SD3.5-medium by DPO on this machine:
#   bash scripts/single_node/dpo.sh [--config.KEY=VALUE ...]
# From the environment: CONFIG (file and preset), NUM_PROCESSES (one a GPU; 1), SCRIPT (the model
# family's train script).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

CONFIG="${CONFIG:-config/dpo.py:geneval_sd3}"
SCRIPT="${SCRIPT:-scripts/train_sd3.py}"
NUM_PROCESSES="${NUM_PROCESSES:-1}"

# --quiet: a mistake is the trainer's one line, without the launcher's trace. The precision that
# counts is the preset's.
launch=(accelerate launch --quiet --num_machines 1 --mixed_precision no --dynamo_backend no
    --num_processes "$NUM_PROCESSES")
if ((NUM_PROCESSES > 1)); then
    launch+=(--multi_gpu)
fi
exec "${launch[@]}" "$SCRIPT" --config "$CONFIG" "$@"
