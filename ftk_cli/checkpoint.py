"""ftk-checkpoint: shows, checks, exports, averages and converts checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftk.config.options import option, required
from ftk.errors import UserError, counted, with_flags
from ftk_cli.command import compose_options, run, subcommands
from ftk_cli.convert import PROG, convert

if TYPE_CHECKING:
    from torch import nn

    from ftk.modules.quantization import Quantization

DESCRIPTION = (
    "Shows, checks, exports, averages and converts checkpoints. The folder of a run means its best checkpoint."
)

_ENDINGS = {"safetensors": ".safetensors", "export": ".pt2", "aoti": ".pt2", "onnx": ".onnx"}  # of files, by format


@dataclass(kw_only=True)
class InspectConfig:
    path: str = required("checkpoint, or a run's folder", positional=True, metavar="PATH")
    json: bool = option(False, "print JSON, for programs")


@dataclass(kw_only=True)
class VerifyConfig:
    paths: list[str] = required(
        "checkpoints; of a run's folder every checkpoint is checked", positional=True, metavar="PATH"
    )


@dataclass(kw_only=True)
class AverageConfig:
    inputs: list[str] = option(
        [], "checkpoints to average; or one run's folder with --last", several=True, metavar="PATH"
    )
    last: int | None = option(None, "average the newest of the run", unit="checkpoints")
    output: str = required("checkpoint to write", metavar="PATH")
    ema: bool = option(False, "take their moving averages (--ema-decay), not their weights")
    overwrite: bool = option(False, "replace an older checkpoint of this name")

    def validate(self) -> Iterator[str]:
        if not self.inputs:
            yield "inputs is empty; give --inputs CHECKPOINT CHECKPOINT ..., or --inputs RUN --last N"
        elif self.last is not None and (self.last < 2 or len(self.inputs) != 1):
            yield f"last is {self.last}; --last N, 2 or more, goes with one --inputs, a run's folder"


@dataclass(kw_only=True)
class ExportConfig:
    source: str = required("checkpoint, or a run's folder", positional=True, metavar="SRC", path=True)
    output: str = required("checkpoint or file to write", positional=True, metavar="DST", path=True)
    ema: bool = option(False, "the moving average of the weights becomes the weights, where the run kept one")
    quantize: str | None = option(
        None,
        "round weights of linear layers: int8 with a scale per output, int4 with one per group of inputs",
        choices=("int8", "int4"),
    )
    group_size: int | None = option(
        None,
        "--quantize int4: inputs that share a scale; 32 if not given",
        choices=(32, 64, 128, 256),
        needs={"quantize": "int4"},
        unit="inputs",
    )
    quantize_embedding: bool = option(
        True, "--quantize: the tied embedding and output layer in int8, too", needs={"quantize": True}
    )
    format: str = option(
        "checkpoint",
        "checkpoint (a folder for ftk), or a file for use without ftk: safetensors (weights), export (torch.export "
        "program), aoti (compiled for this processor, AOTInductor), onnx (pip install 'ftk[export]')",
        choices=("checkpoint", "safetensors", "export", "aoti", "onnx"),
    )
    overwrite: bool = option(False, "replace an older checkpoint or file of this name")
    user_dir: str | None = option(None, "your package, folder or file that registers the model", metavar="PATH")


@dataclass(kw_only=True)
class AdapterConfig:
    source: str = required("checkpoint, or a run's folder", positional=True, metavar="SRC", path=True)
    output: str = required("folder to write", positional=True, metavar="DST", path=True)
    names: str = option(
        "ftk",
        "of the layers: those of ftk's model, or of the same model of transformers, with its layouts, on which peft "
        "puts it then",
        choices=("ftk", "huggingface"),
    )
    overwrite: bool = option(False, "replace an older adapter of this name")


@dataclass(kw_only=True)
class MergeConfig:
    source: str = required(
        "checkpoint or run with an adapter; or an adapter alone, with --base", positional=True, metavar="SRC", path=True
    )
    output: str = required("checkpoint to write", positional=True, metavar="DST", path=True)
    base: str | None = option(
        None,
        "where SRC is an adapter alone: checkpoint or Hugging Face folder of the model that it was trained beside",
        metavar="PATH",
    )
    ema: bool = option(False, "the moving average of the adapter, where the run kept one")
    overwrite: bool = option(False, "replace an older checkpoint of this name")
    user_dir: str | None = option(None, "your package, folder or file that registers the model", metavar="PATH")


@dataclass(kw_only=True)
class GrowConfig:
    source: str = required("checkpoint, run or Hugging Face folder to read", positional=True, metavar="SRC", path=True)
    output: str = required("checkpoint to write", positional=True, metavar="DST", path=True)
    add_tokens: str | None = option(
        None,
        "tokens that the vocabulary learns, one per line; those that are one token already are left out",
        path=True,
        metavar="FILE",
    )
    new_rows: str = option(
        "pieces",
        "their rows of embedding and output layer: pieces, the mean of the rows of the tokens that spelt them before; "
        "mean, that of all tokens' rows",
        needs={"add_tokens": True},
        choices=("pieces", "mean"),
    )
    make_vocab_size_divisible_by: int | None = option(
        None,
        "if rows are added, their number becomes a multiple of this; as in the model's task if not given",
        needs={"add_tokens": True},
        min=1,
        max=10**6,
        unit="tokens",
    )
    max_positions: int | None = option(None, "longer texts", min=2, max=10**8, unit="tokens")
    new_positions: str = option(
        "repeat",
        "tables of learned positions: repeat, they go on with a copy of their rows; interpolate, they are stretched, "
        "which changes old positions too (positions within an answer are always repeated)",
        needs={"max_positions": True},
        choices=("repeat", "interpolate"),
    )
    ema: bool = option(False, "the moving average of the weights becomes the weights")
    overwrite: bool = option(False, "replace an older checkpoint of this name")
    user_dir: str | None = option(None, "your package, folder or file that registers the model", metavar="PATH")

    def validate(self) -> Iterator[str]:
        if self.add_tokens is None and self.max_positions is None:
            yield "nothing grows; give add_tokens, max_positions or both"


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


def inspect(argv: list[str]) -> int:
    config = compose_options(InspectConfig, f"{PROG} inspect", "Shows what a checkpoint is.", argv)
    from ftk.checkpoint.inspect import as_json, inspect_checkpoint, render

    summary = inspect_checkpoint(config.path)
    print(as_json(summary) if config.json else with_flags(render(summary)))
    return 1 if summary.problems else 0


def verify(argv: list[str]) -> int:
    config = compose_options(VerifyConfig, f"{PROG} verify", "Checks every file: size and sha256.", argv)

    from ftk.checkpoint import verify
    from ftk.checkpoint.layout import is_checkpoint, is_remains, numbered_checkpoints, resolve_checkpoint

    broken = 0
    for path in map(Path, config.paths):
        candidates = [path] if is_checkpoint(path) or is_remains(path) else numbered_checkpoints(path)[::-1]
        for folder in candidates or [resolve_checkpoint(path)]:
            problems = verify(folder)
            print(f"{folder}: " + ("whole" if not problems else counted(len(problems), "problem")))
            for problem in problems:
                print(f"  {problem}")
            broken += bool(problems)
    if broken:
        raise UserError(f"{counted(broken, 'broken checkpoint')}; see the list above")
    return 0


def average(argv: list[str]) -> int:
    description = "Writes a checkpoint whose weights are the mean of others'."
    config = compose_options(AverageConfig, f"{PROG} average", description, argv)
    from ftk.checkpoint.average import average_checkpoints, newest_checkpoints

    inputs: Sequence[object] = config.inputs
    if config.last is not None:
        inputs = newest_checkpoints(config.inputs[0], config.last)
    paths = [str(path) for path in inputs]
    output = average_checkpoints(paths, config.output, ema=config.ema, overwrite=config.overwrite)
    print(f"wrote {output}, the mean of " + ", ".join(map(str, inputs)))
    return 0


def export(argv: list[str]) -> int:
    description = (
        "Writes the weights alone, with configuration and tokenizer: what a trained model needs. --quantize makes them"
        " smaller, --format other files of them, for use without ftk."
    )
    config = compose_options(ExportConfig, f"{PROG} export", description, argv)
    output = _export_checkpoint(config) if config.format == "checkpoint" else _export_file(config)
    rounded = f", rounded to {config.quantize}" if config.quantize else ""
    average = "moving average of the " if config.ema else ""
    program = "" if config.format in ("checkpoint", "safetensors") else "a program with "
    print(f"wrote {output}, {program}the {average}weights of {config.source}{rounded}")
    return 0


def _export_checkpoint(config: ExportConfig) -> object:
    from ftk.checkpoint.average import export_weights, save_quantized
    from ftk.checkpoint.save import refuse_to_replace

    meant = [name for name, ending in _ENDINGS.items() if Path(config.output).suffix == ending]
    if meant:
        raise UserError(
            f"{config.output}: would be a folder, a checkpoint; for a file give --format {' or '.join(meant)}"
        )
    if config.quantize is None:
        return export_weights(config.source, config.output, ema=config.ema, overwrite=config.overwrite)

    refuse_to_replace(Path(config.output), overwrite=config.overwrite)
    folder, model, how = _quantized(config)
    return save_quantized(folder, config.output, model, how, ema=config.ema, overwrite=config.overwrite)


def _export_file(config: ExportConfig) -> object:
    from ftk.checkpoint import export as files
    from ftk.checkpoint.finite import refuse_non_finite
    from ftk.checkpoint.quantize import checkpoint_metadata
    from ftk.hub import load_model

    files.refuse_file(config.output, config.overwrite, _ENDINGS[config.format])
    if config.quantize is None and config.format == "safetensors":
        return files.stream_safetensors(
            config.source,
            config.output,
            ema=config.ema,
            metadata=checkpoint_metadata(config.source),
            overwrite=config.overwrite,
        )
    if config.quantize is None:
        model = load_model(config.source, "cpu", ema=config.ema, user_dir=config.user_dir)
        refuse_non_finite(model.state_dict(), config.source)
    else:
        folder, model, how = _quantized(config)
        if config.format == "safetensors":
            metadata = checkpoint_metadata(folder, how)
            tensors = model.state_dict()
            return files.write_safetensors(config.output, tensors, metadata=metadata, overwrite=config.overwrite)
    write = {"export": files.export_program, "aoti": files.export_aoti, "onnx": files.export_onnx}[config.format]
    return write(model, config.output, overwrite=config.overwrite)


def _quantized(config: ExportConfig) -> tuple[Path, nn.Module, Quantization]:
    """The checkpoint's folder, its model with rounded weights, and how they were rounded."""
    from ftk.checkpoint.adapter import refuse_adapted
    from ftk.checkpoint.finite import refuse_non_finite
    from ftk.checkpoint.layout import resolve_checkpoint
    from ftk.checkpoint.quantize import refuse_quantized
    from ftk.hub import load_model
    from ftk.modules.quantization import Quantization, quantize_model

    folder = resolve_checkpoint(config.source)  # once: a run that saves meanwhile may change its links
    refuse_quantized(folder, "--quantize")
    refuse_adapted(folder, "--quantize")
    assert config.quantize is not None
    group_size = (config.group_size or 32) if config.quantize == "int4" else None
    how = Quantization(weights=config.quantize, group_size=group_size, embedding=config.quantize_embedding)
    model = load_model(folder, "cpu", ema=config.ema, user_dir=config.user_dir)
    refuse_non_finite(model.state_dict(), folder)
    quantize_model(model, how)
    return folder, model, how


