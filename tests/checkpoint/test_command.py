"""ftk-checkpoint as its users meet it: output, exit codes, clear lines instead of tracebacks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import ftk
from ftk.checkpoint import save_checkpoint
from ftk.models import build_model
from ftk.registry import CONVERTERS
from ftk_cli.checkpoint import main
from tests.byte_tokenizer import byte_tokenizer
from tests.processes import run_command, small_files_only
from tests.small_run import SHAPE, save_model, save_run

GOLDEN = Path(__file__).parents[1] / "golden" / "glm_tiny"
ORIGINAL = str(GOLDEN / "original_checkpoint")


@pytest.fixture
def converted(tmp_path: Path, capfd) -> str:
    folder = str(tmp_path / "converted")
    assert main(["convert", "--from", "glm", ORIGINAL, folder, "--num-attention-heads", "4"]) == 0
    assert "it has no tokenizer and cannot read text" in capfd.readouterr().out
    return folder


def test_convert_there_and_back_by_the_real_command(tmp_path: Path, command) -> None:
    def said(*arguments: str) -> str:
        done = command("ftk-checkpoint", *arguments, cwd=tmp_path, code=0)
        return done.stdout

    assert said("convert", "--from", "glm", ORIGINAL, "ours", "--num-attention-heads", "4").startswith("wrote ours")
    done = command("ftk-checkpoint", "convert", "--from", "hf", "ours", "other", cwd=tmp_path)
    assert "ours: is ftk's own; --to NAME writes it in another form, without --from" in done.stderr
    said("convert", "ours", "--to", "glm", "theirs", "--model-parallel-size", "2")
    said("convert", "--from", "glm", "--num-attention-heads", "4", "theirs", "again")
    for one, other in [("ours", "again")]:
        weights = "model/tensors_00000_of_00001.safetensors"
        assert (tmp_path / one / weights).read_bytes() == (tmp_path / other / weights).read_bytes()
    assert said("verify", "ours", "again") == "ours: whole\nagain: whole\n"


def test_convert_from_one_form_to_another_is_that_by_way_of_ftks(converted: str, tmp_path: Path, capfd) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    assert main(["convert", "--to", "hf", converted, str(tmp_path / "two")]) == 0
    command = ["convert", "--from=glm", ORIGINAL, "--num-attention-heads", "4", "--to=hf", str(tmp_path / "one")]
    assert main(command) == 0
    assert f"wrote {tmp_path / 'one'}, for hf" in capfd.readouterr().out
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert main(command) == 2
    assert main([*command, "--overwrite", "--max-shard-size", "100KB"]) == 0
    assert (tmp_path / "one" / "model.safetensors.index.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "one", "two"]
    assert main(["convert", "--from", "hf", "--to", "hf", str(tmp_path / "one"), str(tmp_path / "three")]) == 2
    assert "say whose checkpoint it is, --from NAME (" in capfd.readouterr().err
    assert main(["convert", "--form=hf", "a", "b"]) == 2
    assert "unknown flag --form=hf; did you mean --from?" in capfd.readouterr().err
    assert main(["convert", str(tmp_path / "two"), str(tmp_path / "three")]) == 2
    assert "two has the config.json of a Hugging Face folder: --from hf" in capfd.readouterr().err


def test_the_form_of_a_plugin_is_read_with_user_dir(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(CONVERTERS, "_entries", dict(CONVERTERS._entries))
    (tmp_path / "their_form.py").write_text(
        "from ftk.models.conversion import FileFormat\nfrom ftk.registry import CONVERTERS, register_converter\n"
        "glm = CONVERTERS.get('glm')\nregister_converter('theirs', config=glm.config)(glm.target)\n"
    )
    asked = ["convert", "--from", "theirs", ORIGINAL, str(tmp_path / "one"), "--num-attention-heads", "4"]
    assert main(asked) == 2
    assert "theirs" in capfd.readouterr().err
    assert main([*asked, "--user-dir", str(tmp_path / "their_form.py")]) == 0
    assert "wrote " in capfd.readouterr().out


def test_options_of_the_task_that_another_form_does_not_hold_are_named(tmp_path: Path, capfd) -> None:
    save_run(tmp_path / "run", None, vocab_size=64, **SHAPE)
    assert main(["convert", "--to", "hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    said = "hf records no options of the task; for the same loss give ftk-validate --seq-length 48\n"
    assert capfd.readouterr().err.endswith(said)


def test_a_task_that_another_form_does_not_hold_is_named(tmp_path: Path, capfd) -> None:
    byte_tokenizer(tmp_path / "bytes").save(tmp_path / "tokenizer")
    model = build_model("gpt2", vocab_size=320, **SHAPE)
    save_model(tmp_path / "run", model, tmp_path / "tokenizer", task={"_name": "sft", "template": "alpaca"})
    assert main(["convert", "--to", "hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert "### Response:" in (tmp_path / "hf" / "chat_template.jinja").read_text()
    said = f"hf is opened for the task causal_lm; ftk-validate and ftk-evaluate ask {tmp_path}/run as sft asks\n"
    assert capfd.readouterr().err.endswith(said)


def test_inspect_says_what_it_is(converted: str, capfd) -> None:
    assert main(["inspect", converted]) == 0
    text = capfd.readouterr().out
    assert "model      glm" in text
    assert "num_attention_heads 4" in text
    assert "num_updates 150000" in text
    assert "none: this checkpoint cannot read text" in text
    (row,) = [line.split() for line in text.splitlines() if "qkv.weight" in line]
    assert row == ["layers.{0..1}.attention.qkv.weight", "192x64", "float32", "24,576", "98.3", "kB"]
    assert "116,608" in text
    assert main(["inspect", converted, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["parameters"] == 116608
    assert facts["model"]["num_layers"] == 2
    assert facts["trainer_state"]["num_updates"] == 150000


def test_inspect_shows_tied_weights_and_optimizer(saved: Path, capfd) -> None:
    assert main(["inspect", str(saved.parent)]) == 0
    text = capfd.readouterr().out
    assert "head.weight is embedding.weight" in text
    assert "kept: training can continue" in text
    assert "tokenizer  test" in text
    assert "trainer    best.value 1.5" in text
    os.truncate(saved / "tokenizer" / "deeper" / "vocabulary.bin", 5)
    assert main(["inspect", str(saved)]) == 1
    assert "PROBLEM  tokenizer/deeper/vocabulary.bin: has 5 bytes; 2304 were written" in capfd.readouterr().out


def test_verify_lists_problems_and_fails(saved: Path, capfd) -> None:
    assert main(["verify", str(saved)]) == 0
    assert capfd.readouterr().out == f"{saved}: whole\n"
    weights = saved / "model" / "tensors_00000_of_00001.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert main(["verify", str(saved)]) == 2
    assert f"{saved}: 1 problem\n" in capfd.readouterr().out
    (saved / "config.yaml").unlink()
    assert main(["verify", str(saved.parent)]) == 2  # a run's folder: each of its checkpoints
    captured = capfd.readouterr()
    assert f"{saved}: 2 problems" in captured.out
    assert "  config.yaml: missing" in captured.out
    assert "  model/tensors_00000_of_00001.safetensors: content differs" in captured.out
    assert "ftk-checkpoint: 1 broken checkpoint" in captured.err
    (saved / "manifest.json").unlink()
    assert main(["verify", str(saved), str(saved.parent)]) == 2
    assert capfd.readouterr().out.count("  manifest.json: cannot be read") == 2


def test_average_by_name_and_by_run(saved: Path, tmp_path: Path, capfd) -> None:

    from .conftest import Awkward

    options = {"config": {"model": {"_name": "awkward", "hidden_size": 6}, "note": "注"}}
    tokenizer = saved / "tokenizer"
    second = save_checkpoint(
        saved.parent / "checkpoint_4", model=Awkward(1), trainer_state={"num_updates": 4},
        tokenizer_folder=tokenizer, **options,
    )  # fmt: skip
    assert main(["average", "--inputs", str(saved), str(second), "--output", str(tmp_path / "a")]) == 0
    assert main(["average", "--inputs", str(saved.parent), "--last", "2", "--output", str(tmp_path / "b")]) == 0
    capfd.readouterr()
    weights = "model/tensors_00000_of_00001.safetensors"
    assert (tmp_path / "a" / weights).read_bytes() == (tmp_path / "b" / weights).read_bytes()
    assert main(["average", "--inputs", str(saved), "--output", str(tmp_path / "c")]) == 2
    assert "a mean needs two or more" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "absent"], "absent: no such folder"),
        (["inspect"], "PATH is missing: checkpoint, or a run's folder"),
        (["verify", "absent"], "absent: no such folder"),
        (["verify", __file__], "is a file; a checkpoint is a folder"),
        (["verify"], "PATH is missing: checkpoints; of a run"),
        (["inspect", ORIGINAL], "ftk-checkpoint convert --from glm"),
        (["average", "--output", "x"], "inputs is empty"),
        (
            ["convert", ORIGINAL, "x"],
            "--from NAME (fairseq, glm, hf, megatron, modelcenter), or who is to read it, --to NAME (glm, hf, "
            "modelcenter)",
        ),
        (["convert", "--from", "glm", ORIGINAL, "x"], "--arch or --num-attention-heads"),
        (["convert", "--from", "glm", ORIGINAL, "x", "--arch", "glm_tiny"], "has num_layers 2"),
        (["convert", "--from", "glm", ORIGINAL, "x", "--arch", "glm_tny"], "unknown architecture"),
        (
            ["convert", "--from", "glm", ORIGINAL, "x", "--num-attention-heads", "0"],
            "--num-attention-heads is 0; it must be at least 1",
        ),
        (
            ["convert", "--to", "glm", "x", "y", "--model-parallel-size", "0"],
            "--model-parallel-size is 0; it must be at least 1",
        ),
        (["convert", "--from", "glm", "absent", "x"], "absent: no such folder"),
        (["convert", "--from", "glm", __file__, "x", "--num-attention-heads", "4"], "is a file"),
        (
            ["convert", "--from", "nemo", "a", "b"],
            "unknown converter 'nemo'; there are: fairseq, glm, hf, megatron, modelcenter",
        ),
        (["convert", "--to", "megatron", "a", "b"], "unknown converter 'megatron'; there are: glm, hf, modelcenter"),
        (["convert", "--from", "megatron", ORIGINAL, "x"], "there is no folder"),
        (["convert", "--to", "glm", "absent", "x"], "absent: no such folder"),
        (["convert", "--from", "glm", ORIGINAL, "x", "--num-atention-heads", "4"], "--num-attention-heads"),
        (["shrink"], "unknown command 'shrink'"),
    ],
)
def test_mistakes_are_one_clear_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.startswith("ftk-checkpoint: ")
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_without_tokenizer_says_so_where_text_is_wanted(converted: str) -> None:
    from ftk.errors import UserError

    with pytest.raises(UserError, match="holds no tokenizer"):
        ftk.load_tokenizer(converted)


def test_tokenizer_goes_into_the_checkpoint_and_must_fit(tmp_path: Path, capfd) -> None:
    import torch

    from ftk.models import build_model
    from ftk.models.glm.convert import to_original

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s"]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(words) + "\n")
    model = build_model("glm_tiny", vocab_size=128)
    (tmp_path / "original" / "5").mkdir(parents=True)
    (tmp_path / "original" / "latest").write_text("5")
    content = {"module": to_original(model.state_dict(), model.config)}
    torch.save(content, tmp_path / "original" / "5" / "mp_rank_00_model_states.pt")

    arguments = ["convert", "--from", "glm", str(tmp_path / "original"), str(tmp_path / "ours"), "--arch"]
    arguments += ["glm_tiny", "--tokenizer", "bert_wordpiece", "--tokenizer-path", str(vocabulary)]
    assert main(arguments) == 0
    assert "no tokenizer" not in capfd.readouterr().out
    tokenizer = ftk.load_tokenizer(tmp_path / "ours")
    assert tokenizer.decode(tokenizer.encode("hello worlds")) == "hello worlds"
    assert main(["verify", str(tmp_path / "ours")]) == 0

    vocabulary.write_text("\n".join(words + [f"w{i}" for i in range(300)]) + "\n")
    assert main([*arguments, "--overwrite"]) == 2
    assert "this is not the tokenizer it was trained with" in capfd.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["original", "ours", "vocab.txt"]


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["convert", "ours", "theirs", "--to", "glm"], "theirs/150000/mp_rank_00_model_states.pt"),
        (["convert", ORIGINAL, "ours2", "--from", "glm", "--num-attention-heads", "4"], "ours2"),
        (["export", "ours", "out"], "out"),
        (["export", "ours", "out.safetensors", "--format", "safetensors"], "out.safetensors"),
        (["export", "ours", "out.pt2", "--format", "export"], "out.pt2"),
        (["average", "--inputs", "ours", "same", "--output", "mean"], "mean"),
    ],
    ids=["convert-to", "convert-from", "export", "safetensors", "torch-export", "average"],
)
def test_full_disk_is_one_line_with_the_file_and_leaves_nothing(tmp_path: Path, capfd, command, file: str) -> None:
    for name in ("ours", "same"):
        folder = str(tmp_path / name)
        assert main(["convert", "--from", "glm", ORIGINAL, folder, "--num-attention-heads", "4"]) == 0
    done = run_command("ftk-checkpoint", *command, cwd=tmp_path, before=small_files_only, code=1)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("ftk-checkpoint: ")
    assert "File too large" in line
    assert line.endswith(f": {file}")
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "same"]


@pytest.mark.parametrize("name", ["theirs.tmp", "out.tokenizer.tmp", "out.tmp", ".out.safetensors.tmp"])
def test_planted_links_are_not_followed_and_leftovers_of_killed_commands_go(tmp_path: Path, converted, name) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (tmp_path / name).symlink_to(precious)
    for output in ("theirs", "out", "out.safetensors"):
        (tmp_path / f"{output}.tmp-killed").mkdir()
    (tmp_path / "out.safetensors").symlink_to(precious / "new")
    assert main(["convert", "--to", "glm", converted, str(tmp_path / "theirs")]) == 0
    assert main(["export", converted, str(tmp_path / "out")]) == 0
    file = str(tmp_path / "out.safetensors")
    assert main(["export", converted, file, "--format", "safetensors", "--overwrite"]) == 0
    assert not Path(file).is_symlink()
    assert [path.name for path in precious.iterdir()] == ["thesis.txt"]
    left = {"converted", "precious", name, "theirs", "out", "out.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == left
