"""Options of ftk-generate."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config import section
from ftk.config.options import option, options_of
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk.model_parallel.config import InferenceParallelConfig
from ftk.registry import SCORERS
from ftk_cli.inference_options import COLOR, ENSEMBLE, DevicePrecisionConfig, given_flags


@dataclass(kw_only=True)
class GenerateConfig:
    data: str | None = option(
        None, "folder written by ftk-preprocess; not with --input", positional=True, metavar="DATA", path=True
    )
    path: str = ENSEMBLE
    gen_subset: str | None = option(None, "split of DATA to answer; valid if not given", daily=True)
    input: str | None = option(
        None, "text file with one prompt per line, - for standard input", daily=True, metavar="FILE"
    )
    input_format: str = option(
        "auto",
        "a line of --input is a prompt (text), a prompt and constraints of its own with tabs between (tabs, as in "
        "fairseq), or a JSON object with prompt, or the messages of a conversation, and options of its own: "
        "constraints, prefix, seed, max_len ... (json); auto: json for files named .jsonl or .json, else text",
        choices=("auto", "text", "tabs", "json"),
    )
    max_samples: int | None = option(None, "stop after this many", daily=True, min=1, unit="samples")
    output_format: str = option(
        "text",
        "the texts with their answers; fairseq's lines, with all figures; or one JSON object per line",
        daily=True,
        choices=("text", "fairseq", "json"),
    )
    scoring: list[str] = option([], "score the answers to DATA by these, e.g. exact_match,token_f1", daily=True)

    results_path: str | None = option(
        None,
        "write to this file, record by record, instead of printing (with --output-format json); the same command "
        "continues there what was interrupted",
        daily=True,
        metavar="FILE",
    )
    overwrite_results: bool = option(False, "replace the content of --results-path", needs={"results_path": True})
    on_error: str = option(
        "continue",
        "a prompt that cannot be answered: say so in its place and continue (exit code 1 at the end), or stop",
        needs={"input": True},
        choices=("continue", "stop"),
    )
    print_step: bool = option(False, "print the steps of each sample too: tokens of its best answers")
    color: str = COLOR
    score_reference: bool = option(
        False,
        "score known answers instead of finding some: the references in DATA, or those in --input FILE, whose lines "
        "are prompt, tab, answer (...), or JSON with prompt and answers or candidates",
    )
    score_end: bool = option(
        True,
        "with --score-reference --input: score the token that ends an answer, too",
        needs={"score_reference": True, "input": True},
    )

    def line_format(self) -> str:
        """What a line of `input` is: text, tabs or json."""
        if self.input_format != "auto":
            return self.input_format
        return "json" if (self.input or "").endswith((".jsonl", ".json")) else "text"

    @property
    def subset(self) -> str:
        """The split of `data`."""
        return self.gen_subset or "valid"

    def prints_texts(self) -> bool:
        """Whether texts with their answers are printed, which can be coloured."""
        of_prompts = self.input is not None and self.output_format == "fairseq"
        return (of_prompts or self.output_format == "text") and not self.score_reference

    def is_colored(self) -> bool:
        """Whether texts with their answers are printed in colours."""
        from ftk_cli.colors import use_color

        return self.prints_texts() and use_color(self.color, sys.stdout)

    def validate(self) -> Iterator[str]:
        if (self.data is None) == (self.input is None):
            found = "missing, and so is DATA" if self.input is None else "given, and so is DATA"
            yield f"input is {found}; give a preprocessed folder or --input FILE, one of the two"
        if self.gen_subset is not None and self.data is None:
            yield "gen_subset names a split of DATA; it does not go with --input"
        if self.input_format != "auto" and (self.input is None or self.score_reference):
            yield f"input_format is {self.input_format}; it goes with --input, and not with --score-reference"
        if self.scoring and self.data is None:
            yield "scoring needs reference answers; it goes with DATA, not with --input"
        both = (self.input or "", self.results_path or "")
        if all(both) and len(set(map(os.path.realpath, both))) == 1:
            yield "input and results_path are the same file; write the results to another"
        if self.results_path is not None and self.output_format != "json":
            yield "results_path holds JSON Lines, from which a later run can continue; add --output-format json"
        if self.score_reference and self.scoring:
            yield "score_reference finds no answers; scoring does not go with it"
        if self.score_reference and self.print_step:
            yield "score_reference takes no steps; print_step does not go with it"
        if self.color == "always" and not self.prints_texts():
            yield "color is always, but no texts with their answers are printed"
        for name in self.scoring:
            if name.split()[0] not in SCORERS:
                yield f"scoring is {name!r}; {SCORERS.hint(name.split()[0])}"


@dataclass(kw_only=True)
class GenerateRoot:
    generate: GenerateConfig = section("what to answer")
    generation: GenerationConfig = section("how to search")
    processors: ProcessorConfig = section("logits processors")
    parallel: InferenceParallelConfig = section("parallel")
    common: DevicePrecisionConfig = section("common")

    def validate(self) -> Iterator[str]:
        options = self.generation
        if self.generate.score_reference:
            unused = given_flags("generation", options, without=options.of_scores)
            unused += given_flags("processors", self.processors)
            if unused:
                yield (
                    f"--score-reference asks the model itself about given answers and does not use "
                    f"{', '.join(unused)}; leave {'it' if len(unused) == 1 else 'them'} out"
                )
        if self.generate.data is not None:
            others = {option.name for option in options_of("generation", type(options))} - set(options.of_prompts)
            for flag in given_flags("generation", options, without=others):
                yield f"{flag} goes with --input; samples of DATA are read as in training"
