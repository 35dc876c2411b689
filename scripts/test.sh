#!/usr/bin/env bash
# Runs the test suite in a virtual environment: makes one (.venv, or $FTK_VENV) or reuses it, installs ftk with
# what the tests need, and calls pytest with the arguments given here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
ftk_environment test
exec python -m pytest "$@"