def adapter(argv: list[str]) -> int:
    description = (
        "Writes the adapter of a checkpoint alone, without its model: a few MB, in the form of peft. --path DST --base"
        " MODEL of other commands opens it, and peft on ftk's model; for peft on the same model of transformers give"
        " --names huggingface."
    )
    config = compose_options(AdapterConfig, f"{PROG} adapter", description, argv)
    from ftk.checkpoint.adapter import write_adapter

    written = write_adapter(config.source, config.output, names=config.names, overwrite=config.overwrite)
    ours = "ftk's model (--names huggingface writes it for peft on a model of transformers)"
    print(f"wrote {written}, for {ours if config.names == 'ftk' else 'a model of transformers'}")
    return 0


def merge(argv: list[str]) -> int:
    description = (
        "Writes a plain checkpoint that gives what a model with an adapter gives. Quantised weights (int8, int4) become"
        " floats again, since sums would not fit their steps."
    )
    config = compose_options(MergeConfig, f"{PROG} merge", description, argv)

    from ftk.checkpoint.adapter import adapter_section
    from ftk.checkpoint.average import save_merged
    from ftk.checkpoint.layout import resolve_model
    from ftk.checkpoint.load import read_config
    from ftk.checkpoint.save import refuse_to_replace
    from ftk.hub import load_model
    from ftk.modules.adapters.adapt import adapted_layers, make_plain

    refuse_to_replace(Path(config.output), overwrite=config.overwrite)
    # Once: a run that saves meanwhile may change its links.
    folder = resolve_model(config.source if config.base is None else config.base)
    path, base = (folder, None) if config.base is None else (config.source, folder)
    model = load_model(path, "cpu", base=base, ema=config.ema, user_dir=config.user_dir)
    layers = adapted_layers(model)
    if not layers and (own := adapter_section(read_config(folder)).get("_name") if base is None else "prefix"):
        what = {"prefix": "a prefix", "p_tuning": "trained prompt tokens"}.get(own, own)
        raise UserError(f"{config.source}: its adapter is {what}, which is no change of weights, and cannot be merged")
    if not layers:
        raise UserError(f"{folder}: has no adapter to merge into weights")
    make_plain(model)
    output = save_merged(
        folder, config.output, model, adapter=config.source, ema=config.ema, overwrite=config.overwrite
    )
    print(f"wrote {output}, with the adapter of {counted(len(layers), 'layer')} in its weights")
    return 0


