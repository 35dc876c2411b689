"""The interface of an evaluation: what a model is asked about a file, what it answers, and the metrics of that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ftk.config.choice import choice
from ftk.evaluation.metrics import Metric, Record
from ftk.generation.config import GenerationConfig
from ftk.registry import EVALUATIONS

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator
    from ftk.model_parallel.world import World

Question = TypeVar("Question")


class Evaluation(ABC, Generic[Question]):
    """Registered under a name (`evaluation` NAME), built with its options.

    The metrics are functions of the records alone, which several processes find together, each some of them.

    Attributes:
        unit: what a question is, for the progress bar.
        generation: class of the options of those generators that can be asked.
    """

    unit: ClassVar[str] = "row"
    generation: ClassVar[type] = GenerationConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def questions(self, path: str, generator: TextGenerator[Any], limit: int | None = None) -> Sequence[Question]:
        """What is asked about a file, in its order; nothing is computed by the model yet.

        Args:
            generator: the model, its tokenizer, and how it is asked (`framing`).

        Raises:
            UserError: a row cannot be asked about; names file, line and field.
        """

    @abstractmethod
    def records(
        self,
        questions: Sequence[Question],
        generator: TextGenerator[Any],
        progress: Callable[[int], object] | None = None,
    ) -> list[Record]:
        """What the model answers to some questions: a record for each, as JSON holds it.

        Keys that reports know: `place` (file:line), `prompt`, `candidates` (each with `text` and `logprob`), `chosen`,
        `label`, `correct`, `confidence` (the higher, the surer is the choice), `truncated`, `length` (tokens that the
        model reads). A row without a label has no `correct`.

        Args:
            questions: some of `questions`.
            generator: as there.
            progress: called with the number of questions that are done since the last call.

        Raises:
            UserError: the model cannot answer one.
        """

    @abstractmethod
    def metrics(self) -> Sequence[Metric]:
        """What is computed of the records."""

    @property
    def classes(self) -> Sequence[Any]:
        """The labels that there are, which are counted by what is chosen for them; empty: labels are texts, or none."""
        return ()

    def submission(self, records: Sequence[Record]) -> tuple[str, str] | None:
        """The name and the text of the file in which a benchmark takes predictions; None: there is no such form.

        Args:
            records: of all rows of a file.
        """
        return None

    def group(self, record: Mapping[str, Any]) -> Hashable:
        """What records that are drawn together for standard errors have in common; by default their row."""
        return record["place"]

    def settings(self, generator: TextGenerator[Any], questions: Sequence[Question] = ()) -> dict[str, Any]:
        """What the numbers depend on besides model and data, for the file of results: by default the options."""
        return dict(vars(self.config)) if self.config is not None else {}


def build_evaluation(text: str, preset: dict[str, Any] | None = None) -> Evaluation[Any]:
    """The evaluation that a line names, with its options: `lambada rule=harness`.

    Args:
        text: the line.
        preset: values of options that the line does not give.

    Raises:
        UserError: there is no such evaluation, or no such option.
    """
    made: Evaluation[Any] = choice(text, EVALUATIONS, "`evaluation`", preset).build()
    return made


def all_records(
    evaluation: Evaluation[Any],
    questions: Sequence[Any],
    generator: TextGenerator[Any],
    world: World,
    progress: Callable[[int], object] | None = None,
) -> list[Record]:
    """The records of all questions in their order, each found by one data rank; on every process.

    Args:
        generator: the model, the same on every data rank.
        world: the processes, each of which calls this.
        progress: as of `Evaluation.records`, of this process's questions.
    """
    share = range(world.data_rank, len(questions), world.sizes.data)
    found = evaluation.records([questions[number] for number in share], generator, progress)
    if world.mesh is None:
        return found
    by_rank = [part for part in world.gather_json(found if world.counts_loss else []) if part]
    records: list[Any] = [None] * len(questions)
    for rank, part in enumerate(by_rank):
        records[rank :: world.sizes.data] = part
    return records
