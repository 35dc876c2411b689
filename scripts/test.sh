#!/usr/bin/env bash
# Runs the test suite in a virtual environment: makes one (.venv, or $FTK_VENV) or reuses it, installs ftk with
# what the tests need, and calls pytest with the arguments given here. Files of tests are shared out over two processes
# (FTK_TEST_PROCESSES says another number; 0: none), each with one thread, so that sums do not depend on the machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
ftk_environment test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python -m pytest --numprocesses "${FTK_TEST_PROCESSES:-2}" --dist loadfile "$@"
