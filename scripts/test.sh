#!/usr/bin/env bash
# Runs the tests, in a virtual environment: makes one (.venv, or $FTK_VENV) or reuses it, and installs ftk with what the
# tests need.
#   bash scripts/test.sh                      before each commit: all but those marked slow (some minutes on two cores)
#   bash scripts/test.sh --all                these too: kills, executed docs, worlds of four processes, compilers
#   bash scripts/test.sh -m slow              these alone
#   bash scripts/test.sh tests/data -k order  what is named, slow or not; all other arguments are pytest's
# FTK_TEST_EXTRA=test,test-serve also installs clients of the service and Playwright; their tests are skipped else.
# Files of tests are shared out over two processes (FTK_TEST_PROCESSES says another number; 0: none), each with one
# thread, so that sums do not depend on the machine. The ten slowest tests are shown at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
ftk_environment "${FTK_TEST_EXTRA:-test}"
warn_if_busy test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
arguments=()
tier=(-m "not slow")
for argument in "$@"; do
    case "$argument" in
        --all) tier=() ;;
        -m*) tier=(); arguments+=("$argument") ;;
        *) if [ -e "${argument%%::*}" ]; then tier=(); fi; arguments+=("$argument") ;;
    esac
done
exec python -m pytest --numprocesses "${FTK_TEST_PROCESSES:-2}" --dist loadfile --durations 10 \
    ${tier[@]+"${tier[@]}"} ${arguments[@]+"${arguments[@]}"}
