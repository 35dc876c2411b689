#!/bin/bash
# Preprocessing as jobs of Slurm: an array of N shards, then one job that merges them.
#
#   bash examples/many_machines/preprocess_slurm.sh 64 /shared/data-bin --trainpref '/shared/corpus/*.jsonl' \
#       --tokenizer sentencepiece --tokenizer-path /shared/tokenizer
#
# Behind N and the folder to make stand the flags of ftk-preprocess, with paths that every node has. A task that fails
# stops the merge: run the same line again, or `scontrol requeue JOB_TASK`; a shard that is run twice writes the same.
# CPUS: cores of a task (8). SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT ... are read by sbatch itself.
set -euo pipefail
if [ $# -lt 3 ]; then
  echo "usage: $0 N DATA-BIN FLAGS-OF-FTK-PREPROCESS ..." >&2
  exit 2
fi
count=$1 destdir=$2
shift 2
shards=$(printf %q "$destdir.shards") logs=$destdir.logs
mkdir -p "$logs"

array=$(sbatch --parsable --job-name=ftk-preprocess --array="1-$count" --requeue --cpus-per-task="${CPUS:-8}" \
  --output="$logs/shard-%a.log" \
  --wrap "ftk-preprocess $(printf '%q ' "$@") --workers \$SLURM_CPUS_PER_TASK --overwrite \
    --shard \$SLURM_ARRAY_TASK_ID/$count --destdir $shards/\$SLURM_ARRAY_TASK_ID")
folders=""
for number in $(seq "$count"); do folders+=" $shards/$number"; done
sbatch --job-name=ftk-merge --dependency="afterok:${array%%;*}" --kill-on-invalid-dep=yes --output="$logs/merge.log" \
  --wrap "ftk-data merge --shards$folders --overwrite --destdir $(printf %q "$destdir")"
