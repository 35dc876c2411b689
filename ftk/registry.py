"""The registries: every part of ftk that can be exchanged is known by a name that stands in one of them.

    from ftk.registry import register_criterion

    @register_criterion("cross_entropy", config=CrossEntropyConfig)
    class CrossEntropy: ...

The class is later built as `CrossEntropy(config, **runtime_objects)`. Built-in parts and plugins register by
the same decorators. `ftk/builtins.py` only tells in which module a built-in name registers itself, so that
names can be listed without importing torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ftk.builtins import BUILTIN_MODULES, FOREIGN_NAMES, FORMER_NAMES, REMOVED_NAMES
from ftk.errors import UserError, did_you_mean

T = TypeVar("T", bound=Callable[..., Any] | str)
_MAX_LISTED = 80
Recipe = Mapping[str, Mapping[str, Any]]
"""Section of the configuration -> option -> value; `_name` chooses the section's part."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered part: its public name, what builds it, and the dataclass of its options.

    `builder` is a class or function, or "module:name" of one, whose module is imported when `target` is asked for.
    `model` and `recipe` are set for architectures only: the name of the model whose config dataclass they fill, and
    values of other sections that a training of this size starts from; `task` for models, `criterion` and `dataset` for
    tasks: the one that they usually have; `task` for criterions: the only one that they are for.
    """

    name: str
    builder: Callable[..., Any] | str
    config: type | None
    model: str | None = None
    task: str | None = None
    criterion: str | None = None
    dataset: str | None = None
    recipe: Recipe = dataclasses.field(default_factory=dict)
    contract: str = ""
    offers: tuple[str, ...] = ()

    @functools.cached_property
    def target(self) -> Callable[..., Any]:
        """The class or function that builds the part."""
        if not isinstance(self.builder, str):
            return self.builder
        module, _, name = self.builder.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found

    def check(self, part: Any) -> None:
        """Raises UserError if what was built does not have what a part of its kind offers."""
        missing = [name for name in self.offers if not hasattr(part, name)]
        if missing:
            raise UserError(f"{named(part)} has no {missing[0]!r}; {self.contract} has {', '.join(self.offers)}")


class Registry:
    """Names of one kind of part ("task", "criterion", ...) and what they stand for.

    Args:
        kind: for messages and the table of built-in parts.
        contract: what a part has to be, for messages; `offers`: methods and attributes that it has to have.
        dotted: (prefix, module) of names that stand in no table: the module's `entry(name)` makes their entry.
    """

    def __init__(
        self, kind: str, contract: str = "", offers: tuple[str, ...] = (), dotted: tuple[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.contract = contract
        self.offers = offers
        self._dotted = dotted
        self._entries: dict[str, Entry] = {}

    def register(
        self,
        name: str,
        config: type | None = None,
        model: str | None = None,
        task: str | None = None,
        criterion: str | None = None,
        dataset: str | None = None,
        recipe: Recipe | None = None,
    ) -> Callable[[T], T]:
        """A decorator that registers a class or function under `name`.

        Called with the text "module:name" it registers one that is imported when it is used: options are known without
        it, and without torch.

        Args:
            name: public name, as in `task` NAME.
            config: dataclass of the options; an instance is the first argument when the part is built.
            model: for architectures, the model whose config the decorated function returns.
            task: for models, the task where none is chosen; for criterions, the only one that they are for.
            criterion, dataset: for tasks, those where none is chosen.
            recipe: for architectures, what a training of this size uses where the user gives nothing.

        Raises:
            UserError: the name is taken (both places are named), `config` is not a dataclass, or not one of those that
                the class asks for by `OPTIONS`, or a text names nothing; no name is given.
        """
        if not isinstance(name, str):
            raise UserError(f"{named(name)} is registered without a name; write @register_{self.kind}('NAME')")

        def decorate(target: T) -> T:
            if isinstance(target, str) and not all(target.partition(":")):
                raise UserError(f"{self.kind} {name!r} is registered as {target!r}; it must be 'module:name'")
            entry = Entry(
                name, target, config, model, task, criterion, dataset, recipe or {}, self.contract, self.offers
            )
            if config is not None and not (isinstance(config, type) and dataclasses.is_dataclass(config)):
                whose = named(entry.target)
                raise UserError(f"{self.kind} {name!r}, {whose}: config must be a dataclass, got {config!r}")
            base = getattr(target, "OPTIONS", None)
            if config is not None and isinstance(base, type) and not issubclass(config, base):
                raise UserError(f"{named(config)} must derive from {base.__module__}.{base.__qualname__}")
            for kind, lost in () if config is None else _no_fields(config):
                raise UserError(
                    f"{named(kind)} adds {lost!r} to a dataclass, but is none itself; put @dataclass(kw_only=True) "
                    f"above it"
                )
            taken = self._entries.get(name)
            if taken is None and self._builtin.get(name, __name__) not in sys.modules:
                taken = self.get(name)
            if taken is not None:
                places = f"{_place(taken.target)} and {_place(entry.target)}"
                raise UserError(f"{self.kind} {name!r} is registered twice: {places}; rename one of them")
            self._entries[name] = entry
            return target

        return decorate

    def get(self, name: str) -> Entry:
        """The entry called `name`, now or formerly, importing the built-in module that holds it if need be.

        Raises:
            UserError: there is no such name; lists those that exist and the closest match.
        """
        name = self.current_name(name)
        if name not in self._entries and name in self._builtin:
            importlib.import_module(self._builtin[name])
        if name not in self._entries and self._dotted is not None and name.startswith(self._dotted[0]):
            return importlib.import_module(self._dotted[1]).entry(name)
        if name not in self._entries and (instead := REMOVED_NAMES.get(self.kind, {}).get(name)):
            raise UserError(f"{self.kind} {name!r} was removed; {instead}")
        if name not in self._entries:
            raise UserError(self._unknown(name))
        return self._entries[name]

    def of_config(self, config: Any) -> Entry:
        """The entry whose options `config` is an instance of; its part has been built, so that it is known.

        Raises:
            UserError: no part has such options.
        """
        found = [entry for entry in self._entries.values() if entry.config is type(config)]
        if not found:
            raise UserError(f"{named(config)} is not the class of the options of any registered {self.kind}")
        return found[0]

    def names(self) -> list[str]:
        """All names, sorted, without importing anything."""
        return sorted({*self._entries, *self._builtin})

    def current_name(self, name: str) -> str:
        """Today's name of a part that had this one."""
        return self.former_names.get(name, name)

    @property
    def former_names(self) -> dict[str, str]:
        """Names that parts had -> those that they have."""
        return FORMER_NAMES.get(self.kind, {})

    def hint(self, name: str) -> str:
        """For messages about an unknown name: what it is called here, or else the closest match and all names."""
        theirs = FOREIGN_NAMES.get(self.kind, {}).get(name)
        if theirs:
            return f"in ftk: {theirs}"
        names = self.names()
        hint = did_you_mean(name, names)
        if len(names) <= _MAX_LISTED or not hint.startswith("there are: "):
            return hint
        families = sorted({each.partition("_")[0] for each in names})  # names of architectures begin with these
        return f"there are {len(names)}, which begin with {', '.join(families)}"

    def _unknown(self, name: str) -> str:
        return f"unknown {self.kind} {name!r}; {self.hint(name)}"

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._builtin

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    @property
    def _builtin(self) -> dict[str, str]:
        return BUILTIN_MODULES.get(self.kind, {})