def grow(argv: list[str]) -> int:
    description = (
        "Writes a checkpoint with more tokens (--add-tokens) or more positions (--max-positions). What the"
        " model gave for old tokens and old positions stays the same."
    )
    config = compose_options(GrowConfig, f"{PROG} grow", description, argv)
    from ftk.checkpoint.grow import grow_checkpoint
    from ftk.plugins import import_plugins
    from ftk.tokenizers.grow import read_tokens

    import_plugins(config.user_dir)
    grown = grow_checkpoint(
        config.source,
        config.output,
        tokens=read_tokens(config.add_tokens) if config.add_tokens is not None else (),
        new_rows=config.new_rows,
        divisor=config.make_vocab_size_divisible_by,
        max_positions=config.max_positions,
        new_positions=config.new_positions,
        ema=config.ema,
        overwrite=config.overwrite,
    )
    if grown.tokens is not None:
        first, last = min(grown.tokens.new.values()), max(grown.tokens.new.values())
        known = f"; one token already: {', '.join(map(repr, grown.tokens.known[:5]))}" if grown.tokens.known else ""
        print(f"{counted(len(grown.tokens.new), 'new token')}, ids {first} to {last}{known}")
        print("vocabulary: {} rows, before {}".format(*reversed(grown.rows)))
    if config.max_positions is not None:
        done = {"repeat": "its rows repeated", "interpolate": "its rows interpolated"}
        computed = "computed for any position; --rope-scaling with --finetune-from stretches rotary ones"
        tables = ", ".join(f"{name}: {done[how]}" for name, how in grown.tables.items()) or computed
        print("positions: {}, before {} ({})".format(*reversed(grown.positions), tables))
    print(f"wrote {grown.output}")
    if grown.tokens is not None:
        print(
            f"encode text with ftk-preprocess --tokenizer {grown.tokenizer} --tokenizer-path {grown.output}/tokenizer"
            f" ..., train with ftk-train DATA --finetune-from {grown.output} ..."
        )
    return 0


body = subcommands(
    PROG,
    DESCRIPTION,
    {
        "inspect": ("show what a checkpoint is: model, parameters, progress, files", inspect),
        "verify": ("check every file of checkpoints against their manifests", verify),
        "export": ("write a checkpoint's weights alone, or their moving average", export),
        "average": ("write the mean of several checkpoints", average),
        "merge": ("write a checkpoint with its adapter merged into its weights", merge),
        "adapter": ("write the adapter of a checkpoint alone", adapter),
        "grow": ("write a checkpoint with more tokens or more positions", grow),
        "convert": ("convert checkpoints of other programs to ftk's and back", convert),
    },
)


if __name__ == "__main__":
    raise SystemExit(main())
