"""ftk-generate: its options, and which of its ways of filling or scoring blanks they ask for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ftk.config import compose, section
from ftk.errors import UserError
from ftk.generation.config_groups import BatchConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk.model_parallel.config import InferenceParallelConfig
from ftk.registry import SCORERS
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk_cli.command import Terminated, run
from ftk_cli.inference_options import COLOR, Checkpoints, DevicePrecisionConfig, find_checkpoints, given_flags

if TYPE_CHECKING:
    from ftk.model_parallel.world import World
    from ftk_cli.results import ResultsFile

PROG = "ftk-generate"
DESCRIPTION = """Fills blanks with a trained model: those that the task makes in a subset of DATA, or
those in your own prompts, one a line. Prints S- source, T- reference, H- score and tokens, D- score and text,
P- log-probabilities, A- alternatives, I- steps, N- score of a text, L- log-probability of known answers, F- filled
text, E- what is wrong with a prompt.
Examples: ftk-generate data-bin --path run --gen-subset valid;
echo "Ng is an adjunct professor at [MASK] ." | ftk-generate --path run --input -"""
_MOST_SAMPLES = 10**15


@dataclass(kw_only=True)
class GenerateConfig:
    data: str | None = field(
        default=None,
        metadata={
            "help": "folder written by ftk-preprocess; not with --input",
            "positional": True,
            "metavar": "DATA",
            "path": True,
        },
    )
    path: str = field(
        metadata={
            "help": "checkpoint, or a run's folder (its best checkpoint, else its last); several with colons between "
            "are an ensemble",
            "metavar": "PATH",
        }
    )
    gen_subset: str | None = field(
        default=None, metadata={"help": "split of DATA to fill blanks in; valid if not given"}
    )
    input: str | None = field(
        default=None, metadata={"help": "text file with one prompt a line, - for standard input", "metavar": "FILE"}
    )
    input_format: str = field(
        default="auto",
        metadata={
            "help": "a line of --input is a prompt (text), a prompt and constraints of its own with tabs between "
            "(tabs, as in fairseq), or a JSON object with prompt and options of its own: constraints, prefix, seed, "
            "max_len ... (json); auto: json for files named .jsonl or .json, else text",
            "choices": ("auto", "text", "tabs", "json"),
        },
    )
    max_samples: int | None = field(default=None, metadata={"help": "stop after this many", "unit": "samples"})
    output_format: str = field(
        default="text", metadata={"help": "fairseq's lines, or one JSON object a line", "choices": ("text", "json")}
    )
    scoring: list[str] = field(
        default_factory=list, metadata={"help": "score the answers to DATA by these, e.g. exact_match,token_f1"}
    )

    results_path: str | None = field(
        default=None,
        metadata={
            "help": "write to this file, record by record, instead of printing; the same command continues there "
            "what was interrupted",
            "metavar": "FILE",
        },
    )
    overwrite_results: bool = field(default=False, metadata={"help": "replace the content of --results-path"})
    on_error: str = field(
        default="continue",
        metadata={
            "help": "a prompt that cannot be answered: say so in its place and continue (exit code 1 at the end), "
            "or stop",
            "choices": ("continue", "stop"),
        },
    )
    print_step: bool = field(
        default=False, metadata={"help": "print the steps of each sample too: tokens of its best answers"}
    )
    color: str = COLOR
    score_reference: bool = field(
        default=False,
        metadata={
            "help": "score known answers instead of finding some: the references in DATA, or those in --input FILE, "
            "whose lines are prompt, tab, answer (...), or JSON with prompt and answers or candidates"
        },
    )
    score_end: bool = field(
        default=True, metadata={"help": "with --score-reference --input: score the token that ends an answer, too"}
    )

    def line_format(self) -> str:
        """What a line of `input` is: text, tabs or json."""
        if self.input_format != "auto":
            return self.input_format
        return "json" if (self.input or "").endswith((".jsonl", ".json")) else "text"

    def _prints_filled_text(self) -> bool:
        printed = self.output_format == "text" and self.results_path is None
        return self.input is not None and printed and not self.score_reference

    def validate(self) -> Iterator[str]:
        if (self.data is None) == (self.input is None):
            found = "missing, and so is DATA" if self.input is None else "given, and so is DATA"
            yield f"input is {found}; give a preprocessed folder or --input FILE, one of the two"
        if self.gen_subset is not None and self.data is None:
            yield "gen_subset names a split of DATA; it does not go with --input"
        if self.input_format != "auto" and (self.input is None or self.score_reference):
            yield f"input_format is {self.input_format}; it goes with --input, and not with --score-reference"
        if self.max_samples is not None and not 1 <= self.max_samples <= _MOST_SAMPLES:
            yield f"max_samples is {self.max_samples}; it must be from 1 to {_MOST_SAMPLES}"
        if self.scoring and self.data is None:
            yield "scoring needs reference answers; it goes with DATA, not with --input"
        if self.overwrite_results and self.results_path is None:
            yield "overwrite_results is on, but there is no results_path"
        both = (self.input or "", self.results_path or "")
        if all(both) and len(set(map(os.path.realpath, both))) == 1:
            yield "input and results_path are the same file; write the results to another"
        if self.scoring and self.results_path is not None and self.output_format != "json":
            yield "scoring and results_path go together with --output-format json, from which a later run can score"
        if self.score_reference and self.scoring:
            yield "score_reference finds no answers; scoring does not go with it"
        if self.score_reference and self.print_step:
            yield "score_reference takes no steps; print_step does not go with it"
        if self.on_error == "stop" and self.input is None:
            yield "on_error is stop; it goes with --input, whose lines may be wrong"
        if self.color == "always" and not self._prints_filled_text():
            yield "color is always; it goes with text lines of --input that are printed"
        if not self.score_end and (not self.score_reference or self.input is None):
            yield "score_end is off; it goes with --score-reference --input"
        for name in self.scoring:
            if name not in SCORERS:
                yield f"scoring is {name!r}; there are: {', '.join(SCORERS.names())}"


@dataclass(kw_only=True)
class GenerateRoot:
    generate: GenerateConfig = section("what to fill")
    generation: FillConfig = section("how to search")
    processors: ProcessorConfig = section("logits processors")
    parallel: InferenceParallelConfig = section("parallel")
    common: DevicePrecisionConfig = section("common")

    def validate(self) -> Iterator[str]:
        if self.generate.score_reference:
            unused = given_flags(
                "generation", self.generation, without=("length_penalty", "truncate", "misspelt_blanks")
            )
            unused += given_flags("processors", self.processors)
            if unused:
                yield (
                    f"--score-reference asks the model itself about given answers and does not use "
                    f"{', '.join(unused)}; leave {'it' if len(unused) == 1 else 'them'} out"
                )
        if self.generate.data is not None:
            if self.generation.truncate != "error":
                yield "--truncate goes with --input; samples of DATA are as long as in training"
            if self.generation.misspelt_blanks != "refuse":
                yield "--misspelt-blanks goes with --input; samples of DATA have no text that could hold them"


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


def body(argv: list[str]) -> int:
    root = compose(GenerateRoot, PROG, DESCRIPTION, argv)
    from ftk.checkpoint.layout import MANIFEST
    from ftk.model_parallel.collective import check_same_files
    from ftk.model_parallel.same_start import options_by_flag
    from ftk.model_parallel.world import open_world, resolve_device
    from ftk_cli.fill_prompts import fill_prompts
    from ftk_cli.fill_subset import fill_subset
    from ftk_cli.progress import say
    from ftk_cli.score_reference import score_lines, score_subset

    device = resolve_device(root.common.device)
    with ExitStack() as stack:
        facts = options_by_flag(PROG, root)
        world = stack.enter_context(open_world(root.parallel.whole(), device, facts))
        stack.enter_context(world.name_missing_ranks())
        if world.size > 1 and root.generate.input == "-":
            raise UserError("--input - cannot be read by several processes; write the prompts to a file")
        if not world.is_main:  # it works along, and the main process speaks
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(silence))
        options = root.generate
        checkpoints = find_checkpoints(options.path, root.generation.lm_path, world)
        files = {"--path": checkpoints.model, "--lm-path": checkpoints.language_model or []}
        check_same_files(world, {name: [folder / MANIFEST for folder in folders] for name, folders in files.items()})
        if options.input is not None:
            check_same_files(world, {"--input": [Path(options.input)]})
        results = _open_results(root, checkpoints, world)
        if results is not None:
            stack.enter_context(closing(results))
        try:
            if options.data is not None:
                of_data = score_subset if options.score_reference else fill_subset
                return of_data(root, options.data, checkpoints, results, world)
            assert options.input is not None, "validated"
            of_lines = score_lines if options.score_reference else fill_prompts
            return of_lines(root, options.input, checkpoints, results, world)
        except (KeyboardInterrupt, Terminated):
            if results is not None and results.is_ours:
                again = "the same command" + (" without --overwrite-results" if options.overwrite_results else "")
                say(PROG, f"{results.path} has the answers so far; run {again} to continue")
            raise


_DECIDING = ("gen_subset", "output_format", "print_step", "score_reference", "score_end")


def _open_results(root: GenerateRoot, checkpoints: Checkpoints, world: World) -> ResultsFile | None:
    """The file of --results-path, if it was given and is of this command."""
    from ftk_cli.results import ResultsFile, checkpoint_identity

    options = root.generate
    if options.results_path is None:
        return None
    generation = dataclasses.asdict(root.generation)
    del generation["lm_path"]  # its identity is more precise
    of_lm = checkpoint_identity(checkpoints.language_model) if checkpoints.language_model is not None else {}
    settings = {
        **{name: getattr(options, name) for name in _DECIDING},
        "input_format": options.line_format(),
        **{name: path and os.path.abspath(path) for name, path in (("data", options.data), ("input", options.input))},
        **checkpoint_identity(checkpoints.model),
        **{f"lm_{name}": value for name, value in of_lm.items()},
        "ema": root.common.ema,
        "precision": root.common.precision,
        **generation,
        **dataclasses.asdict(root.processors),
    }
    folders = [*checkpoints.model, *(checkpoints.language_model or ())]
    if root.common.precision == "fp32" and not _small_weights(folders):
        for only_speed in dataclasses.fields(BatchConfig):  # no answer depends on it
            del settings[only_speed.name]
    as_json = options.output_format == "json"
    return ResultsFile(
        options.results_path, settings, as_json=as_json, overwrite=options.overwrite_results, world=world
    )


def _small_weights(folders: Sequence[Path]) -> bool:
    """Whether one of these checkpoints is quantised."""
    from ftk.checkpoint import read_config
    from ftk.checkpoint.quantize import quantization_of

    return any(quantization_of(read_config(folder)) is not None for folder in folders)