class Subset(Registry):
    """The entries of a registry that fulfil a condition; what is registered there is here, too."""

    def __init__(self, registry: Registry, fulfils: Callable[[Entry], bool]) -> None:
        super().__init__(registry.kind)
        self._registry = registry
        self._fulfils = fulfils

    def get(self, name: str) -> Entry:
        if name not in self:
            raise UserError(self._unknown(name))
        return self._registry.get(name)

    def names(self) -> list[str]:
        return [name for name in self._registry.names() if self._fulfils(self._registry.get(name))]

    def __contains__(self, name: str) -> bool:
        return name in self.names()


def _no_fields(config: type) -> Iterator[tuple[type, str]]:
    """Classes that a dataclass is made of, itself among them, and what they add to one without being one themselves."""
    fields = {field.name for field in dataclasses.fields(config)}
    for kind in config.__mro__:
        own = {} if "__dataclass_params__" in vars(kind) else inspect.get_annotations(kind)
        if dataclasses.is_dataclass(kind):
            yield from (
                (kind, name) for name in own if name not in fields and not re.search("ClassVar|Final", str(own[name]))
            )


def is_plugin(part: Any) -> bool:
    """Whether a part, or its class, is not ftk's own."""
    return _class_of(part).__module__.partition(".")[0] != "ftk"


