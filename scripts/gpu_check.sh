#!/usr/bin/env bash
# Everything that only a GPU can show, in one call of under ten minutes: the tests marked `gpu`, and the benchmark of
# the training step with glm_large, whose tables go into docs/performance.md.
#
#   bash scripts/gpu_check.sh [--device cuda|cpu] [--quick] [--python PYTHON] [--minutes N]
#
# A part that fails or runs out of time is reported, the others continue, and the exit code is 1. Results are written to
# $OUT if that is set, else to gpu_check/: tests.txt, train_step*.txt and train_step*.json.
# It installs nothing and needs no network: Python (python3, or --python) must find torch, numpy, hydra-core, omegaconf,
# sentencepiece, tokenizers, safetensors, tqdm, pytest; wheels unpacked somewhere are found by PYTHONPATH. Extensions
# that were not built for this Python are built in place, which takes Cython, setuptools and a C compiler.
# `--device cpu --quick` runs the same parts on a tiny model where there is no GPU, to show that the script works.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=cuda quick="" python="${PYTHON:-python3}" minutes=9
while [ $# -gt 0 ]; do
    case "$1" in
        --device) device="${2:?--device needs cuda or cpu}"; shift 2 ;;
        --quick) quick=--quick; shift ;;
        --python) python="${2:?--python needs a program}"; shift 2 ;;
        --minutes) minutes="${2:?--minutes needs a number}"; shift 2 ;;
        *) echo "gpu_check.sh: unknown argument $1 (--device, --quick, --python, --minutes)" >&2; exit 2 ;;
    esac
done
out="${OUT:-gpu_check}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
deadline=$((SECONDS + minutes * 60))
failed=()

# part NAME SHARE COMMAND...: runs a part, its output also in $out/NAME.txt, for at most SHARE % of the time left
part() {
    local name="$1" share="$2" left=$((deadline - SECONDS)) code
    shift 2
    if [ "$left" -lt 10 ]; then
        echo "== $name: not run, the $minutes minutes are over"
        failed+=("$name (no time left)")
        return 1
    fi
    local limit=$((left * share / 100)) began=$SECONDS
    echo "== $name (at most $limit s)"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.txt"
    code=${PIPESTATUS[0]}
    echo "== $name: exit code $code after $((SECONDS - began)) s"
    if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        failed+=("$name (stopped after $limit s)")
    elif [ "$code" -ne 0 ]; then
        failed+=("$name (exit code $code)")
    fi
    return "$code"
}

step() {  # step NAME SHARE ARGUMENTS...: one run of the benchmark
    local name="$1" share="$2"
    shift 2
    part "$name" "$share" "$python" scripts/benchmark/train_step.py --device "$device" --json "$out/$name.json" "$@"
}

part environment 20 "$python" -c "
import sys, torch
print('Python', sys.version.split()[0], 'torch', torch.__version__, 'CUDA', torch.version.cuda)
if '$device' == 'cuda':
    print('GPU', torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory // 2**20, 'MiB')
" || { echo "gpu_check.sh: no $device to be had; nothing was run" >&2; exit 1; }

if ! "$python" -c "import ftk.tasks.glm_blank.samples.dataset, ftk.data.batches.batching" 2> "$out/import.txt"; then
    cat "$out/import.txt"
    part build 30 "$python" setup.py build_ext --inplace
fi

FTK_GPU_TEST_DEVICE="$device" part tests 40 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider

if [ -n "$quick" ]; then
    step train_step 60 --quick --checkpointing none full
    step train_step_large 90 --quick --size tiny --compile none --attention sdpa
elif [ "$device" = cpu ]; then
    step train_step 60 --size small --checkpointing none full
    step train_step_large 90 --size base --rounds 2
else
    # All precisions against the original's way, at both batch sizes; then attention, compilation and memory in bf16.
    step train_step 60 --size large --batch-size 8 16 --precision fp32 bf16 fp16 --tf32 off on --rounds 3 --steps 5
    step train_step_forms 75 --size large --batch-size 16 --precision bf16 --attention sdpa flex \
        --compile none block --rounds 3 --steps 5
    step train_step_memory 90 --size large --batch-size 16 --precision bf16 --checkpointing none selective full \
        --rounds 2 --steps 5
fi

if [ "${#failed[@]}" -gt 0 ]; then
    printf 'gpu_check.sh: %s of the parts failed:\n' "${#failed[@]}"
    printf '  %s\n' "${failed[@]}"
    exit 1
fi
echo "gpu_check.sh: all parts passed; results in $out"
