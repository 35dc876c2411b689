"""The styles of a plan: which parameters of a module are shared, and what is communicated around its forward pass.

A styled module keeps its class's own forward pass, which sees the local parts of its parameters: the module becomes an
instance of a subclass whose properties give them, while `named_parameters()` has the DTensors. What is communicated
around it stands in the subclass's `forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ftk.model_parallel.tensor_parallel import behaviours
from ftk.model_parallel.tensor_parallel.functions import part_size


@dataclass(frozen=True, kw_only=True)
class Style:
    """What is done to one module. The fields are the options that a plan may give.

    Options:
        divide: attributes of the module that count what is shared, and are divided by the number of processes, such as
            "split_size" of GPT-2's attention, or "nf", the outputs of Conv1D.
    """

    divide: tuple[str, ...] = ()
    behaviour: ClassVar[type] = behaviours.ReplicatedModule

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


@dataclass(frozen=True, kw_only=True)
class Replicated(Style):
    """Whole on every process, before and behind: what is not named in a plan.

    Random numbers are the same on all processes, inside a `sharded` module as well.
    """


@dataclass(frozen=True, kw_only=True)
class Sequence(Style):
    """With sequence parallel: works on a part of the sequence (norms, dropout). Otherwise as `replicated`.

    Options:
        scatter_input: the first input is whole, and cut here: hidden states [B, T, ..] or integers [.., T].
        gather_output: what follows wants the whole.
    """

    scatter_input: bool = False
    gather_output: bool = False
    behaviour: ClassVar[type] = behaviours.SequenceModule


@dataclass(frozen=True, kw_only=True)
class Sharded(Style):
    """A module whose inside lies between column and row layers, such as attention on some of the heads.

    Options:
        own_random: it draws random numbers, which must differ between processes.
    """

    own_random: bool = True
    behaviour: ClassVar[type] = behaviours.ShardedModule


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


@dataclass(frozen=True, kw_only=True)
class Column(_Linear):
    """A linear layer of whose outputs each process makes a part; the input is whole (Shoeybi et al. 2019, 3).

    Options: those of `_Linear`, and
        fused: the number of layers, such as query, key and value, concatenated in the weight.
        gather_output: what follows wants all outputs.
    """

    gather_output: bool = False
    cut_outputs: ClassVar[bool] = True
    behaviour: ClassVar[type] = behaviours.ColumnModule

    def dims(self, module: nn.Module) -> dict[str, int]:
        return {"weight": self.weight_dim()} | ({"bias": 0} if module._parameters.get("bias") is not None else {})

    def check(self, module: nn.Module, size: int) -> Iterator[str]:
        yield from _Linear.check(self, module, size)
        if self.gather_output and self.fused > 1:
            yield "gathers its output, whose fused layers would come mixed; leave out one of both options"


@dataclass(frozen=True, kw_only=True)
class Row(_Linear):
    """A linear layer of whose inputs each process has a part; the output is summed. The bias is whole, and added once.

    Options: those of `_Linear`, and
        scatter_input: the input is whole, and cut here.
    """

    scatter_input: bool = False
    cut_outputs: ClassVar[bool] = False
    behaviour: ClassVar[type] = behaviours.RowModule

    def dims(self, module: nn.Module) -> dict[str, int]:
        return {"weight": self.weight_dim()}

    def check(self, module: nn.Module, size: int) -> Iterator[str]:
        yield from _Linear.check(self, module, size)
        if self.fused > 1:
            yield "cannot be fused: only column layers are"


@dataclass(frozen=True, kw_only=True)
class VocabEmbedding(Style):
    """A token embedding of whose rows each process has a part, of any number of rows.

    If the module has a method `logits`, as a tied output layer has, that gives whole logits.

    Options:
        whole_sequence: with sequence parallel, give the whole sequence all the same.
    """

    whole_sequence: bool = False
    behaviour: ClassVar[type] = behaviours.VocabEmbeddingModule

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


@dataclass(frozen=True, kw_only=True)
class VocabOutput(Style):
    """An output layer of whose rows each process has a part, of any number of rows; logits are gathered."""

    behaviour: ClassVar[type] = behaviours.VocabOutputModule

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
    "vocab_embedding": VocabEmbedding,
    "vocab_output": VocabOutput,
}
"""By the names that plans use."""


def _check_rows(rows: int, size: int) -> Iterator[str]:
    if part_size(rows, size) * (size - 1) >= rows:
        yield f"has {rows} rows, too few for {size} processes; pad the vocabulary, or use fewer"


def _not_divided(count: int, size: int) -> str:
    fitting = [str(number) for number in range(1, count + 1) if count % number == 0]
    shown = ", ".join(fitting) if len(fitting) <= 12 else f"{', '.join(fitting[:12])}, ..."
    return f"which {size} tensor parallel processes do not divide ({shown} would)"
