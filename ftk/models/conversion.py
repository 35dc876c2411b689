"""What a family's converters are made of: renamed parameters as data, and what is read from and written to other files.

    RENAMES = (Rename(("token_embedding.weight",), ("transformer.wte.weight",)),)

The machinery that reads and writes checkpoints is `ftk.checkpoint.convert`; here are the values that pass between it
and a family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.modules.heads import HeadShape

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM_STEP = "step"

HF_WEIGHTS, HF_PICKLED = "model.safetensors", "pytorch_model.bin"  # of Hugging Face's folders
HF_INDEX = ".index.json"  # suffix of the index of weights that are split into several files

_ACTIVATION_KEYS = ("activation_function", "hidden_act")
ACTIVATIONS = {  # their name -> ours, where a family has the choice; the first of a kind is written
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    **{"gelu": "gelu", "gelu_python": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"},
}

LAYER_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")
_NAMES_SHOWN = 6
_ROWS = 1024  # compared at a time


class Layout(Protocol):
    """How the same numbers lie in our tensors and in theirs; `join` and `split` are each other's inverse.

    Both work on the meta device, too: shapes are asked for before a tensor is read.
    """

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        """Tensors as `Rename.theirs` names them -> as `Rename.ours` does; `config` is the model's."""

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        """The inverse of `join`."""


class Same:
    """One tensor, as it is."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return theirs

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return ours


SAME = Same()


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`; of tensors on the meta device without torch._dynamo, whose import takes 0.4 s."""
    if not parts[0].is_meta:
        return torch.cat(list(parts), dim)
    shape, dtype = list(parts[0].shape), parts[0].dtype
    for part in parts[1:]:
        if [*part.shape[:dim], *part.shape[dim + 1 :]] != [*shape[:dim], *shape[dim + 1 :]]:
            raise ValueError(f"{list(part.shape)} beside {shape}")
        shape[dim] += part.size(dim)
        dtype = torch.promote_types(dtype, part.dtype)
    return parts[0].new_empty(shape, dtype=dtype)


class Transposed:
    """One matrix that they keep as [in, out]."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [theirs[0].t()]

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [ours[0].t()]


@dataclass(frozen=True)
class JointHeads:
    """One joint projection, whose rows are [q | k | v] in their tensor, [A, 3, D] in ours.

    `transposed`: they keep it as [in, out].
    """

    transposed: bool = False

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        rows = theirs[0].t() if self.transposed else theirs[0]  # [3 H, ...]
        return [rows.unflatten(0, (3, config.num_attention_heads, -1)).transpose(0, 1).flatten(0, 2)]

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        rows = ours[0].unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return [rows.t() if self.transposed else rows]


class SeparateHeads:
    """Projections of queries, keys and values apart in theirs, one tensor of rows [K, A/K + 2, D] in ours."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        parts = [tensor.unflatten(0, (config.kv_heads, -1)) for tensor in theirs]  # [K, A/K D, ...], [K, D, ...] twice
        return [_joined(parts, dim=1).flatten(0, 1)]

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        size = config.head_size
        rows = ours[0].unflatten(0, (config.kv_heads, -1))  # [K, (A/K + 2) D, ...]
        return [part.flatten(0, 1) for part in rows.split([rows.size(1) - 2 * size, size, size], dim=1)]


class SeparateKeysAndValues(SeparateHeads):
    """Projections of keys and values apart in theirs, one tensor of rows [A, 2, D] in ours."""

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        rows = ours[0].unflatten(0, (config.kv_heads, 2, -1))  # [A, 2, D, ...]
        return [rows[:, 0].flatten(0, 1), rows[:, 1].flatten(0, 1)]


class JointGroups(SeparateHeads):
    """One joint projection, whose rows are [q | k | v] in their tensor, [K, A/K + 2, D] in ours."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        sizes = [heads * config.head_size for heads in (config.num_attention_heads, config.kv_heads, config.kv_heads)]
        return super().join(theirs[0].split(sizes), config)

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [_joined(super().split(ours, config))]


class Halves:
    """One matrix of theirs whose halves of the rows are two of ours."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        first, second = theirs[0].unflatten(0, (2, -1))
        return [first, second]

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [_joined(ours)]


