"""The contract of a model family: what trainer, pipeline, generation, export and planner ask of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.modules.attention import Attend, by_window, identity
from ftk.modules.attention_forms import attention_form, sequence_attention
from ftk.modules.heads import Head, TiedVocabulary
from ftk.modules.initialization import initial_of, is_undrawn
from ftk.modules.masks import Visibility
from ftk.modules.precision import matmul_dtype
from ftk.modules.transformer_layer import run_layers
from ftk.modules.varlen_attention import is_slow_behind_prefix
from ftk.registry import named


class Backbone(nn.Module):
    """An embedding, a list of layers, called as `layer(hidden, attend)`, and what a head reads behind the last one.

    A family gives `INPUTS`, `layers`, `embed`, `attend` and `finish`, and calls `init_weights(seed)` at the end of its
    `__init__`. `hidden_states` and `forward` are written here; a model of two stacks has `all_layers`, `enter` and
    `run_stage` of its own (`ftk.models.encoder_decoder.model`). It may also give `tensor_parallel_plan`
    (`ftk.model_parallel.tensor_parallel.plan`) and `training_flops` (`CountsFlops`).

    Args:
        config: the options of the family: a dataclass with at least `vocab_size`, `num_layers`, `hidden_size`,
            `num_attention_heads`, `inner_size` and `max_positions`.
    """

    INPUTS: ClassVar[dict[str, str]]
    """Names of the inputs, all int64, and their axes: {"tokens": "B T", "position_ids": "B 2 T"}; `tokens` first."""

    STARTS_AS: ClassVar[Mapping[str, str | None]] = {}
    """Part of the names of parameters that weights of another kind of model lack -> what stands there in the names of
    those that they start as copies of; None: they start with initial values."""

    config: Any
    layers: nn.ModuleList

    embed: Callable[..., Tensor]
    """(tokens [B, T], inputs of its own by name) -> [B, T, H]; an input that is not given is None."""

    attend: Callable[..., Attend]
    """(tokens [B, T], inputs of its own by name) -> the attention of whole sequences; `around` is put around it."""

    finish: Callable[[Tensor], Tensor]
    """What comes behind the last layer, such as a norm: hidden [..., H] -> what the head reads, [..., H]."""

    ADDS_TOKENS: ClassVar[bool] = False
    """Whether `hidden_states` puts tokens in front of those that it is given, which `embed` and `attend` do not."""

    ADDS_BIAS: ClassVar[bool] = False
    """Whether `around` adds a bias to the scores, which flex attention does not take."""

    TAKES_INPUTS: ClassVar[tuple[str, ...]] = ("embed", "attend")
    """The methods whose signatures name the inputs."""

    _embed_inputs: ClassVar[frozenset[str]]
    _attend_inputs: ClassVar[frozenset[str]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "INPUTS" not in cls.__dict__:
            return
        for name in ("embed", "attend", "finish"):
            if not hasattr(cls, name):
                raise UserError(f"{named(cls)} has no {name!r}; a Backbone has INPUTS, layers, embed, attend, finish")
        # Once for each class: signatures are slow, and torch.compile does not look into them.
        cls._embed_inputs, cls._attend_inputs = _own_inputs(cls.embed), _own_inputs(cls.attend)
        own = frozenset().union(*(_own_inputs(getattr(cls, name)) for name in cls.TAKES_INPUTS))
        if {"tokens", *own} != cls.INPUTS.keys():
            raise UserError(
                f"{named(cls)}: INPUTS names {', '.join(cls.INPUTS)}, but {' and '.join(cls.TAKES_INPUTS)} take "
                f"{', '.join(['tokens', *sorted(own)])}; they must be the same"
            )

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """What the head makes of every place.

        Args:
            tokens: [B, T] int64.
            inputs: others of `INPUTS`, by name.

        Returns:
            [B, T, V] with a vocabulary as the head.

        Raises:
            UserError: an input that the model does not take.
        """
        return self.head(self.hidden_states(tokens, **inputs))

    def hidden_states(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """What the head reads, [B, T, H]; arguments as in `forward`."""
        states = self.run_stage(self.enter(tokens, inputs), tokens, inputs)
        return self.finish(states[-1])

    @property
    def all_layers(self) -> list[nn.Module]:
        """Every layer that is here, in the order in which they are called: what a pipeline cuts into stages."""
        return list(self.layers)

    def enter(self, tokens: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        """What the first layer reads, and what layers behind it read besides: what stages of a pipeline exchange.

        Args:
            tokens: [B, T].
            inputs: the model's other inputs, by name.

        Returns:
            hidden [B, T, H]; of two stacks one for each.
        """
        for_embed, _ = self.split_inputs(inputs)
        return (self.embed(tokens, **for_embed),)

    def run_stage(self, states: tuple[Tensor, ...], tokens: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        """What the layers that are here, all or those of a stage, make of the states that `enter` or the stage before
        gave; `finish` reads the last one. Arguments as of `enter`."""
        return (self.run_layers(states[0], self.wrapped_attend(tokens, inputs)),)

    def run_layers(self, hidden: Tensor, attend: Any, layers: nn.ModuleList | None = None) -> Tensor:
        """The layers that are here, or some of them: hidden [B, T, H] -> [B, T, H]"""
        layer_drop = getattr(self.config, "layer_drop", 0.0) if self.training else 0.0
        return run_layers(self.layers if layers is None else layers, hidden, attend, layer_drop)

    def wrapped_attend(self, tokens: Tensor, inputs: dict[str, Any]) -> Attend:
        """What the layers are given for whole sequences: `attend` inside of `around`.

        Args:
            tokens: [B, T].
            inputs: the model's other inputs, by name; `attend` gets those that it takes.
        """
        _, for_attend = self.split_inputs(inputs)
        position_ids = inputs.get("position_ids")
        if position_ids is None:
            position_ids = torch.arange(tokens.size(1), device=tokens.device)[None]
        return self.around(position_ids=position_ids)(self.attend(tokens, **for_attend))

    def split_inputs(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the inputs besides the tokens what `embed` takes, and what `attend` takes; some are for both.

        Raises:
            UserError: an input that the model does not take.
        """
        if unknown := inputs.keys() - self.INPUTS.keys():
            raise UserError(f"{type(self).__name__} takes no {min(unknown)}; its inputs are {', '.join(self.INPUTS)}")
        return (
            {name: value for name, value in inputs.items() if name in self._embed_inputs},
            {name: value for name, value in inputs.items() if name in self._attend_inputs},
        )

    @property
    def head(self) -> Head:
        """The output layer: the module that is registered as `head`, else the token embedding.

        Found on each access, because quantisation puts another embedding in its place.
        """
        own: Any = self._modules.get("head")
        return TiedVocabulary(self.token_embedding) if own is None else own  # type: ignore[arg-type]

    def around(self, position_ids: Tensor, key_positions: Tensor | None = None) -> Callable[[Attend], Attend]:
        """What a family puts around each `attend`, of whole sequences and of caches alike; here nothing.

        A rotation of queries and keys, a bias or another scale of the scores: a named tuple that holds an `attend`
        (`ftk.modules.attention.wrapped`, where layers have windows of their own).

        Args:
            position_ids: of the queries, as in `INPUTS`.
            key_positions: of the keys, where they are not those of the queries.
        """
        return identity

    def sequence_attend(self, tokens: Tensor, visibility: Visibility, num_keys: int | None = None) -> Attend:
        """The attention of whole sequences in the form that the options ask for, within the windows of the layers; for
        `attend` of a family.

        Args:
            tokens: [B, T].
            visibility: which of them sees which.
            num_keys: S, where the keys are those of another sequence; None: T.
        """
        config, num_tokens = self.config, tokens.size(1)
        # The first is a norm's; matrices may be quantised. And every stage of a pipeline has a layer.
        dtype = matmul_dtype(next(self.all_layers[0].parameters()))
        dropout = config.attention_dropout
        in_training = dropout if self.training else 0.0

        def attend(window: int | None) -> Attend:
            about = config.attention, tokens.device, dtype, num_tokens, config.head_size, dropout, window
            form = attention_form(
                *about,
                has_bias=self.ADDS_BIAS,
                in_runs=visibility.in_runs,
                is_slow_behind_prefix=is_slow_behind_prefix(visibility, num_tokens, config.head_size, tokens.device),
            )
            seen = visibility if window is None else visibility._replace(window=window)
            return sequence_attention(form, seen, num_tokens, tokens.device, in_training, dtype, num_keys)

        return by_window(windows_of(config), attend)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Draws all weights again, but for those on the meta device, and for none inside of `undrawn`.

        Args:
            seed: the seed of torch's default generator if None.
        """
        if is_undrawn():
            return
        seed = torch.initial_seed() if seed is None else seed
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(self.initial_value(name, parameter.shape, seed))

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        """The whole initial value of a parameter or buffer, float32 on the CPU: a function of its arguments alone.

        Args:
            name: in this model.
            shape: of the whole.
            seed: of the model.

        Raises:
            UserError: the module that has it declares none (`ftk.modules.initialization.declare`).
        """
        owner, _, own_name = name.rpartition(".")
        initial = initial_of(self.get_submodule(owner), own_name)
        if initial is None:
            raise UserError(
                f"{type(self).__name__}: {name} has no initial value; declare it where the module is made: "
                f"declare(module, {own_name}=Normal(0.02)), of ftk.modules.initialization"
            )
        return initial(name, shape, seed)


@runtime_checkable
class CountsFlops(Protocol):
    """A model that knows its matrix products. One that does not is trained without FLOP/s and MFU in its records."""

    def training_flops(self, num_tokens: int, num_targets: int, num_pairs: int) -> int:
        """Floating-point operations of the products of a forward and a backward pass.

        Args:
            num_tokens: tokens, padding included.
            num_targets: positions with logits.
            num_pairs: query-key pairs: the sum over sequences of their padded length squared.
        """


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The windows of a model's layers (`TransformerConfig.layer_windows`), each once."""
    return tuple(dict.fromkeys(getattr(config, "layer_windows", (None,))))


def _own_inputs(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments besides `self` and `tokens`."""
    return frozenset(list(inspect.signature(function).parameters)[2:])
