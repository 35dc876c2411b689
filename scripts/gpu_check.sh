#!/usr/bin/env bash
# What only a GPU can show, in four parts of at most ten minutes each:
#
#   bash scripts/gpu_check.sh [--part smoke|train|generate|tests] [--device cuda|cpu] [--quick] [--python PYTHON]
#                             [--minutes N] [--wheels FOLDER]
#
# smoke     the machine, its rates, PyTorch's attention kernels, first updates in all precisions, host waits
# train     updates of glm_large: tokens/s, MFU, memory, loss; a profile
# generate  decoding and prefill of glm_large for 1 to 64 prompts, and what a new prompt length costs
# tests     the tests marked `gpu`
#
# Without --part all of them, in this order. Each step of a part has a time limit and a log of its own; one that fails
# or runs out of time is reported, the others continue, and the exit code is 1. --minutes is the limit of a part
# (default: smoke and generate 6, train 9, tests 8), so that all four take less than half an hour. Results are in $OUT if that is set, else in gpu_check/: summary.txt, which grows step by step, and
# all.tgz, the logs and the benchmarks' JSON, renewed after each step: they are there whatever ends the script.
# It needs no network: Python (python3, or --python) must find torch, numpy, hydra-core, omegaconf, sentencepiece,
# tokenizers, safetensors, tqdm, pytest; packages in --wheels are installed into build/site, where only this script
# finds them. Extensions that were not built for this Python are built in place, which takes Cython, setuptools and a C
# compiler.
# `--device cpu --quick` runs the same steps on a tiny model where there is no GPU, to show that the script works.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

parts=(smoke train generate tests) device=cuda quick="" python="${PYTHON:-python3}" minutes="" wheels=""
while [ $# -gt 0 ]; do
    case "$1" in
        --part) parts=("${2:?--part needs smoke, train, generate or tests}"); shift 2 ;;
        --device) device="${2:?--device needs cuda or cpu}"; shift 2 ;;
        --quick) quick=1; shift ;;
        --python) python="${2:?--python needs a program}"; shift 2 ;;
        --minutes) minutes="${2:?--minutes needs a number}"; shift 2 ;;
        --wheels) wheels="${2:?--wheels needs a folder}"; shift 2 ;;
        *)
            echo "gpu_check.sh: unknown argument $1 (--part, --device, --quick, --python, --minutes, --wheels)" >&2
            exit 2 ;;
    esac
done
case "${parts[0]}" in
    smoke | train | generate | tests) ;;
    *) echo "gpu_check.sh: --part ${parts[0]} is none of smoke, train, generate, tests" >&2; exit 2 ;;
esac

out="${OUT:-gpu_check}" log=build/gpu_check
mkdir -p "$out" "$log"
summary="$out/summary.txt"
: > "$summary"
export PYTHONPATH="$PWD:$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# In an ignored folder, where the next part finds what this one has compiled.
export TORCHINDUCTOR_CACHE_DIR="$PWD/build/inductor" TRITON_CACHE_DIR="$PWD/build/triton"
failed=() child=""

say() { printf '%s\n' "$@" | tee -p -a "$summary"; }

pack() { tar czf "$out/all.tgz.new" -C build gpu_check && mv "$out/all.tgz.new" "$out/all.tgz"; }

finish() {
    if [ -n "$child" ]; then
        kill "$child" 2> /dev/null
        wait "$child"
        say "stopped by a signal in this step"
        failed+=("the script (stopped)")
    fi
    if [ "${#failed[@]}" -gt 0 ]; then
        say "gpu_check.sh: ${#failed[@]} of the steps failed:" "${failed[@]/#/  }"
    else
        say "gpu_check.sh: all steps passed; results in $out"
    fi
    pack
}

# run NAME SECONDS LINES COMMAND...: a step; its output in a log, the last LINES lines in the summary, more if it failed.
# What its command writes to $log/$part/NAME.json goes into the archive, too.
run() {
    local name="$part/$1" limit="$2" lines="$3" left=$((deadline - SECONDS)) began=$SECONDS code
    shift 3
    [ -z "$quick" ] || limit=$((limit * 10))  # the limits are those of a GPU
    [ "$limit" -le "$left" ] || limit="$left"
    if [ "$limit" -lt 5 ]; then
        say "== $name: not run, the time of this part is over"
        failed+=("$name (no time left)")
        return 1
    fi
    timeout --kill-after=10 "$limit" "$@" > "$log/$name.txt" 2>&1 &
    child=$!
    wait "$child"
    code=$?
    child=""
    say "== $name: exit code $code after $((SECONDS - began)) s (limit $limit s)"
    if [ "$code" -ne 0 ]; then
        lines=40
        if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
            failed+=("$name (stopped after $limit s)")
        else
            failed+=("$name (exit code $code)")
        fi
    fi
    tail -n "$lines" "$log/$name.txt" | tee -p -a "$summary"
    pack
    return "$code"
}

look() {  # look NAME SECONDS LINES ARGUMENTS...
    local name="$1" limit="$2" lines="$3"
    shift 3
    run "$name" "$limit" "$lines" "$python" scripts/benchmark/gpu_probe.py --device "$device" \
        --json "$log/$part/$name.json" "${size[@]}" "$@"
}

train() {  # train NAME SECONDS ARGUMENTS...
    local name="$1" limit="$2"
    shift 2
    [ -z "$quick" ] || set -- --quick "$@"
    # All ways of a step are in one process, the original's in fp32 among them, which leaves little of 80 GB.
    run "$name" "$limit" 25 env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
        "$python" scripts/benchmark/train_step.py --device "$device" \
        --json "$log/$part/$name.json" "$@"
}

