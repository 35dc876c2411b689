# Sourced by the other scripts: makes or reuses a virtual environment with ftk installed in it, and activates it;
# warns where the machine is busy.

# ftk_environment [EXTRA]: $FTK_VENV (default .venv), ftk editable with the optional dependencies EXTRA.
# A stamp remembers what was installed, so that a second call takes no time.
# With FTK_NO_INSTALL=1 the environment that is active already is taken as it is.
ftk_environment() {
    if [ "${FTK_NO_INSTALL:-}" = 1 ]; then return; fi
    local extra="${1:-}" venv="${FTK_VENV:-.venv}" python="${PYTHON:-python3}" wanted stamp
    if ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then  # missing, or interrupted while it was made
        echo "making the virtual environment $venv with $("$python" --version)" >&2
        "$python" -m venv --clear "$venv"
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
    stamp="$venv/.ftk-installed${extra:+-$extra}"
    wanted="$(cat pyproject.toml setup.py constraints.txt $(find ftk -name '*.pyx' -o -name '*.pxd' -o -name '*.h' | sort) | cksum) $PWD"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing ftk${extra:+[$extra]} (a few minutes the first time)" >&2
        python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
            --editable ".${extra:+[$extra]}"
        echo "$wanted" > "$stamp"
    fi
}

# warn_if_busy NAME: one line where other processes hold more than half of the cores, so that slow is not taken for hung.
warn_if_busy() {
    local load cores
    [ -r /proc/loadavg ] || return 0
    read -r load _ < /proc/loadavg
    cores="$(env -u OMP_NUM_THREADS nproc)"  # nproc counts those that OpenMP may use
    if awk -v load="$load" -v cores="$cores" 'BEGIN { exit !(load > cores / 2) }'; then
        echo "$1: other processes hold this machine's $cores cores (load average $load): all takes longer" >&2
    fi
}
