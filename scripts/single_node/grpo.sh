#!/usr/bin/env bash
# Train SD3.5-medium by GRPO on this machine:
#   bash scripts/single_node/grpo.sh [--config.KEY=VALUE ...]
# From the environment: CONFIG (file and preset), NUM_PROCESSES (one a GPU; 1), SCRIPT (the model
# family's train script).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

CONFIG="${CONFIG:-config/grpo.py:general_ocr_sd3_1gpu}"
source scripts/launch.sh
