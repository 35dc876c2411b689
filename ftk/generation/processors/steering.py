"""Options of a single prompt, from which processors and a seed are made."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ftk.builtins import FORMER_NAMES
from ftk.config.options import Option, options_of
from ftk.errors import UserError, counted, did_you_mean
from ftk.generation.config_groups import SamplingConfig
from ftk.generation.processors.base import Processors
from ftk.generation.processors.build import build_processors
from ftk.generation.processors.config import ProcessorConfig
from ftk.generation.processors.guides import guide_text

if TYPE_CHECKING:
    from ftk.generation.config import GenerationConfig
    from ftk.generation.processors.prefix import AllowedTokensFunction
    from ftk.tokenizers import Tokenizer

T = TypeVar("T")

_REMEMBERED = 256  # sets of processors; prompts, and calls, often share theirs
_REMEMBERED_CHARACTERS = 1 << 20  # of the options that they are made of


@dataclasses.dataclass(kw_only=True)
class _LengthConfig:
    """Limits of all answers to one prompt."""

    min_len: int | None = None
    max_len: int | None = None


_FILES = ("forbid_words_file", "guide_file")

# A prompt must not make ftk read files of its choice.
_STEERING = {
    option.name: option
    for config in (ProcessorConfig, _LengthConfig)
    for option in options_of("prompt", config)
    if option.name not in _FILES
}
_SEED = next(option for option in options_of("prompt", SamplingConfig) if option.name == "seed")

PROMPT_OPTIONS = (*_STEERING, _SEED.name)
"""Options that a prompt may have."""

PromptOptions: TypeAlias = Mapping[str, Any]
"""Options of one prompt: some of these names, with their values."""


class Steering:
    """Processors for all prompts, and those for prompts with options of their own.

        steering = Steering(ProcessorConfig(forbid_words=["bad"]), tokenizer, ends=(2,), min_len=0, max_len=24)
        steering.of({"constraints": ["art"], "max_len": 8}, num_answers=1)

    Args:
        processors: what `config` asks for, if it was made before; the other arguments are those of `build_processors`.

    Raises:
        UserError: values that are not allowed, or that contradict each other.
    """

    def __init__(
        self,
        config: ProcessorConfig,
        tokenizer: Tokenizer,
        *,
        ends: Collection[int],
        min_len: int,
        max_len: int,
        allowed_tokens: AllowedTokensFunction | None = None,
        in_answers: Collection[int] = (),
        processors: Processors | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.ends = ends
        self.min_len, self.max_len = min_len, max_len
        self.allowed_tokens = allowed_tokens
        self.in_answers = in_answers
        self.processors = self._build(config) if processors is None else processors
        self._known: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()  # of `_known`: a service reads prompts in several threads

    def of(self, options: PromptOptions, num_answers: int) -> Processors | None:
        """The processors of a prompt; None where its options ask for no others than those of all.

        Args:
            options: some of `PROMPT_OPTIONS`; each takes the place of the option of all that has its name.

        Raises:
            UserError: an unknown name, a wrong type, a value that is not allowed or contradicts another, or one that
                is for an answer that the prompt does not have.
        """
        values = _converted(options)
        values.pop(_SEED.name, None)
        if not values:
            return None
        _free_of_others(values)
        self._limit(values, num_answers)
        _check_numbers(values, num_answers)
        return self._remembered(values, lambda: self._build(dataclasses.replace(self.config, **values)))

    def changed(self, min_len: int, max_len: int, **options: Any) -> Steering:
        """The same with other limits of every answer and, in `config`, these options; files that they name are read.

        Raises:
            UserError: as for a new one, or an option of another type.
        """
        config = typed_config(self.config, **options)
        has_lengths = config.constraints or config.prefix or config.min_lens or config.max_lens

        def make() -> Steering:
            return Steering(
                config,
                self.tokenizer,
                ends=self.ends,
                min_len=min_len,
                max_len=max_len,
                allowed_tokens=self.allowed_tokens,
                in_answers=self.in_answers,
                processors=None if options or has_lengths else self.processors,  # which no limit changes
            )

        if any(options.get(name) for name in _FILES):
            return make()
        return self._remembered([min_len, max_len, {name: getattr(config, name) for name in options}], make)

    def _remembered(self, values: Any, make: Callable[[], T]) -> T:
        """What was made for these values, or is made now."""
        key = json.dumps(values, sort_keys=True)
        made: T | None = self._known.get(key)
        if made is None:
            made = make()
        with self._lock:
            self._known[key] = made
            self._known.move_to_end(key)
            while len(self._known) > 1 and (
                len(self._known) > _REMEMBERED or sum(map(len, self._known)) > _REMEMBERED_CHARACTERS
            ):
                self._known.popitem(last=False)
        return made

    def _build(self, config: ProcessorConfig) -> Processors:
        return build_processors(
            config,
            self.tokenizer,
            ends=self.ends,
            min_len=self.min_len,
            max_len=self.max_len,
            allowed_tokens=self.allowed_tokens,
            in_answers=self.in_answers,
        )

    def _limit(self, values: dict[str, Any], num_answers: int) -> None:
        """Writes the limits of all answers as those of each answer, in place."""
        for name, better in (("min_len", max), ("max_len", min)):
            limit = values.pop(name, None)
            if limit is None:
                continue
            low = max(1 if name == "max_len" else 0, self.min_len)
            if not low <= limit <= self.max_len:
                raise UserError(f"{name} is {limit}; for a single prompt it can be from {low} to {self.max_len}")
            own = values.get(f"{name}s", getattr(self.config, f"{name}s"))
            values[f"{name}s"] = [
                better(own[number], limit) if number < len(own) else limit
                for number in range(max(num_answers, len(own)))
            ]


def steering_of(
    kind: Callable[..., ProcessorConfig],
    tokenizer: Tokenizer,
    framing: Any,
    config: GenerationConfig,
    allowed_tokens: AllowedTokensFunction | None = None,
    **options: Any,
) -> Steering:
    """What steers the answers of a framing.

    Args:
        kind: of the task's processors (`Task.processor_config`).
        framing: says which tokens end an answer, and which command tokens may be in one.
        config: the lengths of answers.
        options: of the processors.

    Raises:
        UserError: an option is unknown, or of another kind.
    """
    return Steering(
        typed_config(kind(), **options),
        tokenizer,
        ends=framing.ends,
        min_len=config.min_len,
        max_len=config.max_len,
        allowed_tokens=allowed_tokens,
        in_answers=getattr(framing, "in_answers", ()),
    )


def seed_of(options: PromptOptions) -> int | None:
    """The seed among the options of a prompt, if there is one; UserError if it is no whole number."""
    return _converted({name: value for name, value in options.items() if name == _SEED.name}).get(_SEED.name)


def _converted(options: PromptOptions) -> dict[str, Any]:
    """The options in their types; one that is None is as good as not there."""
    values: dict[str, Any] = {}
    for given, value in options.items():
        name = FORMER_NAMES["option"].get(given, given)
        option: Option | None = _SEED if name == _SEED.name else _STEERING.get(name)
        if option is None:
            raise UserError(f"a prompt has no option {name!r}; {did_you_mean(name, PROMPT_OPTIONS)}")
        if value is None:
            continue
        values[name] = _typed(option, value)
    return values


def typed_config(config: ProcessorConfig, **options: Any) -> ProcessorConfig:
    """`config` with the options given by keyword; UserError for one of another type."""
    known = {option.name: option for option in options_of("processors", type(config))}
    return dataclasses.replace(config, **{name: _typed(known[name], value) for name, value in options.items()})


def _typed(option: Option, value: Any) -> Any:
    if option.name == "guide":
        value = [guide_text(text) for text in value] if isinstance(value, list) else guide_text(value)
    return option.from_python(value)


def _free_of_others(values: dict[str, Any]) -> None:
    """Options of all prompts that only say how another is meant do not hold where that other is replaced; in place."""
    if "constraints" in values:
        values.setdefault("constraint_answers", [])
        if not values["constraints"]:
            values.setdefault("ordered_constraints", False)
    if "guide" in values:
        values.setdefault("guide_file", None)
    if values.get("repetition_penalty") == 1.0:
        values.setdefault("repetition_penalty_prompt", False)


def _check_numbers(values: Mapping[str, Any], num_answers: int) -> None:
    """Refuses what is meant for answers that are not there."""
    answers = counted(num_answers, "answer")
    for name in ("prefix", "guide", "min_lens", "max_lens"):
        if len(values.get(name, ())) > num_answers:
            raise UserError(f"{name} has {len(values[name])} entries, but the prompt asks for {answers}")
    for number in values.get("constraint_answers", ()):
        if number > num_answers:
            raise UserError(f"constraint_answers names answer {number}, but the prompt asks for {answers}")
