"""The task of classification: labels, numbers, choices and words' labels, by a head of its own on any model."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ftk.config import Chosen
from ftk.config.options import option
from ftk.data.corpora.corpus import Corpus
from ftk.data.supervised.labelled import KINDS, NAMED, REGRESSION, TOKEN_LABELS, LabelledConfig, LabelledText
from ftk.data.supervised.row import Row
from ftk.errors import UserError
from ftk.generation.one_pass import ClassifyConfig, NoProcessors
from ftk.modules.heads import HeadConfig, HeadShape
from ftk.registry import register_task
from ftk.tasks.base import Task
from ftk.tasks.classification.reading import POOLS, TextReader
from ftk.tasks.classification.samples import ClassificationCollater, ClassificationDataset
from ftk.tasks.language_model import seq_length_option, with_room_for_rows

if TYPE_CHECKING:
    from torch import nn

    from ftk.tasks.classification.classifier import TextClassifier
    from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)

_TRAIN = "train"
_AUTO = "auto"


@dataclass(kw_only=True)
class ClassificationConfig(LabelledConfig, HeadConfig):
    class_weights: list[str] = option(
        [],
        "factors of the losses of labels, 1 where none is given; auto: targets / (labels x targets with "
        "this label) in the rows of the split train; of token_labels a target is a word",
        several=True,
        metavar="auto|NAME=W",
        needs={"kind": NAMED},
    )
    pool: str | None = option(
        None,
        "the token whose hidden state stands for a text: the first that is read, the last, or the one after it, where "
        "the model would write an answer; by default the first where it sees the whole text, else the last",
        needs={"kind": tuple(kind for kind in KINDS if kind != TOKEN_LABELS)},
        choices=POOLS,
    )
    seq_length: int = seq_length_option(
        256,
        "most tokens that are read of a text or two, with those that the model wants around them; longer "
        "texts are cut at their ends, the longer one first",
        min=4,
    )

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        for entry in [] if self.class_weights == [_AUTO] else self.class_weights:
            name, _, weight = entry.rpartition("=")
            try:
                is_right = bool(name) and 0.0 <= float(weight) < float("inf")
            except ValueError:
                is_right = False
            if not is_right:
                yield f"class_weights has {entry!r}; give {_AUTO} alone, or NAME=W with a number W of 0 or more"


@register_task("classification", config=ClassificationConfig, criterion="classification", dataset="rows")
class ClassificationTask(Task):
    """What rows of texts are labelled with."""

    config: ClassificationConfig
    reads_rows = True
    generation_config = ClassifyConfig
    processor_config = NoProcessors
    complete_model_config = with_room_for_rows

    def __init__(self, config: ClassificationConfig, *, corpus: Corpus, seed: int) -> None:
        super().__init__(config, corpus=corpus, seed=seed)
        rows_of: Any = getattr(corpus, "rows", None)  # of all data sets
        if config.kind in NAMED and not config.labels:
            config = dataclasses.replace(config, labels=config.names_in(rows_of(_TRAIN)))
        if config.kind in NAMED and config.class_weights:
            texts = config.read(rows_of(_TRAIN)) if config.class_weights == [_AUTO] else ()
            weights = _class_weights(config, texts)
            config = dataclasses.replace(config, class_weights=weights)
        self.config = config
        self._reader: TextReader | None = None

    @property
    def evaluation(self) -> str:
        return "classification"

    @property
    def shape(self) -> HeadShape:
        """The shape of the model's head."""
        config, count = self.config, len(self.config.labels) if self.config.kind in NAMED else 1
        return HeadShape(head_layer=config.head_layer, head_dropout=config.head_dropout, num_outputs=count)

    def build_model(self, chosen: Chosen) -> nn.Module:
        from ftk.modules.classifier import replace_head

        model = super().build_model(chosen)
        replace_head(model, self.shape)
        return model

    def for_model(self, config: Any) -> None:
        self._reader = self.framing_as_trained(self.tokenizer, config, self.config)

    @classmethod
    def framing_as_trained(cls, tokenizer: Tokenizer, model_config: Any, options: Any) -> TextReader:  # type: ignore[override]
        return TextReader(options, tokenizer, model_config, options.pool, options.seq_length)

    @classmethod
    def text_generator(cls) -> type[TextClassifier]:
        from ftk.tasks.classification.classifier import TextClassifier

        return TextClassifier

    def make_samples(self, rows: Sequence[Row], seed: int) -> ClassificationDataset:  # type: ignore[override]
        reader, config = self._reader, self.config
        if reader is None:
            raise UserError("samples of classification depend on the model that reads them; give its folder as `path`")
        texts = config.read(rows)
        for text in texts:
            if text.label is None:
                raise UserError(
                    f"{text.place}: field {config.label_field!r} is missing; without labels there is no loss"
                )
        encoded = reader.encode(texts)
        if num_cut := sum(row.was_cut for row in encoded):
            what = f"{num_cut} of {len(encoded)} rows are cut to `seq_length` {config.seq_length}"
            logger.info("%s: %s", rows[0].source, what)
        weights = dict.fromkeys(config.labels, 1.0)
        weights |= {name: float(weight) for name, _, weight in (text.rpartition("=") for text in config.class_weights)}
        own = np.array([weights[name] for name in config.labels], dtype=np.float32) if config.class_weights else None
        return ClassificationDataset(texts, encoded, reader, own)

    def collater(self) -> ClassificationCollater:
        return ClassificationCollater(self.tokenizer.special)

    def figures(self, scored: Sequence[Sequence[float]]) -> dict[str, float]:
        from ftk.evaluation.classification import metrics_of
        from ftk.evaluation.metrics import measure

        config, rows = self.config, []  # type: ignore[var-annotated]
        for begins, *pair in scored:
            if begins:
                rows.append(([], []))  # labels and what was found; of one word where no words are labelled
            for values, value in zip(rows[-1], pair, strict=True):
                values.append(value if config.kind == REGRESSION else config.labels[int(value)])
        if config.kind != TOKEN_LABELS:
            rows = [(label[0], found[0]) for label, found in rows]
        records = [{"label": label, "chosen": found, "correct": label == found} for label, found in rows]
        measured = measure(metrics_of(config), records, draws=0) if records else {}
        return {
            name: own.value / (100.0 if own.percent else 1.0) for name, own in measured.items() if own.value is not None
        }

    def show(self, split: str, *, page: str | None, width: int, num_samples: int | None, **which: Any) -> str:
        if page is not None:
            raise UserError("`html`: the task classification draws no page of its samples; leave it out for text")
        corpus: Any = self.corpus
        texts = self.config.read(corpus.rows(split))
        lines: list[str] = []
        for index in range(which["index"], which["index"] + (num_samples or 1)):
            if index >= len(texts):
                raise UserError(f"`index` {index}: the split {split} has {len(texts)} rows, from 0 on")
            text = texts[index]
            lines += [f"row {index} of {len(texts)}: {text.place}", *_shown(text, self.config)]
        return "\n".join(lines)

    def describe(self) -> Iterator[str]:
        yield from super().describe()
        names = f": {', '.join(self.config.labels)}" if self.config.kind in NAMED else ""
        yield f"{self.config.kind}{names}"
        if self.config.class_weights:
            yield f"class weights: {', '.join(self.config.class_weights)}"


