"""The options of generation, with their meaning, units and limits; imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ftk.builtins import BUILTIN_MODULES
from ftk.errors import UserError
from ftk.registry import SEARCHES

# Whose options they are; given to another of ftk's own strategies they are a mistake. Plugins may use any.
_BEAMS = ("beam", "diverse_beam", "beam_sampling")
_SAMPLERS = ("sampling", "beam_sampling")
_FILTERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_USERS: dict[str, tuple[str, ...]] = {
    "beam": _BEAMS,
    "early_stopping": _BEAMS,
    "diverse_groups": ("diverse_beam",),
    "diversity_strength": ("diverse_beam",),
    **dict.fromkeys(_FILTERS, _SAMPLERS),
    "contrastive_candidates": ("contrastive",),
    "contrastive_alpha": ("contrastive",),
    "nbest": (*_BEAMS, "sampling"),
}


@dataclass(kw_only=True)
class GenerationConfig:
    """How answers are searched for. Greedy unless `beam` is above 1 or `sampling` is on."""

    search: str | None = field(
        default=None,
        metadata={
            "help": "strategy: greedy, beam, diverse_beam, sampling, beam_sampling, contrastive, or a plugin's as "
            "'NAME option=value ...'; if not given --beam and --sampling say it",
            "metavar": "NAME",
        },
    )
    beam: int = field(default=1, metadata={"help": "hypotheses kept per prompt; 1 is greedy decoding"})
    nbest: int = field(default=1, metadata={"help": "answers per blank: beam and fewer, or so many samples"})
    alternatives: int = field(
        default=0,
        metadata={"help": "give so many likeliest tokens of the model for each place of an answer", "unit": "tokens"},
    )
    early_stopping: str = field(
        default="true",
        metadata={
            "help": "beams: a prompt is finished when it has --beam answers (true), when moreover no hypothesis is "
            "better at its present length (false), or could become so at any length (never)",
            "choices": ("true", "false", "never"),
        },
    )
    diverse_groups: int = field(
        default=2, metadata={"help": "diverse_beam: the beam is divided into so many groups", "unit": "groups"}
    )
    diversity_strength: float = field(
        default=0.5,
        metadata={"help": "diverse_beam: taken off a token's score for each earlier group that has just chosen it"},
    )
    max_len: int = field(default=24, metadata={"help": "longest answer of a blank", "unit": "tokens"})
    min_len: int = field(default=0, metadata={"help": "shortest answer of a blank; no end before", "unit": "tokens"})
    length_penalty: float = field(
        default=1.0,
        metadata={"help": "score = sum of log-probabilities / length ** this; above 1 favours long answers"},
    )
    sampling: bool = field(default=False, metadata={"help": "draw tokens at random instead of searching"})
    temperature: float = field(default=1.0, metadata={"help": "sampling: divides the logits; above 0"})
    top_k: int = field(
        default=0,
        metadata={"help": "sampling: draw among so many likeliest tokens; 0: all", "unit": "tokens"},
    )
    top_p: float = field(
        default=1.0,
        metadata={"help": "sampling: draw among the fewest tokens that hold this share, in (0, 1]"},
    )
    min_p: float = field(
        default=0.0,
        metadata={"help": "sampling: draw among the tokens with at least this share of the likeliest one's, in [0, 1]"},
    )
    typical_p: float = field(
        default=1.0,
        metadata={
            "help": "sampling: draw among the tokens of nearly expected information that hold this share, in (0, 1]"
        },
    )
    contrastive_candidates: int = field(
        default=4, metadata={"help": "contrastive: compare so many likeliest tokens", "unit": "tokens"}
    )
    contrastive_alpha: float = field(
        default=0.6,
        metadata={"help": "contrastive: weight of being unlike what was read, against probability, in [0, 1]"},
    )
    blank_order: str = field(
        default="left",
        metadata={
            "help": "which blank is filled first: left (to right), confident (the one that begins most surely), "
            "or numbers from 1 on such as 3,1 (these first, then the others from left to right)"
        },
    )
    reencode: bool = field(
        default=False,
        metadata={"help": "each answer takes its blank's place and the text is read anew; else answers stay behind it"},
    )
    truncate: str = field(
        default="error",
        metadata={
            "help": "prompts longer than the model's positions: an error, or cut at the left, the right, or both sides "
            "(middle) as far as the blanks",
            "choices": ("error", "left", "right", "middle"),
        },
    )
    seed: int = field(default=1, metadata={"help": "sampling: prompt and seed alone decide the answer"})
    batch_size: int = field(default=16, metadata={"help": "so many are answered at once", "unit": "prompts"})
    in_flight: bool = field(
        default=True,
        metadata={"help": "a prompt that is complete leaves the batch and another enters; off: batch after batch"},
    )

    def __post_init__(self) -> None:
        if isinstance(self.early_stopping, bool):  # as YAML and Python write it
            self.early_stopping = str(self.early_stopping).lower()

    def validate(self) -> Iterator[str]:
        """One message for each value, or pair of values, that is not allowed."""
        for name in ("beam", "nbest", "max_len", "batch_size", "diverse_groups", "contrastive_candidates"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; it must be at least 1"
        if not 0 <= self.min_len <= self.max_len:
            yield f"min_len is {self.min_len}; it must be from 0 to max_len {self.max_len}"
        if not 0.0 < self.temperature < math.inf:
            yield f"temperature is {self.temperature}; it must be above 0 and finite"
        if self.alternatives < 0:
            yield f"alternatives is {self.alternatives}; it must be 0 (none) or more"
        if self.top_k < 0:
            yield f"top_k is {self.top_k}; it must be 0 (all tokens) or more"
        if not 0.0 < self.top_p <= 1.0:
            yield f"top_p is {self.top_p}; it must be above 0 and at most 1"
        for name, least, most in (("min_p", 0.0, 1.0), ("contrastive_alpha", 0.0, 1.0)):
            if not least <= getattr(self, name) <= most:
                yield f"{name} is {getattr(self, name)}; it must be from 0 to 1"
        if not 0.0 < self.typical_p <= 1.0:
            yield f"typical_p is {self.typical_p}; it must be above 0 and at most 1"
        if not self.diversity_strength >= 0.0:
            yield f"diversity_strength is {self.diversity_strength}; it must be 0 or more"
        if self.truncate not in ("error", "left", "right", "middle"):
            yield f"truncate is {self.truncate!r}; it is one of error, left, right, middle"
        if self.blank_order not in ("left", "confident"):
            numbers = [one.strip() for one in self.blank_order.split(",")]
            if not all(one.isdecimal() and int(one) > 0 for one in numbers):
                yield f"blank_order is {self.blank_order!r}; it is left, confident, or numbers from 1 on, e.g. 2,1,3"
            elif len({int(one) for one in numbers}) < len(numbers):
                yield f"blank_order is {self.blank_order!r}; it names a blank twice"
        if self.early_stopping not in ("true", "false", "never"):
            yield f"early_stopping is {self.early_stopping!r}; it is one of true, false, never"
        yield from self._strategy_errors()

    @property
    def strategy(self) -> str:
        """Name of the strategy that the options ask for."""
        if self.search is not None:
            return self.search.split(maxsplit=1)[0] if self.search.strip() else ""
        return "sampling" if self.sampling else "beam" if self.beam > 1 else "greedy"

    def filters(self) -> dict[str, Any]:
        """What is done to the distribution that is drawn from: arguments of `token_probabilities`."""
        return {name: getattr(self, name) for name in _FILTERS}

    def _strategy_errors(self) -> Iterator[str]:
        """Options that do not go with the strategy, or with each other."""
        name = self.strategy
        if name not in SEARCHES:
            yield f"search is {self.search!r}; there are: {', '.join(SEARCHES.names())}"
            return
        if self.sampling and name != "sampling":
            yield f"search is {name} and sampling is on; choose one of them"
        if self.sampling and self.beam > 1:
            yield f"beam is {self.beam} and sampling is on; choose one of them, or --search beam_sampling for both"
        elif name in _BUILT_IN:
            for option, users in _USERS.items():
                value, default = getattr(self, option), type(self).__dataclass_fields__[option].default
                if value != default and name not in users:
                    yield f"{option} is {value}, but {name} search does not use it; {_turn_on(option, users)}"
        if name in _BEAMS:
            if self.beam == 1:
                yield f"search is {name}, but beam is 1; give it more hypotheses, e.g. --beam 4"
            elif self.nbest > self.beam:
                yield f"nbest is {self.nbest}, but beam is {self.beam}; a beam has no more answers than hypotheses"
            if name == "diverse_beam" and self.diverse_groups > 0 and self.beam % self.diverse_groups:
                yield f"diverse_groups is {self.diverse_groups}, which does not divide beam {self.beam}"


_BUILT_IN = frozenset(BUILTIN_MODULES["search"])


def _turn_on(option: str, users: tuple[str, ...]) -> str:
    if option in _FILTERS:
        return "sampling is off; turn it on by --sampling, or --search beam_sampling"
    return f"it goes with --search {' or '.join(users)}"


def generation_config(config: GenerationConfig | None = None, **options: Any) -> GenerationConfig:
    """`config` (or the defaults) with the options given by keyword, checked.

    Raises:
        UserError: an unknown option or values that are not allowed, all of them named.
    """
    known = [one.name for one in dataclasses.fields(GenerationConfig)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"unknown generation option {name!r}; {hint}there are: {', '.join(known)}")
    result = dataclasses.replace(config or GenerationConfig(), **options)
    errors = list(result.validate())
    if errors:
        raise UserError("; ".join(errors))
    return result
