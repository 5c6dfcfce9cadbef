#!/usr/bin/env bash
# Install into .venv if needed and run the tests: bash scripts/test.sh [--all] [pytest arguments]
# Without --all the tests marked slow (real processes, real training) are left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh
install_package test

selection=(-m "not slow")
if [[ "${1:-}" == "--all" ]]; then
    selection=()
    shift
fi
exec "$VENV_PYTHON" -m pytest ${selection[@]+"${selection[@]}"} "$@"
