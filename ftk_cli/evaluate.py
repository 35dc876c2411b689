"""ftk-evaluate: metrics of a trained model on files of data, with their standard errors."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.config import compose, section
from ftk.config.choice import named_lines, values_by_name
from ftk.config.options import option, required
from ftk.data.supervised.row import files_of
from ftk.errors import UserError, visible
from ftk.evaluation.few_shot import fewshot_choice_option
from ftk.files import sha256_of
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk.model_parallel.config import InferenceParallelConfig
from ftk.registry import EVALUATIONS, SCORERS
from ftk_cli.command import run
from ftk_cli.inference_options import (
    ENSEMBLE,
    Checkpoints,
    DevicePrecisionConfig,
    check_same_checkpoints,
    find_checkpoints,
    given_flags,
    open_generator,
    open_ranks,
    with_options_of_task,
)
from ftk_cli.launch import launch
from ftk_cli.progress import progress_bar

if TYPE_CHECKING:
    from ftk.evaluation.breakdown import Breakdown
    from ftk.evaluation.evaluation import Evaluation
    from ftk.evaluation.metrics import Measured, Metric, Record
    from ftk.evaluation.results import Result
    from ftk.generation.text import TextGenerator
    from ftk.model_parallel.world import World

PROG = "ftk-evaluate"
DESCRIPTION = """Asks a trained model about the rows of data files and prints metrics with their standard errors.
Several processes (--launch, torchrun) share the rows, and the model if it is given sizes. An evaluation's options
stand behind its name, in quotes: --evaluation 'lambada rule=harness'.
Examples: ftk-evaluate --path run --evaluation lambada --data lambada_test.jsonl --errors 5;
ftk-evaluate --path run --evaluation lambada 'perplexity detokenize=wikitext' \\
    --data lambada=lambada_test.jsonl perplexity=wikitext2_test.txt --output results"""


@dataclass(kw_only=True)
class EvaluateConfig:
    path: str = ENSEMBLE
    evaluation: list[str] = required(
        f"what is evaluated: {', '.join(EVALUATIONS)}; several one after the other, or with commas between",
        daily=True,
        several=True,
        metavar="NAME",
    )
    data: list[str] = required(
        "the file of an evaluation: JSON lines, FILE.source with FILE.target, or text; NAME may be left out where "
        "there is one evaluation",
        daily=True,
        several=True,
        path=True,
        metavar="[NAME=]FILE",
    )
    scoring: list[str] = option(
        [], "scorers of generated answers, e.g. rouge,squad_f1 (evaluation generation)", daily=True
    )
    limit: int | None = option(None, "the first rows of each file alone", daily=True, min=1, unit="rows")
    errors: int = option(0, "print this many mistakes, those that the model was surest of", daily=True, min=0)
    details: bool = option(
        False, "print which label is taken for which, and the metrics by label and by length", daily=True
    )
    num_fewshot: int = option(
        0,
        "answered rows in front of each question; drawn by --seed and its number, unless --fewshot-choice is first",
        daily=True,
        min=0,
        needs={"fewshot_data": True},
        unit="rows",
    )
    fewshot_data: list[str] = option(
        [],
        "the file of an evaluation that its examples are drawn from: that of the training rows",
        several=True,
        path=True,
        needs={"num_fewshot": True},
        metavar="[NAME=]FILE",
    )
    fewshot_choice: str = fewshot_choice_option(needs={"num_fewshot": True})
    bootstrap: int = option(
        1000, "how often rows are drawn again for standard errors; 0: none", min=0, max=1_000_000, unit="drawings"
    )
    output: str | None = option(
        None,
        "write results.json and predictions.jsonl into this folder; ftk-report compares such folders",
        daily=True,
        metavar="DIR",
    )
    overwrite: bool = option(False, "replace the folder --output", needs={"output": True})
    compare: str | None = option(
        None,
        "results of another model for the same rows: print how much larger this model's metrics are, with standard "
        "errors of the pairs",
        daily=True,
        path=True,
        metavar="DIR",
    )
    submission: bool = option(
        False,
        "write also submission/NAME.jsonl as SuperGLUE takes predictions (of cloze tasks), and squad.json; rows may "
        "be without labels",
        needs={"output": True},
    )

    def validate(self) -> Iterator[str]:
        if not self.evaluation:
            yield "evaluation is empty; it must name what is evaluated"
        for name, _ in self.lines():
            if name not in EVALUATIONS:
                yield f"evaluation is {name!r}; {EVALUATIONS.hint(name)}"
        for name in self.scoring:
            if name.split()[0] not in SCORERS:
                yield f"scoring is {name!r}; {SCORERS.hint(name.split()[0])}"

    def lines(self) -> list[tuple[str, str]]:
        """Name and line, with options, of each evaluation."""
        return named_lines(self.evaluation)

    def files(self) -> list[tuple[str, str, str]]:
        """Name, line and file of each evaluation.

        Raises:
            UserError: one has no file, or a file no evaluation.
        """
        by_name = self.by_name("data", self.data)
        found = [(name, line, file) for name, line in self.lines() for file in by_name[name]]
        names = [name for name, _, _ in found]
        if self.submission and (several := [name for name in names if names.count(name) > 1]):
            raise UserError(f"`submission` is for one file and one line of {several[0]}, which has {len(several)}")
        return found

    def by_name(self, option: str, entries: Sequence[str]) -> dict[str, list[str]]:
        """The files of each evaluation, of entries [NAME=]FILE.

        Raises:
            UserError: as `files`; names the option.
        """
        names = [name for name, _ in self.lines()]
        found = values_by_name(entries, names, f"`{option}`")
        for name in names:
            if name not in found:
                raise UserError(f"the evaluation {name} has no file; give `{option}` {name}=FILE")
        return found


@dataclass(kw_only=True)
class EvaluateRoot:
    evaluate: EvaluateConfig = section("what to evaluate")
    generation: GenerationConfig = section("how to search (evaluations that generate)")
    processors: ProcessorConfig = section("logits processors")
    parallel: InferenceParallelConfig = section("parallel")
    common: DevicePrecisionConfig = section("common")


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


def body(argv: list[str]) -> int:
    if (code := launch("evaluate", argv)) is not None:
        return code
    root = compose(with_options_of_task(EvaluateRoot, argv), PROG, DESCRIPTION, argv)
    files = root.evaluate.files()
    _check_files("data", [file for *_, file in files])
    root, evaluations = _evaluations(root)
    _check_files("fewshot_data", _example_files(evaluations))

    if root.evaluate.output is not None:
        from ftk.evaluation.results import check_output

        check_output(Path(root.evaluate.output), root.evaluate.overwrite)
    with open_ranks(PROG, root, root.parallel.of_one_model()) as world:
        return evaluate(root, files, evaluations, world)


def _check_files(option: str, files: Sequence[str]) -> None:
    """Raise a UserError if one of the files that an option names is none."""
    for file in (part for entry in files for part in files_of(entry)):
        if not Path(file).is_file():
            problem = "a folder; give a file of it" if Path(file).is_dir() else "no such file"
            raise UserError(f"`{option}` {file}: {problem}")


def _example_files(evaluations: dict[str, Evaluation[Any]]) -> list[str]:
    """The files that examples are drawn from."""
    return [*filter(None, (getattr(evaluation.config, "fewshot_data", None) for evaluation in evaluations.values()))]


def _evaluations(root: EvaluateRoot) -> tuple[EvaluateRoot, dict[str, Evaluation[Any]]]:
    """The evaluations by their lines; and the root, whose answers have one token where none is found.

    Raises:
        UserError: options that none of them has, or uses.
    """
    from ftk.evaluation.evaluation import Evaluation, build_evaluation

    made, options = {}, root.evaluate
    files: dict[str, str] = {}
    if options.num_fewshot:
        without = next((name for name, _ in options.lines() if "num_fewshot" not in _options_of(name)), None)
        if without is not None:
            raise UserError(f"`num_fewshot`: {without} is asked without examples; evaluate it by itself")
    for name, line in options.lines():
        made[line] = build_evaluation(line, _preset(root, name, line))
        if not isinstance(root.generation, made[line].generation):
            does = getattr(root.generation, "does", "writes texts")
            raise UserError(f"{root.evaluate.path} {does}; choose another model for the evaluation {name}")
        if options.submission and type(made[line]).submission is Evaluation.submission:
            raise UserError(f"`submission`: there is no form for predictions of {name}; evaluate it by itself")
        form = made[line].submission([]) if options.submission else None
        if form is not None:
            file, _ = form
            if file in files:
                raise UserError(f"`submission`: {files[file]} and {line} both write {file}; evaluate one by itself")
            files[file] = line
    if not any("scoring" in _options_of(name) for name, _ in options.lines()):  # none generates
        unused = given_flags("generation", root.generation, without=("seed", "batch_size"))
        unused += given_flags("processors", root.processors) + (["--scoring"] if root.evaluate.scoring else [])
        if unused:
            them = "it" if len(unused) == 1 else "them"
            raise UserError(f"no evaluation finds answers, so that {', '.join(unused)} has no effect; leave {them} out")
        if root.generation.max_len is not None:  # an answer of the default length need not fit the model's positions
            root = dataclasses.replace(root, generation=dataclasses.replace(root.generation, max_len=1))
    return root, made


def _preset(root: EvaluateRoot, name: str, line: str) -> dict[str, Any]:
    """Options of an evaluation that its line need not give: those of the task that was trained, and of the command."""
    known, options, preset = _options_of(name), root.evaluate, _as_trained(root, name, line)
    if "scoring" in known and options.scoring:
        preset["scoring"] = options.scoring
    if options.num_fewshot:
        shown = options.by_name("fewshot_data", options.fewshot_data)[name]
        if len(shown) > 1:
            raise UserError(f"`fewshot_data` has {len(shown)} files for {name}; give one")
        preset |= {
            "fewshot_data": shown[0],
            "num_fewshot": options.num_fewshot,
            "fewshot_choice": options.fewshot_choice,
            "fewshot_seed": root.generation.seed,
        }
    return preset


def _options_of(name: str) -> set[str]:
    """Names of the options of an evaluation."""
    config = EVALUATIONS.get(name).config
    return set() if config is None else {field.name for field in dataclasses.fields(config)}


def _as_trained(root: EvaluateRoot, name: str, line: str) -> dict[str, Any]:
    """Options of an evaluation as a checkpoint's task had them, if it was trained for the same cloze task, or by the
    task of this name."""
    from ftk.checkpoint import resolve_model
    from ftk.checkpoint.adapter import config_beside
    from ftk.evaluation.cloze import options_as_trained
    from ftk.hub import checkpoint_paths

    path, base = root.evaluate.path, root.common.base
    tree = config_beside(resolve_model(checkpoint_paths(base or path)[0]), None if base is None else path)
    task = tree.get("task") or {}
    return options_as_trained(task, name, line)


def evaluate(
    root: EvaluateRoot, files: list[tuple[str, str, str]], evaluations: dict[str, Evaluation[Any]], world: World
) -> int:
    """The work of one process: the processes of a data rank share one model, and ask it about its share of the rows."""
    from ftk.evaluation.results import Result, details, mistakes, notes, table, write_results
    from ftk.model_parallel.collective import check_same_files, collective

    options, seed = root.evaluate, root.generation.seed
    checkpoints = find_checkpoints(options.path, root.generation.lm_path, world, root.common.base)
    check_same_checkpoints(checkpoints, world)
    read = {"--data": [file for *_, file in files], "--fewshot-data": _example_files(evaluations)}
    paths = {flag: [Path(part) for file in own for part in files_of(file)] for flag, own in read.items()}
    check_same_files(world, paths)
    others = collective(world, functools.partial(_others, options, files))
    device = dataclasses.replace(root.common, device=str(world.device))
    shared = world.sizes.tensor * world.sizes.pipeline > 1
    generator = open_generator(checkpoints, device, root.generation, root.processors, world if shared else None)
    if generator.tokenizer.source is not None:
        raise UserError(
            f"{options.path} has a tokenizer of its own for sources, which evaluations do not use; "
            "ftk-generate DATA --gen-subset SPLIT --scoring NAME does"
        )
    # All rows are read before the first is asked about: a mistake in the last file is found at once.
    prepared = []
    for name, line, file in files:
        evaluation = evaluations[line]
        questions = collective(world, functools.partial(evaluation.questions, file, generator, options.limit))
        prepared.append((name, line, file, questions, evaluation.metrics(), evaluation.settings(generator, questions)))
    results: list[Result] = []
    for name, line, file, questions, metrics, settings in prepared:
        evaluation = evaluations[line]
        records = _all_records(evaluation, questions, generator, world)
        parts, problem = _measured(options, seed, evaluation, metrics, records, others.get((line, file)))
        results.append(Result(name, line, file, settings, records, *parts))
        shown = table(results[-1:])  # at once: it is known even if a later evaluation fails
        print(visible("\n".join(shown if len(results) == 1 else ["", *shown])), flush=True)
        for note in notes(results[-1]):
            print(visible(note), flush=True)
        if problem is not None:
            print(visible(f"not compared with {options.compare}: {problem}"), flush=True)
    if not world.is_main:
        return 0
    for result in results:
        if options.details:
            print(visible("\n".join(["", *details(result)])))
        if options.errors and any("correct" in record for record in result.records):
            print(visible("\n".join(["", *mistakes(result, options.errors)])))
    if options.output is not None:
        made = [evaluations[result.line].submission(result.records) for result in results if options.submission]
        submissions = dict(filter(None, made))
        facts = _facts(root, checkpoints, generator, evaluations)
        write_results(Path(options.output), facts, results, options.overwrite, submissions)
        written = ("results.json", "predictions.jsonl", *(f"submission/{name}" for name in submissions))
        print(visible(f"\n{options.output}: {', '.join(written)}"))
    return 0


def _measured(
    options: EvaluateConfig,
    seed: int,
    evaluation: Evaluation[Any],
    metrics: Sequence[Metric],
    records: Sequence[Record],
    other: Sequence[Record] | None,
) -> tuple[tuple[dict[str, Measured], Breakdown, dict[str, Measured]], str | None]:
    """`measured`, `breakdown` and `more` of a `Result`, the last compared with what an `other` model answered, if there
    is one; and why it is not compared."""
    from ftk.evaluation.breakdown import Breakdown, break_down
    from ftk.evaluation.comparison import mismatch
    from ftk.evaluation.metrics import measure
    from ftk.evaluation.results import labelled

    counted = labelled(records)
    drawn: dict[str, Any] = {"draws": options.bootstrap, "seed": seed}
    measured = measure(metrics, counted, evaluation.group, **drawn) if counted else {}
    more, problem = {}, None
    if counted and other is not None:
        its = labelled(other)
        problem = mismatch(counted, its, evaluation.group)
        if problem is None:
            more = measure(metrics, counted, evaluation.group, others=its, **drawn)
    parts = Breakdown()
    if options.details or options.output is not None:
        parts = break_down(counted, evaluation.classes, metrics, evaluation.group, **drawn)
    return (measured, parts, more), problem


def _others(options: EvaluateConfig, files: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str], Sequence[Record]]:
    """By line and file what the model to compare with answered."""
    from ftk.evaluation.comparison import OtherModel

    if options.compare is None:
        return {}
    other = OtherModel(Path(options.compare))
    return {(line, file): other.records(line, file, files_of(file), options.limit) for _, line, file in files}


def _all_records(
    evaluation: Evaluation[Any], questions: Sequence[Any], generator: TextGenerator[Any], world: World
) -> list[dict[str, Any]]:
    """`all_records`, with a bar for those of this process."""
    from ftk.evaluation.evaluation import all_records

    share = range(world.data_rank, len(questions), world.sizes.data)
    with progress_bar(len(share), 0, evaluation.unit) as bar:

        def progress(count: int) -> None:
            bar.update(min(count, bar.total - bar.n))  # never past the end of the bar

        records = all_records(evaluation, questions, generator, world, progress)
        bar.update(bar.total - bar.n)  # where several questions were one for the model
    return records


def _facts(
    root: EvaluateRoot,
    checkpoints: Checkpoints,
    generator: TextGenerator[Any],
    evaluations: dict[str, Evaluation[Any]],
) -> dict[str, Any]:
    """What the numbers depend on besides the evaluations: weights, data, versions."""
    import numpy
    import torch

    from ftk.version import __version__

    files = [file for _, _, file in root.evaluate.files()]
    files += _example_files(evaluations)
    data = {part: sha256_of(Path(part)) for file in files for part in files_of(file)}
    return {
        "path": root.evaluate.path,
        "models": [
            {"folder": str(folder), "weights_sha256": _weights(folder), "selected_on": _selected_on(folder)}
            for folder in checkpoints.model
        ],
        **_adapter(checkpoints.adapter),
        "tokenizer_sha256": generator.tokenizer.fingerprint,
        "data_sha256": data,
        "limit": root.evaluate.limit,
        **({} if root.evaluate.compare is None else {"compared_with": root.evaluate.compare}),
        "seed": root.generation.seed,
        "bootstrap": root.evaluate.bootstrap,
        "precision": root.common.precision,
        "ema": root.common.ema,
        "versions": {
            "ftk": __version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
    }


def _adapter(folder: Path | None) -> dict[str, Any]:
    """The adapter beside the model, if it is a folder of its own."""
    from ftk.checkpoint.adapter import WEIGHTS

    if folder is None:
        return {}
    return {"adapter": {"folder": str(folder), "weights_sha256": sha256_of(folder / WEIGHTS)}}


def _weights(folder: Path) -> str:
    """sha256 of a checkpoint's manifest, which has those of its files; else of names and hashes of the files."""
    from ftk.checkpoint import is_checkpoint
    from ftk.checkpoint.weights import digest, identity_files

    if is_checkpoint(folder):
        return digest(folder)
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in identity_files(folder)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _selected_on(folder: Path) -> str | None:
    """By what a run has found that this is its best checkpoint; None: it is not, or not known."""
    from ftk.checkpoint import read_config
    from ftk.checkpoint.layout import BEST

    best = folder.parent / BEST
    if not best.is_symlink() or best.resolve() != folder:
        return None
    tree = read_config(folder)
    metric = (tree.get("checkpoint") or {}).get("best_metric", "loss")
    return f"{metric} on {(tree.get('dataloader') or {}).get('valid_subset', 'valid')}"


if __name__ == "__main__":
    raise SystemExit(main())
