"""The styles of a plan: which parameters of a module are shared, and what is communicated around its forward pass.

A styled module keeps its class's own forward pass, which sees the local parts of its parameters: the module becomes an
instance of a subclass whose properties give them, while `named_parameters()` has the DTensors. What is communicated
around it stands in the subclass's `forward`. Each style stands behind the class that is mixed into its modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ftk.model_parallel.tensor_parallel.functions import (
    copy_to_region,
    gather_from_region,
    part_size,
    scatter_to_region,
)
from ftk.model_parallel.tensor_parallel.region import TensorRegion


class Styled(nn.Module):
    """Base of all; the forward pass is that of the module's own class."""

    tensor_style: Any  # a `Style`, whose options the forward pass reads
    tensor_region: TensorRegion

    def seen(self, name: str, parameter: DTensor) -> Tensor:
        """The part of a parameter that the module's own code reads."""
        return parameter.to_local()


@dataclass(frozen=True, kw_only=True)
class Style:
    """What is done to one module. The fields are the options that a plan may give.

    Options:
        divide: attributes of the module that count what is shared, and are divided by the number of processes, such as
            "split_size" of GPT-2's attention, or "nf", the outputs of Conv1D.
    """

    divide: tuple[str, ...] = ()
    behaviour: ClassVar[type[Styled]]
    """The class that is mixed into the class of the module."""

    def dims(self, module: nn.Module) -> dict[str, int]:
        """Of the module's own parameters those that are cut, and along which dimension."""
        return {}

    def check(self, module: nn.Module, size: int) -> Iterator[str]:
        """One message for each reason why `size` processes cannot share the module."""
        for name in self.divide:
            value = getattr(module, name, None)
            if not isinstance(value, int):
                yield f"has no whole number {name!r} to divide"
            elif value % size:
                yield f"{name} is {value}, {_not_divided(value, size)}"


class ReplicatedModule(Styled):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        with self.tensor_region.random.common(_device(inputs)) if _is_random(self) else nullcontext():
            return super().forward(*inputs, **options)


@dataclass(frozen=True, kw_only=True)
class Replicated(Style):
    """Whole on every process, before and behind: what is not named in a plan.

    Random numbers are the same on all processes, inside a `sharded` module as well.
    """

    behaviour: ClassVar[type[Styled]] = ReplicatedModule


class SequenceModule(Styled):
    def forward(self, values: Tensor, *inputs: Any, **options: Any) -> Any:
        region, style = self.tensor_region, self.tensor_style
        if style.scatter_input:
            values = region.scatter(values)
        with self._stream(values.device):
            output = super().forward(values, *inputs, **options)
        return region.gather(output) if style.gather_output else output

    def _stream(self, device: torch.device) -> AbstractContextManager[None]:
        if not _is_random(self):
            return nullcontext()
        random = self.tensor_region.random
        return random.own(device) if self.tensor_region.cuts_sequence else random.common(device)


@dataclass(frozen=True, kw_only=True)
class Sequence(Style):
    """With sequence parallel: works on a part of the sequence (norms, dropout). Otherwise as `replicated`.

    Options:
        scatter_input: the first input is whole, and cut here: hidden states [B, T, ..] or integers [.., T].
        gather_output: what follows needs the whole.
    """

    scatter_input: bool = False
    gather_output: bool = False
    behaviour: ClassVar[type[Styled]] = SequenceModule


class ShardedModule(Styled):
    """Parameters of its own are whole on each process, which has a part of their gradient."""

    def seen(self, name: str, parameter: DTensor) -> Tensor:
        return copy_to_region(parameter.to_local(), self.tensor_region.group)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not (self.training and self.tensor_style.own_random):
            return super().forward(*inputs, **options)
        with self.tensor_region.random.own(_device(inputs)):
            return super().forward(*inputs, **options)


@dataclass(frozen=True, kw_only=True)
class Sharded(Style):
    """A module whose inside lies between column and row layers, such as attention on some of the heads.

    Options:
        own_random: it draws random numbers, which must differ between processes.
    """

    own_random: bool = True
    behaviour: ClassVar[type[Styled]] = ShardedModule


