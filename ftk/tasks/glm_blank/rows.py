"""The task glm_fill: texts with several blanks and the answer to each, as the original's task `blank` learns them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ftk.config.options import option
from ftk.data.supervised.row import Row
from ftk.errors import UserError, counted
from ftk.registry import named, register_task
from ftk.tasks.answering.asking import Asking
from ftk.tasks.answering.questions import Question, QuestionEncoder, Words
from ftk.tasks.answering.task import AnswerConfig, AnswerTask, RowQuestions, target_length_option
from ftk.tasks.glm_blank.infill.config import FillConfig

if TYPE_CHECKING:
    from ftk.generation.engine.request import Framing
    from ftk.tasks.glm_blank.infill.fill import BlankFiller
    from ftk.tasks.glm_blank.infill.rows import RowFraming
    from ftk.tokenizers.base import Tokenizer


@dataclass(kw_only=True)
class GLMFillConfig(AnswerConfig):
    source_field: str = option(
        "source", "field of a row with a text that has [MASK], [sMASK] or [gMASK] where answers go", metavar="FIELD"
    )
    target_field: str = option(
        "target", "field of a row with the list of answers, one for each mask, from left to right", metavar="FIELD"
    )
    target_length: int = target_length_option(
        "most tokens of all answers to a text, their ends counted; further tokens are not learned"
    )
    misspelt_blanks: str = option(
        "refuse",
        "texts with what is nearly a blank, [mask], <mask>, 【MASK】: refused, or read as text",
        choices=("refuse", "text"),
    )


@register_task("glm_fill", config=GLMFillConfig, criterion="cross_entropy", dataset="rows")
class GLMFillTask(AnswerTask):
    """The blanks of a text are filled one after the other, each answer behind those before it."""

    config: GLMFillConfig
    generation_config = FillConfig

    @classmethod
    def expected(cls, config: GLMFillConfig) -> str:
        return "word"  # not used: each text says itself which masks it has

    @classmethod
    def questions(cls, config: GLMFillConfig, tokenizer: Tokenizer) -> RowQuestions:
        from ftk.tasks.glm_blank.infill.reader import BlankReader, filled
        from ftk.tasks.glm_blank.infill.rows import BlankQuestion

        reader = BlankReader(tokenizer)

        def of_row(row: Row) -> Iterator[Question]:
            text, answers = row.text(config.source_field), row.get(config.target_field, (list, str))
            answers = [answers] if isinstance(answers, str) else answers
            for answer in answers:
                if not isinstance(answer, str):
                    row.refuse(config.target_field, "holds what is no text; write a list with a text for each blank")
            pieces = reader.pieces(text)
            if not len(answers) == len(pieces) - 1 > 0:
                row.refuse(
                    config.target_field,
                    f"has {counted(len(answers), 'answer')}, but field {config.source_field!r} has "
                    f"{counted(len(pieces) - 1, 'blank')}; write one for each {', '.join(reader.blanks)}",
                )
            whole = filled(pieces, answers)
            yield BlankQuestion(
                [Words(text)], whole, (), text, row.place, answers=answers, misspelt_blanks=config.misspelt_blanks
            )

        return RowQuestions(of_row, _refuse_text)

    @classmethod
    def framing(cls, tokenizer: Tokenizer, model_config: Any) -> RowFraming:
        from ftk.tasks.glm_blank.infill.framing import BlankFraming
        from ftk.tasks.glm_blank.infill.rows import RowFraming

        usual = super().framing(tokenizer, model_config)
        if not isinstance(usual, BlankFraming):
            raise UserError(
                f"`task` glm_fill is for models that fill several blanks of a text, which {named(usual)} does not ask; "
                f"choose a GLM, or `task` seq2seq with one target for each text"
            )
        return RowFraming(tokenizer.special, model_config)

    @classmethod
    def asking(cls, config: GLMFillConfig, tokenizer: Tokenizer, framing: Framing) -> Asking:
        from ftk.tasks.glm_blank.infill.rows import BlankAsking

        return BlankAsking(framing, cls.expected(config))

    @classmethod
    def encoder(cls, tokenizer: Tokenizer, asking: Asking) -> QuestionEncoder:
        from ftk.tasks.glm_blank.infill.rows import BlankEncoder

        return BlankEncoder(tokenizer, asking)

    @classmethod
    def text_generator(cls) -> type[BlankFiller]:  # type: ignore[override]
        from ftk.tasks.glm_blank.infill.fill import BlankFiller

        return BlankFiller


def _refuse_text(text: str) -> NoReturn:
    raise UserError(
        "the model fills blanks of rows, which have a field for texts and one for answers; give a folder of such rows, "
        "or texts with [MASK] to ftk-generate by --input"
    )
