"""The interface of a task, with the defaults that most tasks share."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.batch import Batch
from ftk.config import Chosen
from ftk.data.batches.collate import Collater
from ftk.data.corpora.composition import Blend, MakeSamples
from ftk.data.corpora.corpus import Corpus
from ftk.data.corpora.documents import Documents
from ftk.data.sample_dataset import SampleDataset
from ftk.data.supervised.corpus import RowsCorpus
from ftk.errors import UserError, visible
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk.registry import named
from ftk.tasks.contract import check_corpus, documents_of, load_samples
from ftk.tokenizers import with_special_tokens
from ftk.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from torch import nn

    from ftk.evaluation.unigram import Unigram
    from ftk.generation.engine.request import Framing
    from ftk.generation.text import TextGenerator
    from ftk.modules.adapters import PromptIds


class Task:
    """What is learned, apart from how (criterion, optimizer) and with what (model).

    Attributes:
        special_tokens: the layout of special tokens that the task adds to a tokenizer which has none but those of its
            vocabulary (`plain`); None: it needs no others.
        reads_rows: whether `make_samples` is given rows of files (`ftk.data.supervised.row`), not documents.
        takes_source: whether its data may have a tokenizer of its own for sources (`Tokenizer.source`).
        generation_config: the options of `text_generator`, a dataclass.
        processor_config: those of what steers its answers, another.
        generates_as_usual: whether its models write texts as their usual task has it; its own samples are no prompts.

    Args:
        config: instance of the dataclass the task was registered with.
        corpus: where documents and tokenizer come from.
        seed: of everything random in the samples.
    """

    special_tokens: ClassVar[str | None] = None
    reads_rows: ClassVar[bool] = False
    takes_source: ClassVar[bool] = False
    generation_config: ClassVar[type[Any]] = GenerationConfig
    processor_config: ClassVar[type[Any]] = ProcessorConfig
    generates_as_usual: ClassVar[bool] = False

    @property
    def evaluation(self) -> str | None:
        """The evaluation that asks models as this task does, where `generates_as_usual` is true."""
        return None

    def __init__(self, config: Any, *, corpus: Corpus, seed: int) -> None:
        self.config = config
        self.corpus = corpus
        self.seed = seed
        check_corpus(corpus, self.reads_rows)
        own_splits = type(self).load_split is not Task.load_split
        if self.reads_rows and not hasattr(corpus, "rows"):
            raise UserError(f"{type(self).__name__} reads rows, but {named(corpus)} has none; leave `dataset` out")
        if isinstance(corpus, RowsCorpus) and not self.reads_rows and not own_splits:
            raise UserError(f"{type(self).__name__} reads tokens, but {named(corpus)} has rows; leave `dataset` out")
        of_corpus = corpus.tokenizer()
        if of_corpus.source is not None and not self.takes_source:
            raise UserError(
                f"task {type(self).__name__} reads one vocabulary, but the data has a tokenizer for sources and one "
                "for targets; train task translation, or give `tokenizer_folder` the tokenizer of one side"
            )
        self.tokenizer = self.add_special_tokens(of_corpus)
        self._changes_tokenizer = self.tokenizer is not of_corpus
        if own_splits and isinstance(corpus, Blend) and corpus.is_composed:
            raise UserError(
                f"task {type(self).__name__} cannot blend corpora, it defines load_split instead of make_samples; "
                f"give one data folder"
            )

    @classmethod
    def add_special_tokens(cls, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with the special tokens of this task, if it has none but those of its vocabulary."""
        return tokenizer if cls.special_tokens is None else with_special_tokens(tokenizer, cls.special_tokens)

    @classmethod
    def loss_share(cls, config: Any) -> float:
        """About which share of a batch's places carries loss, for plans; by default all."""
        return 1.0

    @cached_property
    def tokenizer_folder(self) -> Path:
        """Folder with the tokenizer's own files, which every checkpoint gets."""
        return self.tokenizer.saved_for(self) if self._changes_tokenizer else self.corpus.tokenizer_folder

    def load_split(self, split: str) -> SampleDataset:
        """The samples of a split, e.g. "train": those that the corpus has or composes, else of all its documents."""
        return self.composed(split, self.make_samples)

    def load_training_split(self, split: str) -> SampleDataset:
        """The samples of a split that are trained on, if a task makes others of it than to validate."""
        return self.load_split(split)

    def composed(self, split: str, make_samples: MakeSamples) -> SampleDataset:
        """The samples of a split as the corpus has or composes them, else of all its documents or rows.

        Args:
            make_samples: as the method of that name.
        """
        corpus: Any = self.corpus
        if hasattr(corpus, "samples"):
            return corpus.samples(split, make_samples, self.seed)
        if self.reads_rows:
            return make_samples(corpus.rows(split), self.seed)
        return make_samples(documents_of(corpus, split), self.seed)

    def make_samples(self, documents: Documents, seed: int) -> SampleDataset:
        """The samples of some documents. A task defines this, or else `load_split`.

        Args:
            documents: of one corpus or of one shard of it; with `reads_rows` a list of its rows.
            seed: of all that is random in the samples.
        """
        raise UserError(f"{named(self)} has no 'make_samples'; a task has that, or else 'load_split'")

    def collater(self) -> Callable[[Sequence[dict[str, Any]]], Batch]:
        """A picklable function from samples to a batch of CPU tensors; the iterator fills in `sample_ids`.

        Here for samples with `tokens`, `targets` and `loss_mask`, see `Collater`.
        """
        return Collater(self.tokenizer.special)

    def complete_model_config(self, config: Any) -> Any:
        """The model's config with its derived fields, which only the task knows; here `vocab_size`, if it has that.

        Raises:
            UserError: model and task do not fit each other.
        """
        if hasattr(config, "vocab_size"):
            return dataclasses.replace(config, vocab_size=self.tokenizer.padded_vocab_size())
        return config

    def for_model(self, config: Any) -> None:
        """Tells a task whose samples depend on the model which one it is, before it makes any.

        Args:
            config: of the model, with the derived fields.
        """

    def for_prompts(self, prompts: PromptIds) -> None:
        """Tells a task which prompt tokens the model's adapter has, before it makes any samples.

        Raises:
            UserError: here, as samples have no places for them.
        """
        raise UserError(f"{named(self)} has no places for the prompt tokens of `adapter` p_tuning; use another adapter")

    def build_model(self, chosen: Chosen) -> nn.Module:
        """The model, its initial weights drawn from torch's current seed."""
        return chosen.build()

    @classmethod
    def framing(cls, tokenizer: Tokenizer, model_config: Any) -> Framing | None:
        """How a trained model is asked for answers; None: the task does not generate.

        Args:
            model_config: of the model, or what stands for several.
        """
        return None

    @classmethod
    def framing_as_trained(cls, tokenizer: Tokenizer, model_config: Any, options: Any) -> Framing | None:
        """`framing` of a checkpoint, whose task had these options."""
        return cls.framing(tokenizer, model_config)

    @classmethod
    def around_text(cls, tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
        """Tokens in front of and behind a text that a model reads, of an encoder-decoder a source; None: those of the
        task that the model's family is for."""
        return None

    @classmethod
    def chat_template(cls, options: Any, tokenizer: Tokenizer, model_config: Any) -> str | None:
        """The template of jinja by which other programs ask a model whose task had these options; None: the
        tokenizer's, or none."""
        return None

    @classmethod
    def text_generator(cls) -> type[TextGenerator[Any]]:
        """What `ftk.load_generator` makes with `assembled`."""
        from ftk.generation.continuation import TextContinuer

        return TextContinuer

    def show(self, split: str, *, page: str | None, width: int, num_samples: int | None, **which: Any) -> str:
        """What `ftk-data show` shows of a split: documents and the samples made of them.

        Here samples alone, as in training: what is read, and what is learned at each place.

        Args:
            split: its name.
            page: where a page of HTML is said to come from; None: text is wanted.
            width: columns of the text.
            num_samples: how many; None: as many as are usual.
            **which: `index`, `draw`, `seed` and `packed` of that command.

        Raises:
            UserError: the task draws no page, or there is no such sample.
        """
        if page is not None:
            raise UserError(f"`html`: {type(self).__name__} draws no page of its samples; leave it out for text")
        samples = load_samples(self, split)

        def spelled(tokens: Sequence[int | None], tokenizer: Tokenizer) -> str:
            texts = ("·" if token is None else tokenizer.readable_token(token) for token in tokens)
            return " ".join(visible(text, keep="").replace(" ", "▁") for text in texts)

        lines = []
        for index in range(which["index"], which["index"] + (num_samples or 1)):
            if index >= len(samples):
                raise UserError(f"`index` {index}: the split {split} has {len(samples)} samples, from 0 on")
            for name, batch in self.shown(samples.sample(1 + which["draw"], index)).items():
                read, learned = self.read_and_learned(batch)
                lines += [f"sample {index} of {len(samples)}{name}: {len(read)} tokens, {len(batch.targets)} targets"]
                sides = ("reads", spelled(read, self.tokenizer.of_source)), ("learns", spelled(learned, self.tokenizer))
                for what, text in sides:
                    lines += textwrap.wrap(text, width, initial_indent=f"{what:<8}", subsequent_indent=" " * 8)
        return "\n".join(lines)

    def shown(self, sample: dict[str, Any]) -> dict[str, Batch]:
        """What `show` shows of a sample: behind its number -> a batch of one row."""
        return {"": self.collater()([sample])}

    def read_and_learned(self, batch: Batch) -> tuple[list[int], list[int | None]]:
        """What `show` shows of one sample: the tokens that are read, and what is learned at each of their places; of an
        encoder-decoder what the encoder reads, and what the decoder learns to write.

        Args:
            batch: of one sample.
        """
        read = batch.inputs["tokens"].flatten().tolist()
        if "decoder_tokens" in batch.inputs:
            return read, batch.targets.tolist()
        learned: list[int | None] = [None] * len(read)
        for place, target in zip(batch.places.tolist(), batch.targets.tolist(), strict=True):
            learned[place] = target
        return read, learned

    def unigram(self, split: str) -> Unigram | None:
        """Token frequencies of a split, beside which losses are shown; None: the task does not predict its tokens.

        A task that does has `unigram = ftk.tasks.language_model.corpus_unigram`.
        """
        return None

    def figures(self, scored: Sequence[Sequence[float]]) -> dict[str, float]:
        """Further figures of a validation, made of all that its criterion scored.

        Args:
            scored: rows of `LossOutput.scored` of all batches and ranks; those of a batch are in their order.
        """
        return {}

    def hooks(self) -> Sequence[Any]:
        """Hooks (`ftk.trainer.hooks.Hook`) that this task adds to the training loop."""
        return ()

    def describe(self) -> Iterator[str]:
        """Lines for `dry_run`: what a reader should know about the data."""
        source = self.tokenizer.source
        also = "" if source is None else f"; of sources {source.name}, {source.vocab_size} tokens"
        yield f"tokenizer: {self.tokenizer.name}, {self.tokenizer.vocab_size} tokens{also}"
