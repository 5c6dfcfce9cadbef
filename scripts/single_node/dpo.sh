#!/usr/bin/env bash
# Train SD3.5-medium by DPO on this machine:
#   bash scripts/single_node/dpo.sh [--config.KEY=VALUE ...]
# From the environment: CONFIG (file and preset), NUM_PROCESSES (one a GPU; 1), SCRIPT (the model
# family's train script).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

CONFIG="${CONFIG:-config/dpo.py:geneval_sd3}"
source scripts/launch.sh