@dataclass(frozen=True, kw_only=True)
class _Linear(Style):
    """A module with a matrix `weight` and perhaps a `bias`.

    Options:
        units: what is shared is whole units, such as attention heads; None: single rows or columns.
        unit_name: what to call them.
        transposed: the weight is [inputs, outputs], as in Hugging Face's Conv1D.
    """

    units: int | None = None
    unit_name: str = "units"
    transposed: bool = False
    fused: int = 1
    cut_outputs: ClassVar[bool]

    def weight_dim(self) -> int:
        return int(self.transposed == self.cut_outputs)

    def check(self, module: nn.Module, size: int) -> Iterator[str]:
        yield from Style.check(self, module, size)
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            yield f"is a {type(module).__name__} without a matrix weight"
            return
        length, side = weight.size(self.weight_dim()), "outputs" if self.cut_outputs else "inputs"
        if length % self.fused:
            yield f"has {length} {side}, which are not {self.fused} layers of one size"
        elif self.units is not None and length // self.fused % self.units:
            yield f"has {length} {side}, which are not {self.units} {self.unit_name} of one size"
        else:
            count, name = (length // self.fused, side) if self.units is None else (self.units, self.unit_name)
            if count % size:
                yield f"has {count} {name}, {_not_divided(count, size)}"


class ColumnModule(Styled):
    def seen(self, name: str, parameter: DTensor) -> Tensor:
        return _whole_within(self, name, parameter, "of_inputs")

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(self.tensor_region.enter(hidden))
        return gather_from_region(output, self.tensor_region.group, -1) if self.tensor_style.gather_output else output


@dataclass(frozen=True, kw_only=True)
class Column(_Linear):
    """A linear layer of whose outputs each process makes a part; the input is whole (Shoeybi et al. 2019, 3).

    Options: those of `_Linear`, and
        fused: the number of layers, such as query, key and value, concatenated in the weight.
        gather_output: what follows needs all outputs.
    """

    gather_output: bool = False
    cut_outputs: ClassVar[bool] = True
    behaviour: ClassVar[type[Styled]] = ColumnModule

    def dims(self, module: nn.Module) -> dict[str, int]:
        own = {"bias": 0} if module._parameters.get("bias") is not None else {}
        return {"weight": self.weight_dim()} | own | dict.fromkeys(getattr(module, "of_outputs", ()), 0)

    def check(self, module: nn.Module, size: int) -> Iterator[str]:
        yield from _Linear.check(self, module, size)
        if self.gather_output and self.fused > 1:
            yield "gathers its output, whose fused layers would be mixed; leave out one of the two options"


class RowModule(Styled):
    def seen(self, name: str, parameter: DTensor) -> Tensor:
        local = parameter.to_local()
        if name == "bias":
            return _FirstRankOnly.apply(local, self.tensor_region.rank == 0)
        return _whole_within(self, name, parameter, "of_outputs")

    def forward(self, hidden: Tensor) -> Tensor:
        region = self.tensor_region
        if self.tensor_style.scatter_input:
            hidden = scatter_to_region(region.gather(hidden), region.group, -1)
        return region.leave(super().forward(hidden))


@dataclass(frozen=True, kw_only=True)
class Row(_Linear):
    """A linear layer of whose inputs each process has a part; the output is summed. The bias is whole, and added once.

    Options: those of `_Linear`, and
        scatter_input: the input is whole, and cut here.
    """

    scatter_input: bool = False
    cut_outputs: ClassVar[bool] = False
    behaviour: ClassVar[type[Styled]] = RowModule

    def dims(self, module: nn.Module) -> dict[str, int]:
        return {"weight": self.weight_dim()} | dict.fromkeys(getattr(module, "of_inputs", ()), 0)

    def check(self, module: nn.Module, size: int) -> Iterator[str]:
        yield from _Linear.check(self, module, size)
        if self.fused > 1:
            yield "cannot be fused: only column layers are"


@dataclass(frozen=True, kw_only=True)
class ColumnPart(Column):
    """A matrix inside of a column layer, cut as that one is: its input is whole already, and nothing is sent."""

    behaviour: ClassVar[type[Styled]] = Styled


@dataclass(frozen=True, kw_only=True)
class RowPart(Row):
    """A matrix inside of a row layer, cut as that one is: its output is a part of the sum, and nothing is sent."""

    behaviour: ClassVar[type[Styled]] = Styled


class _WholeOutside(Styled):
    """To the outside parameters are DTensors, so that a loss can see how they are cut."""

    _weight_is_local: bool = False

    def seen(self, name: str, parameter: DTensor) -> Tensor:
        return parameter.to_local() if self._weight_is_local else parameter

    @contextmanager
    def _local_weight(self) -> Iterator[None]:
        self._weight_is_local = True
        try:
            yield
        finally:
            self._weight_is_local = False


class VocabEmbeddingModule(_WholeOutside):
    padding_idx: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        region = self.tensor_region
        parameter = self._parameters["weight"]
        assert isinstance(parameter, DTensor), "a styled embedding has a distributed weight"
        rows = embedded_rows(tokens, parameter, region.rank, self.padding_idx)
        if self.tensor_style.whole_sequence or not region.cuts_sequence:
            rows = region.sum(rows)
            with_prompts = getattr(self, "with_prompts", None)  # of an adapter
            return rows if with_prompts is None else torch.as_tensor(with_prompts(tokens, rows))
        region.note_length(tokens.size(-1))
        return region.leave(rows)


class TiedVocabEmbeddingModule(VocabEmbeddingModule):
    """One that is the output layer too."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H], the same on every process -> [..., V], the same too"""
        group = self.tensor_region.group
        with self._local_weight():
            logits = super().logits(copy_to_region(hidden, group))  # type: ignore[misc]
        return gather_from_region(logits, group, -1, self._parameters["weight"].size(0))  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class VocabEmbedding(Style):
    """A token embedding of whose rows each process has a part, of any number of rows.

    If the module has a method `logits`, as a tied output layer has, that gives whole logits.

    Options:
        whole_sequence: with sequence parallel, give the whole sequence all the same.
    """

    whole_sequence: bool = False
    behaviour: ClassVar[type[Styled]] = VocabEmbeddingModule

    def dims(self, module: nn.Module) -> dict[str, int]:
        return {"weight": 0}

    def check(self, module: nn.Module, size: int) -> Iterator[str]:
        yield from Style.check(self, module, size)
        if not isinstance(module, nn.Embedding):
            yield f"is a {type(module).__name__}; the style is for torch.nn.Embedding"
            return
        yield from _check_rows(module.num_embeddings, size)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                yield f"has {option}, which needs all rows"


class VocabOutputModule(_WholeOutside):
    def forward(self, hidden: Tensor) -> Tensor:
        group = self.tensor_region.group
        with self._local_weight():
            logits = super().forward(copy_to_region(hidden, group))
        return gather_from_region(logits, group, -1, self._parameters["weight"].size(0))  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class VocabOutput(Style):
    """An output layer of whose rows each process has a part, of any number of rows; logits are gathered."""

    behaviour: ClassVar[type[Styled]] = VocabOutputModule

    def dims(self, module: nn.Module) -> dict[str, int]:
        return {name: 0 for name, parameter in module._parameters.items() if parameter is not None}

    def check(self, module: nn.Module, size: int) -> Iterator[str]:
        yield from Style.check(self, module, size)
        if not isinstance(module, nn.Linear):
            yield f"is a {type(module).__name__}; the style is for torch.nn.Linear"
        else:
            yield from _check_rows(module.out_features, size)


STYLES: dict[str, type[Style]] = {
    "replicated": Replicated,
    "sequence": Sequence,
    "sharded": Sharded,
    "column": Column,
    "row": Row,
    "column_part": ColumnPart,
    "row_part": RowPart,
    "vocab_embedding": VocabEmbedding,
    "vocab_output": VocabOutput,
}
"""By the names that plans use."""


def embedded_rows(tokens: Tensor, weight: DTensor, rank: int, padding_idx: int | None = None) -> Tensor:
    """tokens [...] -> [..., H]: this process's rows, zeros where another process has the row."""
    local = weight.to_local()  # [n, H]
    start = rank * part_size(weight.size(0), weight.device_mesh.size())
    places = tokens - start
    elsewhere = (places < 0) | (places >= local.size(0))
    padding = None if padding_idx is None else padding_idx - start
    if padding is not None and not 0 <= padding < local.size(0):
        padding = None
    rows = F.embedding(places.masked_fill(elsewhere, 0), local, padding_idx=padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _whole_within(module: Styled, name: str, parameter: DTensor, kind: str) -> Tensor:
    """A parameter of a shared linear layer; of one that stays whole each process has a part of the gradient.

    Args:
        kind: the attribute with the names of the whole ones (`ftk.modules.adapters.adapt.AdaptedLinear`).
    """
    local = parameter.to_local()
    return copy_to_region(local, module.tensor_region.group) if name in getattr(module, kind, ()) else local


class _FirstRankOnly(torch.autograd.Function):
    """A value that only the first process adds to a sum over all: zeros on the others.

    The gradient is that of the sum, which is the same on every process.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, here: bool) -> Tensor:
        return values.view_as(values) if here else torch.zeros_like(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def drops(module: nn.Module) -> bool:
    """Whether this is dropout that does something in training."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0


def _is_random(module: nn.Module) -> bool:
    return module.training and drops(module)


def _device(inputs: tuple[Any, ...]) -> torch.device:
    return next((value.device for value in inputs if isinstance(value, Tensor)), torch.device("cpu"))


def _check_rows(rows: int, size: int) -> Iterator[str]:
    if part_size(rows, size) * (size - 1) >= rows:
        yield f"has {rows} rows, too few for {size} processes; pad the vocabulary, or use fewer"


def _not_divided(count: int, size: int) -> str:
    fitting = [str(number) for number in range(1, count + 1) if count % number == 0]
    shown = ", ".join(fitting) if len(fitting) <= 12 else f"{', '.join(fitting[:12])}, ..."
    return f"which {size} tensor parallel processes do not divide ({shown} would)"