def _class_weights(config: ClassificationConfig, texts: Sequence[LabelledText]) -> list[str]:
    """The weights of labels as NAME=W; those of `auto` from labelled texts."""
    if config.class_weights != [_AUTO]:
        for entry in config.class_weights:
            name = entry.rpartition("=")[0]
            if name not in config.labels:
                raise UserError(f"`class_weights` {entry}: {name!r} is none of the labels {', '.join(config.labels)}")
        return config.class_weights
    labels = [text.label if isinstance(text.label, tuple) else (text.label,) for text in texts]
    counts = Counter(label for own in labels for label in own)
    for number, name in enumerate(config.labels):
        if not counts[number]:
            raise UserError(f"`class_weights` {_AUTO}: no row of {_TRAIN} has the label {name!r}; give NAME=W for each")
    share = sum(counts[number] for number in range(len(config.labels))) / len(config.labels)
    return [f"{name}={share / counts[number]:.6g}" for number, name in enumerate(config.labels)]


def _shown(text: LabelledText, config: ClassificationConfig) -> Iterator[str]:
    """Lines about a row: its texts, and what is right."""
    if config.kind == TOKEN_LABELS:
        labels: Any = text.label or [None] * len(text.texts)
        names = ("?" if label is None else config.labels[label] for label in labels)
        yield "  " + " ".join(f"{word}/{name}" for word, name in zip(text.texts, names, strict=True))
        return
    yield from (f"  {part}" for part in text.texts)
    yield from (f"  {'*' if number == text.label else ' '} {choice}" for number, choice in enumerate(text.choices))
    if not text.choices:
        label = text.label if config.kind == REGRESSION or text.label is None else config.labels[text.label]  # type: ignore[index]
        yield f"  = {'?' if label is None else label}"
