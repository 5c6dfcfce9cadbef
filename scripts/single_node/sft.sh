#!/usr/bin/env bash
# Fine-tune SD3.5-medium on its own best images on this machine:
#   bash scripts/single_node/sft.sh [--config.KEY=VALUE ...]
# From the environment: CONFIG (file and preset), NUM_PROCESSES (one a GPU; 1), SCRIPT (the model
# family's train script).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

CONFIG="${CONFIG:-config/sft.py:geneval_sd3}"
source scripts/launch.sh
