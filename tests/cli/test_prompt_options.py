"""ftk-generate --input-format: prompts with constraints, prefixes, lengths and seeds of their own, a line each."""

from __future__ import annotations

import json

import pytest

from ftk_cli import generate

COMMAND = ("--path", "run", "--input", "-", "--output-format", "json", "--max-len", "16")


@pytest.fixture
def answers(ask):
    """answers(lines, *options) -> (exit code, records, stderr)"""

    def call(lines, *options):
        stdin = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines).encode()
        code, out, err = ask(generate.main, *COMMAND, *options, stdin=stdin)
        return code, [json.loads(line) for line in out], err

    return call


def texts(record):
    return [answer["text"] for answer in record["answers"]]


@pytest.mark.parametrize(
    "options", [(), ("--beam", "4"), ("--sampling",), ("--beam", "2", "--blank-order", "confident")]
)
def test_a_json_line_has_its_own_options_and_the_others_those_of_the_command(answers, options):
    lines = [
        {"prompt": "she reads [MASK] of [MASK]"},
        {"prompt": "she reads [MASK] of [MASK]", "constraints": ["dog", "fox"], "constraint_blanks": [1, 2]},
        {"text": "the [MASK] jumps", "prefix": "old", "max_len": 9},
        {"prompt": "the [MASK] jumps", "forbid_words": ["e"], "min_len": 4, "seed": 5},
        {"prompt": "the [MASK] jumps", "prefix": None},
    ]
    code, records, err = answers(lines, "--input-format", "json", "--prefix", "quick", *options)
    assert code == 0, err
    assert [record["source"] for record in records] == [line.get("prompt", line.get("text")) for line in lines]
    for record, own in zip(records, lines, strict=True):
        assert all(text.startswith(own.get("prefix") or "quick") for text in texts(record))
    assert "dog" in texts(records[1])[0]
    assert "fox" in texts(records[1])[1]
    assert len(records[2]["answers"][0]["tokens"]) <= 9
    assert len(records[3]["answers"][0]["tokens"]) >= 4


def test_phrases_behind_tabs_are_constraints_as_in_fairseq(answers):
    lines = ["she reads [MASK]\tdog\tfox", "she reads [MASK]", "the [MASK] jumps\t\told "]
    code, records, err = answers(lines, "--input-format", "tabs", "--beam", "6", "--max-len", "24")
    assert code == 0, err
    assert [record["source"] for record in records] == ["she reads [MASK]", "she reads [MASK]", "the [MASK] jumps"]
    assert "dog" in texts(records[0])[0]
    assert "fox" in texts(records[0])[0]
    assert "old" in texts(records[2])[0]
    code, plain, _ = answers(["she reads [MASK]"], "--beam", "6", "--max-len", "24")
    assert texts(plain[0]) == texts(records[1])


def test_a_seed_of_its_own(answers):
    lines = [{"prompt": "the [MASK] jumps", "seed": seed} for seed in (1, 2, 3, 1)]
    _, records, _ = answers(lines, "--input-format", "json", "--sampling", "--seed", "2")
    _, (plain,), _ = answers(["the [MASK] jumps"], "--sampling", "--seed", "2")
    assert texts(records[0]) == texts(records[3]) != texts(records[2])
    assert texts(records[1]) == texts(plain)


