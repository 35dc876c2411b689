"""ftk-checkpoint convert: checkpoints of other programs become ftk's, and ftk's theirs."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from ftk.config import Chosen, compose, section, slot
from ftk.config.flags import shown_default
from ftk.config.options import option, options_of, required
from ftk.errors import UserError
from ftk.registry import CONVERTERS, SPECIAL_TOKENS, TASKS, TOKENIZERS, Subset
from ftk_cli.preprocess import HELP, tokenizer_of
from ftk_cli.progress import say

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer

PROG = "ftk-checkpoint"
_WRITTEN = Subset(CONVERTERS, lambda form: getattr(form.config, "is_written", True))


@dataclass(kw_only=True)
class ConvertConfig:
    source: str = required("checkpoint to read", positional=True, metavar="SRC", path=True)
    output: str = required("checkpoint to write", positional=True, metavar="DST", path=True)
    overwrite: bool = option(False, "replace an older checkpoint of this name")
    user_dir: str | None = option(None, "your package, folder or file with the model or the form", metavar="PATH")


@dataclass(kw_only=True)
class ConvertToConfig(ConvertConfig):
    ema: bool = option(False, "the moving average of the weights, not the weights")


@dataclass(kw_only=True)
class ConvertFrom:
    convert: ConvertConfig = section("options")
    form: Chosen = slot(CONVERTERS, flag="--from", help="SRC is of this form, DST a checkpoint of ftk's")


@dataclass(kw_only=True)
class ConvertFromWithTokenizer(ConvertFrom):
    tokenizer: Chosen = slot(TOKENIZERS, flag="--tokenizer", help="goes into the checkpoint")
    special_tokens: Chosen = slot(SPECIAL_TOKENS, flag="--special-tokens", default="plain", help=HELP)


@dataclass(kw_only=True)
class ConvertThrough(ConvertFrom):
    written: Chosen = slot(_WRITTEN, flag="--to", help="DST is of this form")


@dataclass(kw_only=True)
class ConvertThroughWithTokenizer(ConvertThrough, ConvertFromWithTokenizer):
    """Both."""


@dataclass(kw_only=True)
class ConvertTo:
    convert: ConvertToConfig = section("options")
    form: Chosen = slot(_WRITTEN, flag="--to", help="SRC is a checkpoint of ftk's, DST of this form")


def convert(argv: list[str]) -> int:
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith(("--from=", "--to=")) else [word])]
    forms = {flag: argv[argv.index(flag) + 1 :][:1] for flag in ("--from", "--to") if flag in argv}
    if forms.get("--to") == ["ftk"]:  # which --from alone means
        place = argv.index("--to")
        argv = argv[:place] + argv[place + 2 :]
        del forms["--to"]
    flags = {argument.split("=")[0] for argument in argv}
    description = (
        "Converts checkpoints of other programs to ftk's (--from NAME) and back (--to NAME), or of one to another's"
        " (both). --tokenizer NAME --tokenizer-path PATH puts a tokenizer next to the weights. A name with --help all"
        " lists its options."
    )
    asks_help = not flags.isdisjoint({"-h", "--help"})
    if not forms and (near := next(filter(None, (_misspelt(argument) for argument in argv)), None)):
        raise UserError("unknown flag {}; did you mean {}?".format(*near))
    if (not forms and not asks_help) or (len(forms) == 2 and forms["--from"] == forms["--to"]):
        read, written = (", ".join(names.names()) for names in (CONVERTERS, _WRITTEN))
        theirs = next((argument for argument in argv if Path(argument, "config.json").is_file()), None)
        hint = "" if theirs is None else f"; {theirs} has the config.json of a Hugging Face folder: --from hf"
        raise UserError(
            f"say whose checkpoint it is, --from NAME ({read}), or who is to read it, --to NAME ({written}), or both "
            f"with two names{hint}"
        )
    if forms.keys() == {"--to"}:
        return _convert_to(compose(ConvertTo, f"{PROG} convert", description, argv))
    # A help that searches finds the tokenizer's options too; one that names no form shows both flags.
    plain = not asks_help and "--tokenizer" not in flags
    if "--to" in forms or not forms:
        through = ConvertThrough if plain else ConvertThroughWithTokenizer
        return _convert_through(compose(through, f"{PROG} convert", description, argv), argv)
    root = ConvertFrom if plain else ConvertFromWithTokenizer
    return _convert_from(compose(root, f"{PROG} convert", description, argv), argv)


def _misspelt(argument: str) -> tuple[str, str] | None:
    """A flag, and the one of a form that it nearly is."""
    near = get_close_matches(argument.partition("=")[0], ("--from", "--to"), cutoff=0.7)
    return (argument, near[0]) if near and argument.startswith("--") else None


def _convert_through(config: ConvertThrough, argv: list[str]) -> int:
    from ftk.checkpoint.convert import convert_from, convert_to, refuse_to_overwrite
    from ftk.files import temporary_folder

    options, form, output = config.convert, config.written, Path(config.convert.output)
    refuse_to_overwrite(form.build(), form.name, output, overwrite=options.overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output.with_name(f"{output.name}.ftk")) as folder:
        between = convert_from(config.form.build(), options.source, folder / "ftk", tokenizer=_tokenizer(config, argv))
        written = convert_to(form.build(), form.name, between, output, overwrite=options.overwrite)
    print(f"wrote {written}, for {form.name}")
    return 0


def _convert_to(config: ConvertTo) -> int:
    from ftk.checkpoint.convert import convert_to

    options, form = config.convert, config.form
    output = convert_to(
        form.build(), form.name, options.source, options.output, ema=options.ema, overwrite=options.overwrite
    )
    print(f"wrote {output}, for {form.name}")
    if lost := _lost_of_task(options.source, str(output) if form.name == "hf" else None):
        say(PROG, f"{output} {lost}")
    return 0


def _lost_of_task(source: str, output: str | None) -> str:
    """What was lost of the task: the options that a run changed, or, where `output` is opened for another task, all of
    it; "" of a classifier, whose labels other forms record."""
    from ftk.checkpoint import read_config, resolve_model
    from ftk.checkpoint.head import head_in

    tree = read_config(source)
    task = tree.get("task") or {}
    name = str(task.get("_name"))
    config = TASKS.get(name).config if name in TASKS else None
    if config is None or head_in(tree) is not None:
        return ""
    opened = name if output is None else (read_config(resolve_model(output)).get("task") or {}).get("_name")
    if opened != name:
        return f"is opened for the task {opened}; ftk-validate and ftk-evaluate ask {source} as {name} asks"
    changed = [
        (option, task[option.name])
        for option in options_of("task", config)
        if not option.derived and task.get(option.name, option.default) != option.default
    ]
    flags = " ".join(
        option.flags[not value] if isinstance(value, bool) else f"{option.flag} {shown_default(value)}"
        for option, value in changed
    )
    return flags and f"records no options of the task; for the same loss give ftk-validate {flags}"


def _convert_from(config: ConvertFrom, argv: list[str]) -> int:
    from ftk.checkpoint.convert import convert_from

    options, tokenizer = config.convert, _tokenizer(config, argv)
    output = convert_from(
        config.form.build(), options.source, options.output, tokenizer=tokenizer, overwrite=options.overwrite
    )
    without = "; it has no tokenizer and cannot read text (--tokenizer NAME --tokenizer-path PATH adds one)"
    print(f"wrote {output}{'' if (output / 'tokenizer').is_dir() else without}")
    return 0


def _tokenizer(config: ConvertFrom, argv: list[str]) -> Tokenizer | None:
    if not isinstance(config, ConvertFromWithTokenizer):
        return None
    return tokenizer_of(config.tokenizer, config.special_tokens, argv)