def attention_of_plugin(model: Any) -> str | None:
    """The form of attention of a model, where that is a plugin's."""
    form = getattr(getattr(model, "config", None), "attention", None)
    return form if form in ATTENTIONS.names() and is_plugin(ATTENTIONS.get(form).target) else None


def named(part: Any) -> str:
    """A part, or its class, for messages: class, file and line."""
    kind = _class_of(part)
    return f"{kind.__qualname__} ({_place(kind)})"


def _class_of(part: Any) -> Any:
    return part if inspect.isclass(part) or inspect.isroutine(part) else type(part)


@functools.cache  # Python parses the whole file to find a class
def _place(target: Callable[..., Any]) -> str:
    """file:line of a class or function, for messages."""
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):  # defined in a notebook or an interactive session
        return f"module {target.__module__}"


TASKS = Registry(
    "task", "a task, an `ftk.tasks.base.Task`,", ("load_split", "collater", "complete_model_config", "build_model")
)
MODELS = Registry("model", "a model, a `torch.nn.Module`,", ("forward", "named_parameters"))
ARCHITECTURES = Registry("architecture")
CRITERIONS = Registry("criterion", "a criterion, an `ftk.criterions.base.Criterion`,", ("loss", "count", "nats"))
OPTIMIZERS = Registry(
    "optimizer",
    "an optimizer, a `torch.optim.Optimizer`,",
    ("step", "param_groups", "state_dict"),
    dotted=("torch.optim.", "ftk.optim.torch_optim"),
)
LR_SCHEDULERS = Registry("lr_scheduler", "a schedule, an `ftk.optim.schedules.LRScheduler`,", ("decayed", "lr"))
DATASETS = Registry(
    "dataset", "a dataset, besides `documents` or `samples`,", ("splits", "tokenizer", "tokenizer_folder")
)
TOKENIZERS = Registry("tokenizer")
SPECIAL_TOKENS = Registry("special_tokens")
SCORERS = Registry("scorer", "a scorer, an `ftk.evaluation.base.Scorer`,", ("add", "result", "signature"))
EVALUATIONS = Registry(
    "evaluation",
    "an evaluation, an `ftk.evaluation.evaluation.Evaluation`,",
    ("questions", "records", "metrics", "group", "settings"),
)
HOOKS = Registry("hook", "a hook, an `ftk.trainer.Hook`,", ("before_train", "before_step", "after_train"))
SEARCHES = Registry("search", "a strategy, an `ftk.generation.search.base.Search`,", ("width", "draws", "advance"))
ATTENTIONS = Registry("attention")
CONVERTERS = Registry("converter")  # forms of checkpoints, `ftk.models.conversion.FileFormat`
ADAPTERS = Registry("adapter", "an adapter, an `ftk.modules.adapters.adapt.Adapter`,", ("PARTS", "config", "put_on"))
HF_MODELS = Registry("hf_model")  # by model: `ftk.models.conversion.Converter`

register_task = TASKS.register
register_model = MODELS.register
register_criterion = CRITERIONS.register
register_optimizer = OPTIMIZERS.register
register_lr_scheduler = LR_SCHEDULERS.register
register_dataset = DATASETS.register
register_tokenizer = TOKENIZERS.register
register_special_tokens = SPECIAL_TOKENS.register
register_scorer = SCORERS.register
register_evaluation = EVALUATIONS.register
register_hook = HOOKS.register
register_search = SEARCHES.register
register_attention = ATTENTIONS.register
register_converter = CONVERTERS.register
register_adapter = ADAPTERS.register
register_hf_model = HF_MODELS.register


def register_architecture(name: str, *, model: str, recipe: Recipe | None = None) -> Callable[[T], T]:
    """A decorator for a function without arguments that returns the config of `model` for this size.

    @register_architecture("gpt2_large", model="gpt2", recipe={"optimizer": {"lr": 2.5e-4}})
    def gpt2_large() -> GPT2Config:
        return GPT2Config(num_layers=36, hidden_size=1280, num_attention_heads=20)

    The values of `recipe` are those of the configuration's sections ("optimizer", "lr_scheduler", "dataloader" ...);
    what the user gives wins.
    """
    return ARCHITECTURES.register(name, model=model, recipe=recipe)
