#!/usr/bin/env bash
# The main job, end to end, on two CPU cores in a few minutes: environment, text, tokenizer, training, blanks filled.
#   bash scripts/quickstart.sh [FILE_OR_FOLDER]
# Without an argument the text is the source of Python's own library. Everything is written to quickstart/
# ($FTK_QUICKSTART_DIR); a second call starts afresh there. $FTK_QUICKSTART_UPDATES: length of the training.
set -euo pipefail
text="${1:+$(realpath -m "$1")}"  # relative to where the user stands, not to the project
out="${FTK_QUICKSTART_DIR:+$(realpath -m "$FTK_QUICKSTART_DIR")}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${out:-quickstart}"
updates="${FTK_QUICKSTART_UPDATES:-3600}"
trap 'echo "quickstart: stopped; nothing is broken, run it again to start afresh" >&2; exit 1' INT TERM

source scripts/environment.sh
ftk_environment
warn_if_busy quickstart

echo "== 1. text"
if [ -e "$out" ] && [ ! -e "$out/.ftk-quickstart" ]; then
    echo "quickstart: $out is there already and was not made by this script; set FTK_QUICKSTART_DIR to another" >&2
    exit 2
fi
case "$text/" in "$(realpath -m "$out")"/*) echo "quickstart: $text lies in $out, which is recreated" >&2; exit 2 ;; esac
rm -rf "$out"
mkdir -p "$out"
touch "$out/.ftk-quickstart"
python scripts/quickstart_text.py "$out/text" ${text:+"$text"}

echo "== 2. tokenizer and data"
ftk-preprocess --trainpref "$out/text/train.jsonl" --validpref "$out/text/valid.jsonl" --text-key text \
    --tokenizer sentencepiece --vocab-size "$(cat "$out/text/vocab_size")" --destdir "$out/data-bin" --workers 2

echo "== 3. training ($updates updates of a GLM of 2 layers)"
ftk-train "$out/data-bin" --config configs/quickstart.yaml --max-update "$updates" --save-dir "$out/run"

echo "== 4. validation"
ftk-validate "$out/data-bin" --path "$out/run" --unigram

echo "== 5. blanks of held-out sentences"
ftk-interactive --path "$out/run" --beam 4 --max-len 8 < "$out/text/blanks.txt"

if [ -s "$out/text/words.txt" ]; then  # not where there are no spaces between words
    echo "== 6. how many words are right"
    ftk-generate --path "$out/run" --input "$out/text/words.txt" --max-len 8 --output-format json > "$out/answers.jsonl"
    python scripts/quickstart_text.py --score "$out/text" < "$out/answers.jsonl"
fi

echo
echo "text: $out/text   data: $out/data-bin   checkpoints, config.yaml, metrics.jsonl: $out/run"
echo "try your own: ftk-interactive --path $out/run"