HALVES = Halves()


class Rename(NamedTuple):
    """Parameters of ours and the ones of theirs that hold the same numbers; `*` in a name is a layer's number.

    A name may have other numbers behind it: "block.*.layer.0.norm".
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: Layout = SAME


def weight_and_bias(ours: str, theirs: str, weight: Layout = SAME, bias: Layout = SAME) -> tuple[Rename, Rename]:
    """The two parameters of a layer, whose names end in `.weight` and `.bias` on both sides."""
    return (
        Rename((f"{ours}.weight",), (f"{theirs}.weight",), weight),
        Rename((f"{ours}.bias",), (f"{theirs}.bias",), bias),
    )


def weights(ours: Sequence[str], theirs: Sequence[str], layout: Layout = SAME) -> Rename:
    """Parameters whose names end in `.weight` on both sides."""
    return Rename(tuple(f"{name}.weight" for name in ours), tuple(f"{name}.weight" for name in theirs), layout)


class LazyTensors(NamedTuple):
    """Named tensors that are read when they are needed.

    Attributes:
        described: name -> a tensor on the meta device, for its shape and dtype.
        read: name -> the tensor.
    """

    described: Mapping[str, Tensor]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> LazyTensors:
        """Tensors that are in memory."""
        described = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        return cls(described, tensors.__getitem__)

    def differ(self, name: str, other: str) -> bool:
        """Whether there is a tensor that is not the same as another."""
        if name not in self.described:
            return False
        if other not in self.described or self.described[name].shape != self.described[other].shape:
            return True
        # What is read is mapped from a file, as a rule: no more of it is looked at than the first rows that differ.
        one, another = (torch.atleast_1d(self.read(each)).split(_ROWS) for each in (name, other))
        return not all(map(torch.equal, one, another))

    def all(self) -> dict[str, Tensor]:
        """Every tensor, in memory."""
        return {name: self.read(name) for name in self.described}


class _Move(NamedTuple):
    """How one tensor is made: the names of its sources, its layout, and `which` of its results."""

    sources: tuple[str, ...]
    layout: Layout
    which: int


def renamed(tensors: LazyTensors, renames: Sequence[Rename], config: Any, *, back: bool = False) -> LazyTensors:
    """Tensors under our names and in our layouts, made of theirs one at a time.

    Args:
        tensors: theirs.
        renames: all parameters that there can be. Where several name one, it is that whose others are there, too.
        config: of the model, for the layouts.
        back: `tensors` are ours, and theirs are made.

    Raises:
        UserError: a tensor without a place in the model, without those that it belongs with, or of a wrong shape.
    """
    moves: dict[str, _Move] = {}
    table: dict[str, list[Rename]] = {}
    for rename in renames:
        for pattern in rename.ours if back else rename.theirs:
            table.setdefault(pattern, []).append(rename)
    for name in tensors.described:
        match = LAYER_NUMBER.search(name)
        found = table.get(name) or table.get(LAYER_NUMBER.sub("*", name, count=1))
        if found is None:
            some = ", ".join(list(table)[:_NAMES_SHOWN])
            raise UserError(f"parameter {name!r:.200} has no place in the model; known are {some} ...")
        number = match[0] if match else "*"
        for rename in found:
            ours, theirs = (tuple(each.replace("*", number) for each in side) for side in rename[:2])
            sources, results = (ours, theirs) if back else (theirs, ours)
            missing = [source for source in sources if source not in tensors.described]
            if not missing:
                break
        if missing:
            raise UserError(f"parameter {missing[0]!r} is missing, which belongs with {name!r}")
        moves |= {result: _Move(sources, rename.layout, index) for index, result in enumerate(results)}

    def made(name: str, read: Callable[[str], Tensor]) -> Tensor:
        sources, layout, which = moves[name]
        found = [read(source) for source in sources]
        return (layout.split if back else layout.join)(found, config)[which]

    def described(name: str) -> Tensor:
        try:
            return made(name, tensors.described.__getitem__)
        except (IndexError, RuntimeError, ValueError) as error:
            shapes = " and ".join(f"{each} {list(tensors.described[each].shape)}" for each in moves[name].sources)
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{shapes}: has not the shape of such a parameter ({why:.200})") from error

    for move in moves.values():
        kinds = {tensors.described[source].is_floating_point(): source for source in move.sources}
        if len(kinds) > 1:  # joined, they would all be turned into real numbers
            dtype = tensors.described[kinds[False]].dtype
            raise UserError(f"{kinds[False]} has numbers of type {dtype}, unlike others")
    return LazyTensors({name: described(name) for name in moves}, lambda name: made(name, tensors.read))


@dataclass(frozen=True)
class AdamState:
    """The state of an Adam over a whole model.

    Attributes:
        moments: of each of `ADAM_MOMENTS`: parameter's name -> tensor of its shape.
        steps: number of steps taken, the same for all parameters.
        options: what two parameter groups have besides members, the one with weight decay and the one without.
    """

    moments: dict[str, dict[str, Tensor]]
    steps: int
    options: tuple[dict[str, Any], dict[str, Any]]

    def renamed(self, rename: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> AdamState:
        """With the names and layouts that `rename` gives to a state dict of the model."""
        return AdamState({kind: rename(tensors) for kind, tensors in self.moments.items()}, self.steps, self.options)


@dataclass(frozen=True)
class Contents:
    """A model on its way between ftk's checkpoints and files of another form; names and layouts are ours.

    Attributes:
        model: registered name of the model.
        config: its options.
        tensors: its parameters.
        task: the section of config.yaml that says what the model is asked for.
        arch: architecture whose options these are.
        num_updates: of the training so far.
        place: the folder with the weights, for messages.
        adam: the optimizer's state.
        source_files: name -> content of small files (configuration, tokenizer) that lay next to the weights: kept
            with the checkpoint, so that they are written back as they were.
        tokenizer: folder of the one in an ftk checkpoint.
        own_tokenizer: makes the one that lay next to the weights, in a form that ftk reads.
        head: of a model with a classifier in the place of its output layer.
    """

    model: str
    config: Any
    tensors: LazyTensors = field(default_factory=lambda: LazyTensors.of({}))
    task: Mapping[str, Any] = field(default_factory=dict)
    arch: str | None = None
    num_updates: int | None = None
    place: Path | None = None
    adam: AdamState | None = None
    source_files: Mapping[str, bytes] = field(default_factory=dict)
    tokenizer: Path | None = None
    own_tokenizer: Callable[[], Any] | None = None
    head: HeadShape | None = None


def holds_hf_weights(folder: Path) -> bool:
    """Whether a folder holds weights under Hugging Face's names, in one file or several."""
    return any((folder / f"{name}{end}").is_file() for name in (HF_WEIGHTS, HF_PICKLED) for end in ("", HF_INDEX))