generate() {  # generate NAME SECONDS ARGUMENTS...
    local name="$1" limit="$2"
    shift 2
    [ -z "$quick" ] || set -- "$@" --quick
    run "$name" "$limit" 30 "$python" scripts/benchmark/generate.py --device "$device" --no-lines --no-original \
        --json "$log/$part/$name.json" "$@"
}

extensions() {  # imports all of them
    "$python" -c "
import importlib, pathlib
for source in sorted(pathlib.Path('ftk').rglob('*.pyx')):
    importlib.import_module('.'.join(source.with_suffix('').parts))
" > "$log/import.txt" 2>&1
}

prepare() {  # what every part needs, on a fresh machine, too
    if [ -n "$wheels" ] && [ ! -d build/site ]; then
        run wheels 60 0 "$python" -m pip install -q --no-index --no-deps --target build/site "$wheels"/*.whl
    fi
    run device 120 3 "$python" -c "
import torch
print('torch', torch.__version__, 'on', torch.ones(1, device='$device').device)" || return 1
    extensions && return 0
    run build 240 0 "$python" setup.py build_ext --inplace -j "$(nproc)" && extensions && return 0
    tail -n 5 "$log/import.txt" | tee -p -a "$summary"
    failed+=("$part (extensions cannot be imported)")
    return 1
}

smoke() {
    [ "$device" = cpu ] || run nvidia-smi 20 20 nvidia-smi
    run compilers 20 6 bash -c \
        "cc --version | head -n 1; '$python' -c '
import importlib.metadata as metadata
for name in (\"torch\", \"triton\", \"cython\", \"numpy\"):
    print(name, *(one.version for one in metadata.distributions(name=name)))'"
    look machine 60 12 machine
    look rates 60 8 rates
    look attention 90 50 attention
    train first-updates 180 --size tiny --precision "${types[@]}" --attention "${forms[@]}" --rounds 1 --steps 2
    look waits 120 12 waits
    if [ -z "$quick" ]; then
        train large 180 --size large --batch-size 8 --precision bf16 --attention "${forms[@]}" \
            --compile block --rounds 1 --steps 5 --check-steps 2
    fi
}

updates() {
    if [ -n "$quick" ]; then
        train forms 60 --checkpointing none full
        train sizes 60 --no-original --size tiny --batch-size 1 4 --precision bf16
        train dropout 60 --dropout 0.1 --precision bf16 --cuda-graphs off on
        look profile 60 12 profile
        return
    fi
    local large=(--size large --rounds 3 --steps 10 --check-steps 3)
    local graphs=(--compile block --cuda-graphs off on)
    train original 150 "${large[@]}" --batch-size 16 --precision bf16 --compile none block --cuda-graphs off on
    train forms 120 "${large[@]}" --no-original --batch-size 16 --precision bf16 --attention "${forms[@]}" "${graphs[@]}"
    train sizes 120 "${large[@]}" --no-original --batch-size 8 64 --precision bf16 "${graphs[@]}"
    train dropout 90 "${large[@]}" --no-original --batch-size 16 --precision bf16 --dropout 0.1 \
        --attention sdpa varlen "${graphs[@]}"
    train long 90 "${large[@]}" --no-original --batch-size 4 --tokens 2048 --precision bf16 \
        --attention "${forms[@]}" --compile block --cuda-graphs on
    look profile 90 50 profile --compile block
    train memory 80 "${large[@]}" --no-original --batch-size 16 --precision bf16 --attention sdpa \
        --checkpointing none selective full --rounds 2
    train precisions 90 "${large[@]}" --batch-size 8 --precision fp16 fp32 --tf32 off on --rounds 1
}

decoding() {
    local large=(--arch glm_large --tokens 96) lengths=40 counts=(1 8 16 32 64)
    [ -z "$quick" ] || { large=() lengths=3 counts=(1 4); }
    look steps 60 60 decode --batch-size 8
    generate cold 90 "${large[@]:0:2}" --precision bf16 --prompts 1 --tokens 8 --rounds 1 --cold-lengths "$lengths"
    generate prompts 200 "${large[@]}" --precision bf16 --prompts "${counts[@]}"
    generate precisions 150 "${large[@]}" --precision fp32 bf16 int8 --prompts 1 8
}

gpu_tests() {
    local limit=() processes=5
    [ "$device" = cuda ] || processes=2  # each imports PyTorch
    "$python" -c "import pytest_timeout" 2> /dev/null && limit=(--timeout=90)
    "$python" -c "import xdist" 2> /dev/null && limit+=(-n "$processes")
    FTK_GPU_TEST_DEVICE="$device" run tests 520 25 "$python" -m pytest -v --tb=short -m gpu tests/gpu \
        -p no:cacheprovider "${limit[@]}"
}

forms=(sdpa varlen flex) types=(fp32 bf16 fp16) size=()
[ "$device" = cuda ] || { forms=(sdpa) types=(fp32 bf16); }
[ -z "$quick" ] || size=(--size tiny --batch-size 2)
trap finish EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
for part in "${parts[@]}"; do
    mkdir -p "$log/$part"
    rm -f "$log/$part"/*
    case "$part" in
        train) own=9 ;;
        tests) own=8 ;;
        *) own=6 ;;
    esac
    deadline=$((SECONDS + ${minutes:-$own} * 60))
    say "== part $part, at most ${minutes:-$own} minutes, $(date -u +%FT%TZ)"
    prepare || continue
    case "$part" in
        smoke) smoke ;;
        train) updates ;;
        generate) decoding ;;
        tests) gpu_tests ;;
    esac
done
[ "${#failed[@]}" -eq 0 ]
