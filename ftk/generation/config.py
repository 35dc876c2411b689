"""All options of generation together: what each strategy takes, and that they go with each other; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ftk.builtins import BUILTIN_MODULES
from ftk.config.foreign import in_keywords
from ftk.config.options import mistakes, option, options_of
from ftk.errors import UserError, did_you_mean
from ftk.generation.config_groups import (
    FILTERS,
    AnswerConfig,
    BatchConfig,
    BeamConfig,
    LanguageModelConfig,
    SamplingConfig,
)
from ftk.registry import SEARCHES

_BEAMS = ("beam", "diverse_beam", "beam_sampling")
_SAMPLERS = ("sampling", "beam_sampling")
_USERS: dict[str, tuple[str, ...]] = {
    "beam": _BEAMS,
    "early_stopping": _BEAMS,
    "diverse_groups": ("diverse_beam",),
    "diversity_strength": ("diverse_beam",),
    **dict.fromkeys(FILTERS, _SAMPLERS),
    "nbest": (*_BEAMS, "sampling"),
}


@dataclass(kw_only=True)
class GenerationConfig(AnswerConfig, BeamConfig, SamplingConfig, LanguageModelConfig, BatchConfig):
    """How answers are searched for. Greedy unless `beam` is above 1 or `sampling` is on."""

    search: str | None = option(
        None,
        "strategy: greedy, beam, diverse_beam, sampling, beam_sampling, or a plugin's as "
        "'NAME option=value ...'; if not given `beam` and `sampling` say it",
        metavar="NAME",
    )

    cuda_graphs: bool = option(
        True,
        "on a GPU record the kernels of a step, once for each of a few numbers of prompts and of tokens, "
        "and replay them; on a CPU without effect",
    )

    of_scores: ClassVar[tuple[str, ...]] = ("length_penalty",)
    """Options that count where answers are given, too, and only scored."""

    of_prompts: ClassVar[tuple[str, ...]] = ()
    """Options that are about the text of prompts; samples of a data set have none."""

    def validate(self) -> Iterator[str]:
        found = [text for group in self.groups() if hasattr(group, "validate") for text in group.validate(self)]
        yield from found or self._strategy_errors()

    @classmethod
    def groups(cls) -> tuple[Any, ...]:
        """The classes that its options come from, each with its own checks."""
        return (AnswerConfig, BeamConfig, SamplingConfig, LanguageModelConfig, BatchConfig)

    @classmethod
    def users(cls) -> dict[str, tuple[str, ...]]:
        """Option -> those of ftk's own strategies that use it; given to another it is a mistake."""
        return _USERS

    @property
    def strategy(self) -> str:
        """Name of the strategy that the options ask for."""
        if self.search is not None:
            return self.search.split(maxsplit=1)[0] if self.search.strip() else ""
        return "sampling" if self.sampling else "beam" if self.beam > 1 else "greedy"

    def _strategy_errors(self) -> Iterator[str]:
        """Options that do not go with the strategy, or with each other."""
        name = self.strategy
        if name not in SEARCHES:
            yield f"search is {self.search!r}; there are: {', '.join(SEARCHES.names())}"
            return
        if self.sampling and name != "sampling":
            yield f"search is {name} and sampling is on; choose one of them"
        if self.sampling and self.beam > 1:
            yield f"beam is {self.beam} and sampling is on; choose one of them, or `search` beam_sampling for both"
        elif name in _BUILT_IN:
            for option, users in self.users().items():
                value, default = getattr(self, option), type(self).__dataclass_fields__[option].default
                if value != default and name not in users:
                    yield f"{option} is {value}, but {name} search does not use it; {_turn_on(option, users)}"
        if name in _BEAMS:
            if self.beam == 1:
                yield f"search is {name}, but beam is 1; give it more hypotheses, e.g. `beam` 4"
            elif self.nbest > self.beam:
                yield f"nbest is {self.nbest}, but beam is {self.beam}; a beam has no more answers than hypotheses"
            if name == "diverse_beam" and self.beam % self.diverse_groups:
                yield f"diverse_groups is {self.diverse_groups}, which does not divide beam {self.beam}"


_BUILT_IN = frozenset(BUILTIN_MODULES["search"])


def _turn_on(option: str, users: tuple[str, ...]) -> str:
    if option in FILTERS:
        return "sampling is off; turn it on by `sampling`, or `search` beam_sampling"
    return f"it goes with `search` {' or '.join(users)}"


Config = TypeVar("Config", bound=GenerationConfig)


def checked_config(config: Config, **options: Any) -> Config:
    """`config` with the options given by keyword.

    Raises:
        UserError: an unknown option, one of another type, or values that are not allowed, all of them named.
    """
    check_names(options, [field.name for field in dataclasses.fields(config) if field.init])
    known = {option.name: option for option in options_of("generation", type(config), options)}
    result = dataclasses.replace(config, **{name: known[name].from_python(value) for name, value in options.items()})
    if errors := mistakes(result):
        raise UserError("; ".join(errors))
    return result


def check_names(options: Iterable[str], known: Sequence[str]) -> None:
    """Raises UserError for an option that is none of those known; says what another program's is called here."""
    for name in options:
        if name not in known:
            hint = in_keywords(name, known) or did_you_mean(name, known)
            raise UserError(f"unknown generation option {name!r}; {hint}")