class FileFormat(Protocol):
    """Checkpoints of another program; registered by `ftk.registry.register_converter`, built with its options.

    All of its options have defaults, so that a folder can be recognised without them. Those of a form that is only read
    have a class attribute `is_written = False`.
    """

    @staticmethod
    def recognises(folder: Path) -> bool:
        """Whether a folder looks like such a checkpoint."""

    def read(self, source: Path) -> Contents:
        """A checkpoint of this form; tensors may be read later, while ftk's is written.

        Raises:
            UserError: there is none, it is damaged, or holds more than plain data.
        """


class WrittenFormat(FileFormat, Protocol):
    """A form that is written, too."""

    def write(self, folder: Path, contents: Contents) -> Path:
        """Write such a checkpoint into an empty folder, every file synced.

        Returns:
            What it is called in messages, relative to the folder.

        Raises:
            UserError: the model has no such form.
        """


class OpenableFormat(FileFormat, Protocol):
    """A form whose folders are opened as they are, too: they say themselves what their model is."""

    def describe(self, source: Path) -> Contents:
        """What `read` gives, without its tensors and files.

        Of the weights only what the options need is read: whether two matrices are one, where the configuration does
        not say.
        """

    def identity_files(self, source: Path) -> list[Path]:
        """The files that say what the model is, and those of its weights, in an order that is the same everywhere."""