BAD: list[tuple[str, str]] = [
    ('{"prompt": "the [MASK]", "constraint": ["a"]}', "a prompt has no option 'constraint'; did you mean"),
    ('{"prompt": "the [MASK]", "forbid_words_file": "/etc/passwd"}', "has no option 'forbid_words_file'"),
    ('{"prompt": "the [MASK]", "constraints": ["fox"], "forbid_words": ["fox"]}', "constraints 'fox' must come, but"),
    ('{"prompt": "the [MASK]", "constraints": ["fox"], "stop": "o"}', "constraints 'fox' holds 'o', at which"),
    ('{"prompt": "the [MASK]", "constraints": ["lettersofoldfriends"]}', "tokens, but an answer has room for 16"),
    ('{"prompt": "the [MASK]", "constraints": ["fox"], "max_len": 1}', "tokens, but answer 1 has room for 1"),
    ('{"prompt": "the [MASK]", "max_len": 17}', "max_len is 17; for a single prompt it can be from 1 to 16"),
    ('{"prompt": "the [MASK]", "seed": "x"}', "seed is 'x'; it must be a whole number"),
    ('{"prompt": "the [MASK]", "constraints": [""]}', "constraints holds an empty text"),
    ('{"prompt": "the [MASK]", "prefix": ["a", "b"]}', "prefix has 2 entries, but the prompt asks for 1 answer"),
    ('{"prompt": "", "constraints": ["fox"]}', "the prompt is empty"),
    ('{"prompt": "a", "text": "b"}', "a JSON line needs a text 'prompt'"),
    ('{"prompt": 3}', "a JSON line needs a text 'prompt'"),
    ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' is given twice"),
    ('{"prompt": "the \\ud800 [MASK]"}', "holds half a character"),
    ('{"prompt": "the [MASK]", "constraints": ["\\udc00"]}', "holds half a character"),
    ('{"prompt": "the [MASK]", "repetition_penalty": NaN}', "NaN is no number of JSON"),
    ('{"prompt": "the [MASK]", "max_lens": [1e999]}', "max_lens is inf; it must be"),
    ("{}", "a JSON line needs a text 'prompt'"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "'messages' must be a list whose last one has the role"),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "the [MASK]"}]}',
        "a prompt has no option 'messages'",
    ),
    ("the [MASK]", "not a JSON object: "),
    ('{"prompt": "the', "not a JSON object: "),
    ('["the [MASK]"]', "not a JSON object: it is a list; e.g. "),
    ("[" * 100_000, "not a JSON object: "),
    ('{"prompt": "the [MASK]"，"seed": 1}', "not a JSON object: '，' at column 24; write ',' there; e.g. "),
    ('{"prompt": "the [MASK]", "stop": ' + "[" * 100_000, "not a JSON object: nested too deeply"),
    ('{"prompt": "the [MASK]", "stop": ' + "[" * 900 + "]" * 900 + "}", "stop"),
    ('{"prompt": "the [MASK]", "seed": ' + "9" * 5_000 + "}", "not a JSON object: "),
    ('{"prompt": "the [MASK]", "max_len": ' + "9" * 4_000 + "}", "max_len is 999"),
    ('{"prompt": "the [MASK]", "unk_penalty": 1' + "0" * 400 + "}", ""),
    ('{"prompt": "the [MASK]", "repetition_penalty": Infinity}', "Infinity is no number of JSON"),
    ('{"prompt": "the [MASK]", "max_len": true}', "max_len"),
    ('{"prompt": "the [MASK]", "constraints": {"a": 1}}', "constraints"),
    ('{"prompt": "the [MASK]", "constraints": [[1]]}', "constraints"),
    ('{"prompt": "the [MASK]", "constraint_answers": [1000000000000]}', "constraint_answers"),
    ('{"prompt": "the [MASK]", "' + "x" * 100_000 + '": 1}', "a prompt has no option 'xxx"),
    ("null", "not a JSON object: it is null"),
    ("", 'the line is empty; write a JSON object, e.g. {"prompt": "the [MASK] fox", "constraints": ["quick"]}'),
]


@pytest.mark.parametrize("options", [(), ("--beam", "3"), ("--sampling",)])
def test_bad_lines_are_named_and_the_others_answered(answers, options):
    good = '{"prompt": "the [MASK] fox", "constraints": ["old"]}'
    lines = [one for line, _ in BAD for one in (line, good)]
    code, records, err = answers(lines, "--input-format", "json", *options)
    assert code == 1
    assert len(records) == 2 * len(BAD)
    for number, (_, message) in enumerate(BAD):
        bad, fine = records[2 * number : 2 * number + 2]
        assert bad["line"] == 2 * number + 1
        assert message in bad["error"]
        assert len(bad["error"]) < 1100
        assert any(f"standard input:{2 * number + 1}: {bad['error']}" in line for line in err)
        assert "old" in texts(fine)[0]


def test_a_continued_run_knows_the_prompts_within_the_lines(ask, place, tmp_path):
    lines = [json.dumps({"prompt": f"the [MASK] {n}", "constraints": ["old"], "seed": n}) for n in range(9)]
    (place / "own.jsonl").write_text("\n".join([*lines, "no JSON"]) + "\n")
    command = (*COMMAND[:2], "--input", "own.jsonl", *COMMAND[4:], "--input-format", "json", "--batch-size", "1")
    path = tmp_path / "results"
    assert ask(generate.main, *command, "--results-path", str(path))[0] == 1
    whole = path.read_bytes()
    for cut in (0, len(whole) // 2, len(whole)):
        path.write_bytes(whole[:cut])
        assert ask(generate.main, *command, "--results-path", str(path))[0] == 1
        assert path.read_bytes() == whole
    _, _, err = ask(generate.main, *command, "--input-format", "text", "--results-path", str(path), code=2)
    assert "input_format was 'json' and is 'text'" in err[0]


@pytest.mark.parametrize(
    "arguments",
    [("data-bin", "--input-format", "json"), ("--input", "text", "--score-reference", "--input-format", "tabs")],
)
def test_it_goes_with_prompts_alone(ask, arguments):
    _, _, err = ask(generate.main, "--path", "run", *arguments, code=2)
    assert "it goes with --input, and not with --score-reference" in err[0]


def test_files_named_jsonl_hold_json(place, ask):
    prompt = "the quick [MASK] over a dog"
    (place / "own.jsonl").write_text(json.dumps({"prompt": prompt, "max_len": 1}) + "\n")
    for name, options, source in (("own.jsonl", [], prompt), ("own.jsonl", ["--input-format", "text"], None)):
        code, out, _ = ask(generate.main, "--path", "run", "--input", name, "--output-format", "json", *options)
        record = json.loads(out[0])
        assert code == 0
        assert (record["source"] == prompt) == (source is not None)
