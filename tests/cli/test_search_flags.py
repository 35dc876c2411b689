"""Every flag of ftk-generate does something: those of the search one by one, and none is without a test."""

from __future__ import annotations

import json
import re

import pytest
import torch
import yaml

from ftk import hub
from ftk.checkpoint import save_checkpoint
from ftk_cli import generate

PROMPTS = b"the quick [MASK] fox jumps [MASK]\na lazy dog [MASK] long letters\n"
JSON = ("--path", "run", "--input", "-", "--output-format", "json", "--max-len", "5")


@pytest.fixture
def answers(ask):
    """answers("--beam 3") -> of each blank of all prompts the token lists of its answers, best first."""

    def call(options=""):
        _, out, _ = ask(generate.main, *JSON, *options.split(), stdin=PROMPTS, code=0)
        blanks = [answer for line in out for answer in json.loads(line)["answers"]]
        return [[one["tokens"] for one in (blank, *blank.get("others", ()))] for blank in blanks]

    return call


@pytest.mark.parametrize("only", ["--temperature 1e-6", "--top-k 1", "--top-p 1e-9", "--min-p 1"])
def test_each_filter_alone_can_leave_nothing_but_the_likeliest_token(answers, only):
    greedy = answers()
    assert answers("--sampling") != greedy
    assert answers(f"--sampling {only}") == greedy
    # Of a beam each hypothesis has one continuation then, so that a single one is alive.
    assert [blank[0] for blank in answers(f"--search beam_sampling --beam 3 {only}")] == [blank[0] for blank in greedy]


def test_typical_sampling_can_leave_one_token_which_no_seed_changes(answers):
    assert answers("--sampling --seed 3") != answers("--sampling --seed 4")
    assert answers("--sampling --seed 3 --typical-p 1e-9") == answers("--sampling --seed 4 --typical-p 1e-9")


def test_diverse_groups_and_their_strength(answers):
    command = "--search diverse_beam --beam 4 --nbest 4 --min-len 2"
    for blank in answers(f"{command} --diverse-groups 4 --diversity-strength 50"):
        assert len({tokens[0] for tokens in blank}) == 4
    for blank in answers(f"{command} --diverse-groups 4 --diversity-strength 0"):
        assert len(set(map(tuple, blank))) == 1
    for blank in answers(f"{command} --diverse-groups 1 --diversity-strength 50"):
        assert len(set(map(tuple, blank))) == 4


@pytest.mark.parametrize("rule", ["true", "false", "never"])
def test_the_rule_of_early_stopping_arrives(answers, monkeypatch, rule):
    given, load = [], hub.load_generator
    monkeypatch.setattr(hub, "load_generator", lambda *args, **options: given.append(options) or load(*args, **options))
    answers(f"--beam 2 --early-stopping {rule}")
    assert [options["early_stopping"] for options in given] == [rule]


def test_long_prompts_are_cut_where_one_wants_it(ask):
    prompt = f"{'the fox ' * 90}[MASK] {'lazy dog ' * 90}".encode()
    code, out, _ = ask(generate.main, *JSON, stdin=prompt)
    assert (code, "positions" in json.loads(out[0])["error"]) == (1, True)
    found = {}
    for side in ("left", "right", "middle"):
        _, out, _ = ask(generate.main, *JSON, "--truncate", side, stdin=prompt, code=0)
        found[side] = json.loads(out[0])["answers"][0]["token_logprobs"]
    assert len(set(map(tuple, found.values()))) == 3  # each reads another part of the text


def test_threads_and_tracebacks(ask):
    before = torch.get_num_threads()
    try:
        assert ask(generate.main, *JSON, "--num-threads", "2", stdin=PROMPTS)[0] == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    for flags, has_one in (((), False), (("--traceback",), True)):
        code, _, err = ask(generate.main, "--path", "nowhere", "--input", "-", *flags)
        assert (code, any(line.startswith("Traceback") for line in err)) == (2, has_one)


LINE = b"the lazy [MASK] while\tdog\n"
COMMANDS = [
    *(
        f"--path run --input - {words}"
        for words in (
            "--max-len 3 --min-len 1 --length-penalty 0.5 --beam 3 --nbest 2 --early-stopping never --alternatives 2",
            "--beam 3 --nbest-over text --batch-size 2 --blank-order 1 --reencode --truncate left",
            "--print-step --max-samples 1 --input-format tabs --on-error stop --num-threads 1 --device cpu --traceback",
            "--search diverse_beam --beam 4 --diverse-groups 4 --diversity-strength 1 --output-format json",
            "--sampling --temperature 2 --top-k 5 --top-p 0.9 --min-p 0.01 --typical-p 0.9 --seed 3 --color always",
            "--lm-path run --lm-weight 0.1 --no-lm-ends --misspelt-blanks text --no-cuda-graphs",
            "--min-lens 1 --max-lens 9 --repetition-penalty 1.2 --repetition-penalty-prompt --unk-penalty 1",
            "--frequency-penalty 0.5 --presence-penalty 0.5 --logit-bias 6=1",
            "--no-repeat-ngram-size 2 --forbid-words red --forbid-words-file words --prefix the --stop .",
            "--constraints fox --constraint-answers 1 --ordered-constraints --stop-token-ids 9",
            "--results-path flags --overwrite-results --output-format json",
            "--score-reference --no-score-end",
            "--guide regex:[a-z]+ --max-len 3",
            "--guide-file small.regex --max-len 3",
            "--tensor-parallel-size 1 --pipeline-parallel-size 1 --user-dir plugin.py --precision bf16",
        )
    ),
    "data-bin --path run --gen-subset valid --scoring token_f1 --max-samples 1",
    "--path averaged --input - --ema",
    "--version",
    "--path run --help all",
]


def test_every_flag_is_taken_by_a_run(ask, place, capsys):
    """What each does is told by the tests of its subject; here none may be missing, and none may stop a run."""
    (place / "words").write_text("blue\n")
    (place / "small.regex").write_text("[a-z]+")
    (place / "plugin.py").write_text("")
    trained, model = place / "run" / "checkpoint_1", hub.load_model(place / "run")
    save_checkpoint(
        place / "averaged" / "checkpoint_1",
        model=model,
        trainer_state={},
        config=yaml.safe_load((trained / "config.yaml").read_text()),
        tokenizer_folder=trained / "tokenizer",
        extra_tensors={"ema": {name: value + 1 for name, value in model.named_parameters()}},
    )
    given, shown = set(), ""
    for command in COMMANDS:
        words = command.split()
        if "--help" in words or "--version" in words:
            with pytest.raises(SystemExit) as end:
                generate.main(words)
            code, shown = end.value.code, capsys.readouterr().out
        else:
            code, out, err = ask(generate.main, *words, stdin=LINE)
            assert out or "flags" in words, err
        assert code == 0, command
        given |= {word.replace("--no-", "--", 1) if word in NEGATED else word for word in words if word[:2] == "--"}
    flags = set(re.findall(r"^  (?:-h[^,]*, )?(--[a-z-]+)", shown, flags=re.MULTILINE))
    assert len(flags) > 50
    # Of tests/cli/test_launch.py, which starts processes, and of tests/trainer/test_adapter_runs.py.
    assert flags == given | {"--launch", "--base"}


NEGATED = ("--no-lm-ends", "--no-score-end", "--no-cuda-graphs")
