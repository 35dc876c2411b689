"""The task of answering: rows are questions with one answer each, and a model is asked as its usual task asks it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.config.options import option
from ftk.data.supervised.row import Row, read_each
from ftk.errors import UserError
from ftk.registry import named
from ftk.tasks.answering.asking import Asking
from ftk.tasks.answering.questions import EncodedQuestion, Question, QuestionEncoder, Windows
from ftk.tasks.answering.samples import AnswerDataset, PackedAnswers
from ftk.tasks.answering.text_framing import TextFraming
from ftk.tasks.answers import usual_task
from ftk.tasks.base import Task
from ftk.tasks.language_model import seq_length_option, vocabulary_divisor

if TYPE_CHECKING:
    from ftk.data.sample_dataset import SampleDataset
    from ftk.generation.engine.request import Framing
    from ftk.generation.text import TextGenerator
    from ftk.tokenizers.base import Tokenizer


def target_length_option(text: str) -> Any:
    """The field of the option `target_length`."""
    return option(128, text, min=1, max=10**8, unit="tokens")


@dataclass(kw_only=True)
class QuestionConfig:
    """Options of every task of answering: how long questions and answers are."""

    seq_length: int = seq_length_option(512, "most tokens of a question, and what the model wants around it", min=1)
    target_length: int = target_length_option("most tokens of an answer, its end counted; a cut answer has no end")
    truncate: str = option(
        "left",
        "where the texts of a question that is too long are cut: at their beginning or at their end; what "
        "stands around them stays, and the log says how many were cut",
        choices=("left", "right"),
    )
    make_vocab_size_divisible_by: int = vocabulary_divisor()


@dataclass(kw_only=True)
class AnswerConfig(QuestionConfig):
    """Options of tasks whose samples are answers."""

    loss_weighting: str = option(
        "token",
        "what counts alike in the loss: each token of the answers, or each answer whatever its length",
        choices=("token", "sample"),
    )
    pack: bool = option(
        False,
        "put several samples, which see nothing of each other, into a row of up to seq-length + "
        "target-length tokens; not for encoder-decoders",
    )


class AnswerTask(Task, ABC):
    """Answers to the questions of rows. A task gives `questions` and says how long an answer is (`expected`)."""

    config: QuestionConfig
    reads_rows = True
    _asking: Asking | None = None

    @classmethod
    @abstractmethod
    def questions(cls, config: Any, tokenizer: Tokenizer) -> RowQuestions:
        """What makes questions of rows and of texts."""

    @classmethod
    @abstractmethod
    def expected(cls, config: Any) -> str:
        """How long answers are with these options, one of `ftk.generation.engine.request.EXPECTED`."""

    def for_model(self, config: Any) -> None:
        self._asking = self._asking_of(config)

    def make_samples(self, rows: Sequence[Row], seed: int) -> SampleDataset:  # type: ignore[override]
        config: Any = self.config
        if config.pack and self.asking_of_model().is_apart:
            raise UserError("`pack` is for models that read question and answer in one row, not for encoder-decoders")
        made = self.questions(config, self.tokenizer)
        of_rows = read_each(rows, lambda row: [*made.of_row(row)])
        questions = (question for of_row in of_rows for question in of_row)
        asking, encoded = self.asking_of_model(), self.encoded(questions, rows[0].source, made.windows)
        dataset = AnswerDataset(asking, encoded, config.loss_weighting == "sample")
        return PackedAnswers(dataset, config.seq_length + config.target_length) if config.pack else dataset

    def encoded(
        self, questions: Iterable[Question], where: str, windows: Windows | None = None
    ) -> list[EncodedQuestion]:
        """Questions and answers of the lengths that the options say; arguments as of `QuestionEncoder.within`."""
        config, encoder = self.config, self.encoder(self.tokenizer, self.asking_of_model())
        return encoder.within(questions, config.seq_length, config.target_length, config.truncate, where, windows)

    def asking_of_model(self) -> Asking:
        """How the model is asked that `for_model` has told.

        Raises:
            UserError: it has told none.
        """
        if self._asking is None:
            raise UserError(
                f"samples of {type(self).__name__} depend on the model that reads them; give its folder as `path`"
            )
        return self._asking

    def complete_model_config(self, config: Any) -> Any:
        if getattr(config, "decoder_start_token", 0) is None:
            raise UserError(
                f"a new encoder-decoder has no token that its decoder starts with; start {type(self).__name__} from a "
                f"trained model by `finetune_from`"
            )
        vocab_size = self.tokenizer.padded_vocab_size(self.config.make_vocab_size_divisible_by)
        config = dataclasses.replace(config, vocab_size=vocab_size)
        given, usual = ((own.seq_length, own.target_length) for own in (self.config, type(self.config)))
        self._asking_of(config).check_room(*given, " (the task's defaults)" if given == usual else "")
        return config

    @classmethod
    def framing(cls, tokenizer: Tokenizer, model_config: Any) -> Framing:
        """That of the model's usual task.

        Raises:
            UserError: the model writes no answers.
        """
        usual = usual_task(model_config)
        framing = usual.framing(tokenizer, model_config)
        if framing is None or not hasattr(framing, "ask"):
            raise UserError(f"{named(usual)} does not say how its models are asked; choose a model that writes texts")
        return framing

    @classmethod
    def framing_with(cls, config: Any, tokenizer: Tokenizer, model_config: Any) -> Framing:
        """`framing`, as far as options change it."""
        return cls.framing(tokenizer, model_config)

    @classmethod
    def asking(cls, config: Any, tokenizer: Tokenizer, framing: Framing) -> Asking:
        """How questions are put to a model with this framing."""
        return Asking(framing, cls.expected(config))

    @classmethod
    def encoder(cls, tokenizer: Tokenizer, asking: Asking) -> QuestionEncoder:
        """What makes token ids of questions."""
        return QuestionEncoder(tokenizer, asking)

    @classmethod
    def framing_as_trained(cls, tokenizer: Tokenizer, model_config: Any, options: Any) -> TextFraming:
        framing = cls.framing_with(options, tokenizer, model_config)
        asking, questions = cls.asking(options, tokenizer, framing), cls.questions(options, tokenizer)
        return TextFraming(framing, asking, cls.encoder(tokenizer, asking), questions, options)

    @classmethod
    def text_generator(cls) -> type[TextGenerator[Any]]:
        from ftk.generation.answering import TextAnswerer

        return TextAnswerer

    def _asking_of(self, model_config: Any) -> Asking:
        return self.asking(self.config, self.tokenizer, self.framing_with(self.config, self.tokenizer, model_config))


@dataclass(frozen=True)
class RowQuestions:
    """How a task makes questions.

    Attributes:
        of_row: all questions of a row with their answers.
        of_text: what someone asks, without an answer.
        of_messages: what is asked by the last message of a conversation (role, content), with values of variables of
            the template; None: the task knows none.
        windows: how a text that is too long is read; None: it is cut.
    """

    of_row: Callable[[Row], Iterable[Question]]
    of_text: Callable[[str], Question]
    of_messages: Callable[[Sequence[Any], Mapping[str, Any]], Question] | None = None
    windows: Windows | None = None
