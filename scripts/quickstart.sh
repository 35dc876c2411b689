#!/usr/bin/env bash
# The main job, end to end, on two CPU cores in a few minutes: environment, text, tokenizer, training, blanks filled.
#   bash scripts/quickstart.sh [FILE_OR_FOLDER]
# Without an argument the text is the source of Python's own library. Everything is written to quickstart/
# ($FTK_QUICKSTART_DIR); a second call starts afresh there. $FTK_QUICKSTART_UPDATES: length of the training.
set -euo pipefail
refuse() { echo "quickstart: $1" >&2; exit 2; }
case "${1:-}" in
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) refuse "unknown option $1; bash scripts/quickstart.sh --help shows how it is called" ;;
esac
[ $# -le 1 ] || refuse "it takes one file or folder of text, not $#; put them into one folder"
[ -z "${1:-}" ] || [ -e "$1" ] || refuse "$1: there is no such file or folder"
text="${1:+$(realpath -m "$1")}"  # relative to where the user stands, not to the project
out="${FTK_QUICKSTART_DIR:+$(realpath -m "$FTK_QUICKSTART_DIR")}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${out:-quickstart}"
updates="${FTK_QUICKSTART_UPDATES:-3600}"
training=(ftk-train "$out/data-bin" --config configs/quickstart.yaml --max-update "$updates" --save-dir "$out/run")
begun=
stopped() {
    # ftk-train has said that the same command continues the run; that is not this script
    echo "quickstart: stopped${begun:+; the command that continues is ${training[*]}}" >&2
    exit "$1"
}
trap 'stopped 130' INT
trap 'stopped 143' TERM

if [ -e "$out" ] && [ ! -e "$out/.ftk-quickstart" ]; then
    refuse "$out is there already and was not made by this script; set FTK_QUICKSTART_DIR to another"
fi
case "$text/" in "$(realpath -m "$out")"/*) refuse "$text lies in $out, which is recreated" ;; esac
source scripts/environment.sh
ftk_environment
warn_if_busy quickstart

echo "== 1. text"
rm -rf "$out"
mkdir -p "$out"
touch "$out/.ftk-quickstart"
python scripts/quickstart_text.py "$out/text" ${text:+"$text"}

echo "== 2. tokenizer and data"
ftk-preprocess --trainpref "$out/text/train.jsonl" --validpref "$out/text/valid.jsonl" --text-key text \
    --tokenizer sentencepiece --vocab-size "$(cat "$out/text/vocab_size")" --destdir "$out/data-bin" --workers 2 || {
    [ $? != 2 ] || refuse "the words of the text repeat too much to learn a vocabulary from; give text that varies more"
    exit 1
}

echo "== 3. training ($updates updates of a GLM of 2 layers)"
begun=1
"${training[@]}"
begun=

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