class Converter(Protocol):
    """A family in Hugging Face's form, as data; registered by `ftk.registry.register_hf_model` under the model's name.

    Attributes:
        architecture: of config.json: the class of the whole model.
        prefix: stands before the names of their whole model, and not before those of its trunk alone ("transformer.");
            `renames`, `tied` and `buffers` have it.
        renames: all parameters.
        buffers: names with `*` that are no parameters and are left out.
        output_layer: beginnings of our names of its parameters: files of the trunk alone are opened, too, and it starts
            with initial values.
        older: last part of a name in older files -> today's.
        vocabularies: vocabulary's file name -> the tokenizer of ftk that reads it with the task's special tokens; a
            family that is not named here has those of Hugging Face's form.
        token_roles: key of config.json -> role of the special token whose id it is, where these are not the usual ones.
        classifier: part of `ftk.modules.classifier.Classifier` -> their name, where they have such a model that reads
            the first token; empty: none.
    """

    architecture: str
    prefix: str
    renames: Sequence[Rename]
    buffers: Sequence[str]
    output_layer: tuple[str, ...]
    older: Mapping[str, str]
    vocabularies: Mapping[str, str]
    token_roles: Mapping[str, str]
    classifier: Mapping[str, str]

    def tied(self, config: Any) -> Mapping[str, str]:
        """Name -> the one whose numbers it repeats, in files that keep both; where it is `unread`, in new files."""

    def copied(self, config: Any) -> Sequence[str]:
        """Names of `tied` that are written too: `transformers` would draw them anew."""

    def unread(self, config: Any) -> Sequence[str]:
        """Parameters that their files may have and that no part of our model reads: not in ours, but written back."""

    def constants(self, config: Any) -> LazyTensors:
        """What their files may have besides and follows from the options: left out of ours, and made again; float32."""

    def matches(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this family."""

    def config_from(self, config: dict[str, Any]) -> Any:
        """Our options of a config.json.

        Raises:
            UserError: a value that would change the model's answers and that ours cannot follow.
        """

    def fitted(self, config: Any, stored: Callable[[], LazyTensors]) -> Any:
        """Our options, those among them that depend on which tensors there are, or on their values.

        Args:
            config: our options of the config.json.
            stored: gives the tensors that there are, by their names as in `renames`.
        """

    def config_to(self, config: Any) -> dict[str, Any]:
        """A config.json of our options; a model with others than `config_from` makes of it is not written."""

    def task(self, config: Any) -> dict[str, Any]:
        """The section of config.yaml for `Contents.task`."""


class FamilyConverter:
    """The `Converter` of a family of models. A subclass gives `renames`, `prefix` and what follows, as data.

    Attributes:
        model_type: of config.json.
        config_class: of the family.
        used: their key -> (our field, value where the key is absent).
        fixed: their key -> the one value that it may have, or a tuple of such, of which the first is written; nothing
            is written where None is among them.
        ignored: keys that change no logits, besides those that every model has.
        embedding: their name of the token embedding's matrix.
        task_name: of the task that a converted model is asked and trained on.
    """

    model_type: ClassVar[str]
    architecture: str
    config_class: ClassVar[type[Any]]
    used: ClassVar[Mapping[str, tuple[str, Any]]]
    fixed: ClassVar[Mapping[str, Any]] = {}
    ignored: ClassVar[Sequence[str]] = ()
    embedding: ClassVar[str]
    task_name: ClassVar[str] = "causal_lm"
    buffers: Sequence[str] = ()
    output_layer: tuple[str, ...] = ("head.",)
    older: Mapping[str, str] = {}
    vocabularies: ClassVar[Mapping[str, str]] = {}
    token_roles: ClassVar[Mapping[str, str]] = {}
    classifier: ClassVar[Mapping[str, str]] = {}

    def tied(self, config: Any) -> Mapping[str, str]:
        return {"lm_head.weight": self.embedding} if config.tie_embeddings else {}

    def copied(self, config: Any) -> Sequence[str]:
        return ()

    def unread(self, config: Any) -> Sequence[str]:
        return ()

    def constants(self, config: Any) -> LazyTensors:
        return LazyTensors.of({})

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == self.model_type

    def config_from(self, config: dict[str, Any]) -> Any:
        return self.config_class(**fields_from(config, self.used, self.fixed, self.ignored))

    def fitted(self, config: Any, stored: Callable[[], LazyTensors]) -> Any:
        return config

    def config_to(self, config: Any) -> dict[str, Any]:
        used = {theirs: getattr(config, name) for theirs, (name, _) in self.used.items()}
        for key in used.keys() & {*_ACTIVATION_KEYS}:
            used[key] = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == used[key])
        choices = {key: value if isinstance(value, tuple) else (value,) for key, value in self.fixed.items()}
        fixed = {key: values[0] for key, values in choices.items() if None not in values}
        return {"architectures": [self.architecture], "model_type": self.model_type, **used, **fixed}

    def task(self, config: Any) -> dict[str, Any]:
        length = min(config.max_positions, 2048)
        return {"_name": self.task_name, "seq_length": length, "make_vocab_size_divisible_by": 1}


def fields_from(
    theirs: Mapping[str, Any], used: Mapping[str, tuple[str, Any]], fixed: Mapping[str, Any], ignored: Sequence[str]
) -> dict[str, Any]:
    """Our options of a config.json, of which every key is accounted for.

    Args:
        theirs: the config.json.
        used, fixed, ignored: see `FamilyConverter`.

    Raises:
        UserError: a fixed key with another value, or a key that is not known.
    """
    return dict(_fields(theirs, used, fixed, {*ignored, *_IGNORED}))


def _fields(
    theirs: Mapping[str, Any], used: Mapping[str, tuple[str, Any]], fixed: Mapping[str, Any], ignored: set[str]
) -> Iterator[tuple[str, Any]]:
    for key, value in theirs.items():
        allowed = fixed.get(key, ())
        allowed = allowed if isinstance(allowed, tuple) else (allowed,)
        if key in fixed and value not in allowed:
            raise UserError(f"config.json: {key} is {value!r:.60}; ftk's model has {' or '.join(map(repr, allowed))}")
        if key not in used and key not in fixed and key not in ignored and not _is_nothing(key, value):
            raise UserError(
                f"config.json: {key} is not known here ({value!r:.60}); it might change the model's answers "
                "(if it does not, remove it from the file)"
            )
    for key, (name, default) in used.items():
        value = theirs.get(key, default)
        if key in _ACTIVATION_KEYS:
            if not isinstance(value, str) or value not in ACTIVATIONS:
                known = " or ".join(map(repr, ACTIVATIONS))
                raise UserError(f"config.json: {key} is {value!r:.60}; ftk's model has {known}")
            value = ACTIVATIONS[value]
        yield name, value


def _is_nothing(key: str, value: Any) -> bool:
    """Whether a value says that there is no such thing, as releases up to 4 wrote keys that are not the family's."""
    return value is None or value in ([], {}) or (key in _SWITCHES and value is False)


_SWITCHES = {"is_decoder", "add_cross_attention", "tie_encoder_decoder", "use_mrope"}
_IGNORED = {
    *("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "dtype", "torch_dtype"),
    *("name_or_path", "_commit_hash", "unsloth_version", "unsloth_fixed", "is_llama_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class", "is_encoder_decoder"),
    *("cls_token_id", "mask_token_id", "unk_token_id", "eos_token_ids", "model_max_length"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_past"),
    *("chunk_size_feed_forward", "gradient_checkpointing", "keys_to_ignore_at_inference"),
    *("finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id", "prefix"),
    *("num_labels", "_num_labels", "return_dict_in_generate", "output_scores", "use_return_dict"),
    *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "torchscript"),
    *("_attn_implementation_internal", "remove_invalid_values", "tf_legacy_loss", "use_bfloat16", "xla_device"),
    *("_flash_attn_2_enabled", "transformers.js_config"),
    # Of generation, which older files kept here.
    *("do_sample", "max_length", "min_length", "max_new_tokens", "num_beams", "num_return_sequences", "early_stopping"),
    *("length_penalty", "no_repeat_ngram_size", "repetition_penalty", "temperature", "top_k", "top_p", "typical_p"),
    *("diversity_penalty", "encoder_no_repeat_ngram_size", "num_beam_groups", "badwordsids"),
}
