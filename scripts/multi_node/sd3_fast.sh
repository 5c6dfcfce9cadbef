#!/usr/bin/env bash
# Train SD3.5-medium by Flow-GRPO-Fast on PickScore: sd3_fast/pickscore.sh under its published name.
#   MASTER_ADDR=MACHINE_0 bash scripts/multi_node/sd3_fast.sh RANK [SETTING ...]
set -euo pipefail
exec bash "${BASH_SOURCE[0]%.sh}/pickscore.sh" "$@"
