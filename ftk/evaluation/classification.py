"""Rows with labels, numbers, choices or words' labels as an evaluation, of models that were trained for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.data.supervised.labelled import (
    MULTIPLE_CHOICE,
    NAMED,
    REGRESSION,
    SINGLE_LABEL,
    TOKEN_LABELS,
    LabelledConfig,
    LabelledText,
)
from ftk.data.supervised.rows import rows_of
from ftk.errors import UserError
from ftk.evaluation.evaluation import Evaluation
from ftk.evaluation.metrics import (
    Group,
    Metric,
    Record,
    by_class,
    entity_counts,
    macro_f1,
    matthews,
    moments,
    pearson,
    share,
    spearman,
)
from ftk.generation.one_pass import ClassifyConfig
from ftk.registry import register_evaluation

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator


@register_evaluation("classification", config=LabelledConfig)
class ClassificationEvaluation(Evaluation[LabelledText]):
    """The likeliest label, choice or labels, or a number; rows hold by default what those of the training held."""

    config: LabelledConfig
    generation: ClassVar[type] = ClassifyConfig

    def questions(self, path: str, generator: TextGenerator[Any], limit: int | None = None) -> list[LabelledText]:
        if not isinstance(generator.config, self.generation):
            raise UserError("the evaluation classification is of models of the task classification; choose another one")
        trained = generator.framing.rows
        if (self.config.kind, self.config.labels) != (trained.kind, trained.labels):
            raise UserError("`kind` and `labels` are those that the model was trained with; leave them out")
        return self.config.read(rows_of(path, limit))

    def records(
        self,
        questions: Sequence[LabelledText],
        generator: TextGenerator[Any],
        progress: Callable[[int], object] | None = None,
    ) -> list[Record]:
        found = generator.scored_labels(questions, progress)  # type: ignore[attr-defined]  # the generator of the task
        return [self._record(*pair) for pair in zip(questions, found, strict=True)]

    def metrics(self) -> list[Metric]:
        return metrics_of(self.config)

    @property
    def classes(self) -> list[str]:
        return self.config.labels if self.config.kind == SINGLE_LABEL else []

    def settings(self, generator: TextGenerator[Any], questions: Sequence[LabelledText] = ()) -> dict[str, Any]:
        return {**super().settings(generator, questions), "seq_length": generator.framing.seq_length}

    def _record(self, text: LabelledText, found: Any) -> Record:
        kind, labels, scores = self.config.kind, self.config.labels, found.scores
        record: Record = {"place": text.place, "prompt": "\t".join(text.texts), "length": found.num_tokens}
        record["truncated"] = found.was_cut
        if kind == REGRESSION:
            return {**record, "chosen": float(scores[0, 0]), "label": text.label}
        best = [int(row.argmax()) for row in scores]
        record["confidence"] = min(float(row.max()) for row in scores)
        if kind == TOKEN_LABELS:
            # As in a validation, words that were cut count nowhere.
            right = None if text.label is None else [labels[number] for number in text.label[: len(best)]]  # type: ignore[index]
            record |= {"prompt": " ".join(text.texts), "chosen": [labels[number] for number in best]}
        else:
            names: Sequence[Any] = range(len(text.choices)) if kind == MULTIPLE_CHOICE else labels
            right = None if text.label is None else names[text.label]  # type: ignore[index]
            found = zip(text.choices or labels, names, scores[0].tolist(), strict=True)
            record["candidates"] = [{"text": choice, "label": name, "logprob": value} for choice, name, value in found]
            record["chosen"] = names[best[0]]
        correct = {} if right is None else {"correct": record["chosen"] == right}
        return {**record, "label": right, **correct}


def metrics_of(config: LabelledConfig) -> list[Metric]:
    """What is computed of records with `label` and `chosen`, for what rows hold."""
    names = config.labels
    if config.kind == REGRESSION:
        return [
            Metric("pearson", value=pearson, percent=False, adding=moments),
            Metric("spearman", over=spearman, percent=False),
            Metric("mse", _squares, lambda sums: float(sums[0] / sums[1]), percent=False),
        ]
    by_name = [by_class("macro_f1", names, macro_f1), by_class("mcc", names, matthews)] if config.kind in NAMED else []
    metrics = [share("accuracy"), *by_name]
    if config.kind in (SINGLE_LABEL, MULTIPLE_CHOICE):
        return metrics
    metrics = [metric._replace(add=_on_words(metric.add)) for metric in metrics]
    if all(name == "O" or name.startswith(("B-", "I-")) for name in names):
        metrics.append(Metric("entity_f1", entity_counts, _f1))
    return metrics


def _on_words(add: Callable[[Group], Sequence[float]]) -> Callable[[Group], Sequence[float]]:
    """What the words of records add."""

    def add_words(group: Group) -> Sequence[float]:
        pairs = [pair for record in group for pair in zip(record["label"], record["chosen"], strict=True)]
        return add([{"label": label, "chosen": chosen, "correct": label == chosen} for label, chosen in pairs])

    return add_words


def _f1(sums: Any) -> float:
    """Of right ones, labels and choices, in percent; 0 where there is nothing."""
    right, labels, chosen = sums
    return float(200.0 * right / (labels + chosen)) if labels + chosen else 0.0


def _squares(group: Sequence[Mapping[str, Any]]) -> list[float]:
    return [sum((record["label"] - record["chosen"]) ** 2 for record in group), float(len(group))]
