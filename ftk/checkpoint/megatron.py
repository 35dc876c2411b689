"""Megatron-LM's checkpoints of GPT models, legacy and Megatron-Core, in its format `torch`: read, not written.

    latest_checkpointed_iteration.txt                  "100", or "release"
    iter_0000100/mp_rank_00/model_optim_rng.pt         {"model": state dict, "args": Namespace, "iteration": 100, ...}
    iter_0000100/mp_rank_01_000/model_optim_rng.pt     tensor parallel rank 1 of pipeline stage 0; of an interleaved
                                                       pipeline "model0", "model1", ... instead of "model"

Sources, in NVIDIA/Megatron-LM: megatron/training/checkpointing.py (files, versions), megatron/training/arguments.py,
tools/checkpoint/loader_base.py (how parameters are cut, in which order layers stand) and schema_mcore.py (names),
megatron/legacy/model and, in huggingface/transformers, models/megatron_gpt2 (older names).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.checkpoint.layout import read_part
from ftk.checkpoint.megatron_form import MegatronConfig
from ftk.config.build import build_options
from ftk.errors import UserError
from ftk.files import read_bytes
from ftk.models.conversion import HALVES, Contents, LazyTensors, Rename, renamed, weight_and_bias
from ftk.models.parts import Cut, check_same_names, cut_of, merge
from ftk.models.torch_file import read_tensor_file
from ftk.registry import HF_MODELS, MODELS

LATEST = "latest_checkpointed_iteration.txt"
_PART = re.compile(r"mp_rank_(\d{2,9})(?:_(\d{3,9}))?")  # tensor parallel rank, pipeline stage
_FILES = "mp_rank_*/model*_rng.pt"  # model_optim_rng.pt; model_rng.pt where the optimizer has files of its own
_DISTRIBUTED = ("common.pt", ".metadata", "metadata.json")  # of the formats torch_dist, torch_dcp and zarr
_IN_FOLDERS = (f"*/{_FILES}", f"iter_*/{_DISTRIBUTED[0]}", f"release/{_DISTRIBUTED[0]}")  # of iterations

# A Namespace gets attributes and a BytesIO gets bytes, nothing else happens; the former holds the options, the latter
# what Transformer Engine adds to a state dict. Classes of Megatron (enumerations among the options, loss scalers of
# 2019) say nothing about the model and are not looked at.
_CLASSES = (argparse.Namespace, io.BytesIO)
_IGNORED = r"megatron\.[\w.]+|fp16\.[\w.]+"

_VERSIONS = (0, 1, 2, 3)
_PLAIN = (bool, int, float, str, list, tuple, type(None))

_LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.(.+)")
_LAYER_NAMES = {  # in other releases -> in Megatron-Core with layers of its own
    "attention.query_key_value": "self_attention.query_key_value",
    "attention.dense": "self_attention.linear_proj",
    "self_attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
    "input_norm": "input_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    # Layers of Transformer Engine: in Megatron-Core, and in legacy models.
    "self_attention.linear_qkv.layer_norm": "input_layernorm",
    "mlp.linear_fc1.layer_norm": "pre_mlp_layernorm",
    "self_attention.layernorm_qkv": "self_attention.linear_qkv",
    "self_attention.layernorm_qkv.layer_norm": "input_layernorm",
    "self_attention.proj": "self_attention.linear_proj",
    "layernorm_mlp.layer_norm": "pre_mlp_layernorm",
    "layernorm_mlp.fc1": "mlp.linear_fc1",
    "layernorm_mlp.fc2": "mlp.linear_fc2",
}
_NO_PARAMETERS = ("_extra_state", "rotary_pos_emb.inv_freq")
_OF_BERT = ("lm_head.", "binary_head.", "pooler.")
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_COPIES = ("word_embeddings_for_head.weight", _HEAD)  # of a tied embedding, in the last pipeline stage
_QKV, _INNER = "self_attention.linear_qkv", "mlp.linear_fc1"
_OLD_QKV = "self_attention.query_key_value"  # whose rows have another order in old versions

_ALL = "decoder.layers.*."
_SHARED = (
    Rename(("token_embedding.weight",), (_EMBEDDING,)),
    Rename(("position_embedding.weight",), ("embedding.position_embeddings.weight",)),
    *weight_and_bias("layers.*.attention_norm", f"{_ALL}input_layernorm"),
    *weight_and_bias("layers.*.attention.qkv", f"{_ALL}{_QKV}"),
    Rename(("layers.*.attention.query_norm.weight",), (f"{_ALL}self_attention.q_layernorm.weight",)),
    Rename(("layers.*.attention.key_norm.weight",), (f"{_ALL}self_attention.k_layernorm.weight",)),
    *weight_and_bias("layers.*.attention.output", f"{_ALL}self_attention.linear_proj"),
    *weight_and_bias("layers.*.feed_forward_norm", f"{_ALL}pre_mlp_layernorm"),
    *weight_and_bias("layers.*.feed_forward.output", f"{_ALL}mlp.linear_fc2"),
    *weight_and_bias("final_norm", "decoder.final_layernorm"),
    Rename(("head.weight",), (_HEAD,)),
)
_GATES = ("layers.*.feed_forward.gate.weight", "layers.*.feed_forward.inner.weight")  # the first half is activated
_RENAMES = {  # by whether feed-forward networks are gated
    False: (*_SHARED, *weight_and_bias("layers.*.feed_forward.inner", f"{_ALL}{_INNER}")),
    True: (*_SHARED, Rename(_GATES, (f"{_ALL}{_INNER}.weight",), HALVES)),
}

_LEARNED, _ROTARY = "learned_absolute", "rope"
_ABSENT: dict[str, Any] = {  # what an option is that older files do not have
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "group_query_attention": False,
    "qk_layernorm": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "softmax_type": "vanilla",
}
_FAMILIES: dict[str, dict[str, Any]] = {  # their position_embedding_type -> what the models have that are read
    _LEARNED: _ABSENT,
    _ROTARY: {
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "softmax_type": "vanilla",
    },
}
_OFF = (  # change what a model computes, and are in none of ftk's
    *("num_experts", "num_moe_experts", "multi_latent_attention", "experimental_attention_variant", "mtp_num_layers"),
    *("retro_add_retriever", "squared_relu", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value"),
    *("apply_layernorm_1p", "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm", "use_mup"),
    *("qk_l2_norm", "softmax_scale", "window_size", "attention_output_gate", "head_wise_attn_gate"),
    *("no_rope_freq", "rotary_base_per_layer"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
)
_NEEDED = {  # their option -> ours
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_positions",
}
_USED = {
    "ffn_hidden_size": "ffn_hidden_size",
    "init_method_std": "init_std",
    "hidden_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "layernorm_epsilon": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
}


class Megatron:
    """Folders of Megatron-LM, weights in the dtype they are stored in; the optimizer's state is left out."""

    def __init__(self, config: MegatronConfig) -> None:
        self.config = config

    @staticmethod
    def recognises(folder: Path) -> bool:
        return any(any(folder.glob(pattern)) for pattern in (_FILES, _DISTRIBUTED[0], *_IN_FOLDERS))

    @staticmethod
    def identity_files(source: Path) -> list[Path]:
        tracker = source / LATEST
        files = itertools.chain(*_found(source).files)
        return [*([tracker] if tracker.is_file() else []), *files]

    def describe(self, source: Path) -> Contents:
        return self._described(_found(source))

    def read(self, source: Path) -> Contents:
        parts = _found(source)
        contents = self._described(parts)
        with _naming(parts.folder):
            return dataclasses.replace(contents, tensors=_whole(parts, contents.config, contents.model != "gpt2"))

    def _described(self, parts: _Parts) -> Contents:
        with _naming(parts.folder):
            theirs = self._options(parts)
            model, options = _model(theirs, parts.vocab_size)
            _check_sizes(parts, theirs)
            config_type = MODELS.get(model).config
            assert config_type is not None, "families have options"
            config = build_options("model", config_type, options)
            task = HF_MODELS.get(model).target().task(config)
            task["make_vocab_size_divisible_by"] = _padding(theirs, config.vocab_size, len(parts.files[0]))
        return Contents(model, config, task=task, num_updates=parts.first.iteration, place=parts.folder)

    def _options(self, parts: _Parts) -> Mapping[str, Any]:
        """Megatron's options; where an old file holds none, those that its tensors tell."""
        theirs, heads = parts.first.options, self.config.num_attention_heads
        if theirs is not None:
            if heads is not None:
                raise UserError("the files hold the options; leave out `num_attention_heads`")
            return theirs
        if heads is None:
            raise UserError("the files hold no options, as old ones do; convert it with `num_attention_heads`")
        tensors = parts.tensors()
        layers = {int(match[1]) for match in map(_LAYER.fullmatch, tensors) if match}
        needed = ("embedding.position_embeddings.weight", f"decoder.layers.0.{_INNER}.weight")
        if missing := [name for name in needed if name not in tensors]:
            raise UserError(f"the parameter {missing[0]!r} is missing; without options only a GPT-2 is read")
        positions, inner = (tensors[name] for name in needed)
        if {positions[0].dim(), *(part.dim() for part in inner)} != {2}:
            raise UserError(f"{needed[0]!r} and {needed[1]!r} are no matrices")
        return {
            "num_layers": len(layers),
            "hidden_size": positions[0].size(-1),
            "num_attention_heads": heads,
            "max_position_embeddings": len(positions[0]),
            "ffn_hidden_size": sum(map(len, inner)),
        }


class _Part(NamedTuple):
    """What is read from one file: the state dicts of its model chunks, and their description."""

    chunks: list[dict[str, Tensor]]
    options: Mapping[str, Any] | None
    version: float  # of the order of rows of queries, keys and values
    iteration: int | None


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The files of one checkpoint.

    Attributes:
        folder: of the iteration.
        files: by pipeline stage, then by tensor parallel rank.
    """

    folder: Path
    files: Sequence[Sequence[Path]]

    @functools.cached_property
    def first(self) -> _Part:
        """The first file's content."""
        return _read_part(self.files[0][0])

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding, those of padding included."""
        embedding = self.first.chunks[0].get(_EMBEDDING)
        if embedding is None or embedding.dim() != 2:
            raise UserError(f"there is no matrix {_EMBEDDING!r}; is this a GPT model?")
        return len(embedding) * len(self.files[0])

    def tensors(self) -> dict[str, list[Tensor]]:
        """Name in the whole model -> its tensor on each tensor parallel rank; mapped from the files, where possible.

        Raises:
            UserError: the files do not belong together.
        """
        stages = [[self._same_run(path) for path in stage] for stage in self.files]
        counts = sorted({len(part.chunks) for part in itertools.chain(*stages)})
        if len(counts) > 1:
            raise UserError(f"one file holds {counts[0]} chunks of an interleaved pipeline, another {counts[-1]}")
        whole: dict[str, list[Tensor]] = {}
        num_layers = 0
        # First come the first chunks of all stages, then the second ones (`loader_base`).
        for chunk, stage in itertools.product(range(counts[0]), range(len(stages))):
            names = [path.parent.name for path in self.files[stage]]
            ranks = [part.chunks[chunk] for part in stages[stage]]
            check_same_names(dict(zip(names, ranks, strict=True)))
            numbers = [-1]
            for name in ranks[0]:
                full = name
                if layer := _LAYER.fullmatch(name):
                    numbers.append(int(layer[1]))
                    full = f"decoder.layers.{num_layers + numbers[-1]}.{layer[2]}"
                if full in whole:
                    raise UserError(f"the parameter {full!r} is in two pipeline stages")
                whole[full] = [tensors[name] for tensors in ranks]
            num_layers += max(numbers) + 1
        return whole

    def _same_run(self, path: Path) -> _Part:
        part = self.first if path == self.files[0][0] else _read_part(path)
        for name in ("version", "iteration"):
            mine, other = getattr(part, name), getattr(self.first, name)
            if mine != other:
                first = self.files[0][0].parent.name
                raise UserError(f"{path.parent.name} is of {name} {mine}, {first} of {name} {other}")
        return part


def _found(source: Path) -> _Parts:
    """The files of a checkpoint: of the iteration that the tracker names, or of this folder itself.

    Raises:
        UserError: there are none, or one is missing.
    """
    folder = _iteration_folder(source)
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob(_FILES)):
        match = _PART.fullmatch(path.parent.name)
        if match is None:
            raise UserError(f"{path.parent}: is of a mixture of experts, by its name; ftk has none")
        place = int(match[2] or 0), int(match[1])
        if place in files:
            raise UserError(f"{path} and {files[place]} are both of rank {place[1]} in stage {place[0]}; remove one")
        files[place] = path
    if not files:
        if any((folder / name).is_file() for name in _DISTRIBUTED):
            raise UserError(
                f"{folder}: is in a distributed format, whose index is a pickle, which ftk does not open; to get the"
                " format torch: torchrun ... pretrain_gpt.py ... --ckpt-convert-format torch --ckpt-convert-save DIR"
            )
        raise UserError(f"{folder}: holds no mp_rank_XX/model_optim_rng.pt")
    num_stages, num_ranks = (max(numbers) + 1 for numbers in zip(*files, strict=True))
    places = ((stage, rank) for stage in range(num_stages) for rank in range(num_ranks))
    if missing := next((place for place in places if place not in files), None):
        name = f"mp_rank_{missing[1]:02d}" + (f"_{missing[0]:03d}" if num_stages > 1 else "")
        raise UserError(f"{folder}: has files of {num_ranks} x {num_stages} ranks (tensor x pipeline), but not {name}")
    return _Parts(folder, [[files[stage, rank] for rank in range(num_ranks)] for stage in range(num_stages)])


def _iteration_folder(source: Path) -> Path:
    if not source.is_dir():
        what = "is a file" if source.exists() else "no such folder"
        raise UserError(f"{source}: {what}; give the folder of a Megatron-LM checkpoint")
    tracker = source / LATEST
    if not tracker.is_file():
        if any(source.glob(_FILES)) or any((source / name).is_file() for name in _DISTRIBUTED):
            return source
        below = {path.relative_to(source).parts[0] for pattern in _IN_FOLDERS for path in source.glob(pattern)}
        if below:
            raise UserError(f"{source}: has no {LATEST}; name one of its folders: {', '.join(sorted(below)[-3:])}")
        raise UserError(f"{source}: is no checkpoint of Megatron-LM (neither {LATEST} nor mp_rank_XX folders)")
    text = read_part(tracker, lambda path: read_bytes(path, 1 << 12)).decode("utf-8", "replace").strip()
    if not re.fullmatch(r"release|[0-9]{1,18}", text):
        raise UserError(f"{tracker}: says {text[:40]!r}; expected the number of an iteration, or 'release'")
    folder = source / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise UserError(f"{tracker}: says {text!r}, but there is no folder {folder}")
    return folder


def _read_part(path: Path) -> _Part:
    content = read_tensor_file(path, _CLASSES, _IGNORED)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no mapping; is this a checkpoint of Megatron-LM?")
    numbered = (content.get(f"model{number}") for number in itertools.count())
    chunks: list[Any] = (
        [content["model"]] if "model" in content else [*itertools.takewhile(lambda one: one is not None, numbered)]
    )
    if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
        raise UserError(f"{path}: has no state dict under 'model', nor under 'model0'")
    version, iteration = content.get("checkpoint_version", 0), content.get("iteration")
    if type(version) not in (int, float) or version not in _VERSIONS:
        raise UserError(f"{path}: checkpoint_version is {version!r:.40}; ftk reads {', '.join(map(str, _VERSIONS))}")
    args = content.get("args")
    options = None
    if isinstance(args, argparse.Namespace):
        is_plain = {name: isinstance(value, _PLAIN) for name, value in vars(args).items()}
        options = {name: value if is_plain[name] else type(value).__name__ for name, value in vars(args).items()}
    with _naming(path):
        tensors = [_named(chunk) for chunk in chunks]
    return _Part(tensors, options, version, iteration if type(iteration) is int and 0 <= iteration < 1 << 63 else None)


def _named(chunk: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, or of nested ones, under Megatron-Core's names."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in _flat(chunk):
        name = re.sub(r"^(encoder|transformer)\.", "decoder.", name.removeprefix("language_model."))
        name = re.sub(r"^decoder\.final_norm\.", "decoder.final_layernorm.", name)
        if layer := _LAYER.fullmatch(name):
            module = re.fullmatch(r"(.+)[._](weight|bias)", layer[2])
            if module and module[1] in _LAYER_NAMES:
                name = f"decoder.layers.{layer[1]}.{_LAYER_NAMES[module[1]]}.{module[2]}"
        if name.startswith(_OF_BERT):
            raise UserError("holds a BERT, whose norms are in other places than those of ftk's; GPT models are read")
        if name in tensors:
            raise UserError(f"holds {name!r} twice, as of an encoder and a decoder; GPT models are read")
        tensors[name] = tensor
    return tensors


def _flat(chunk: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Dotted names and tensors; each mapping is looked into once, as a hostile file may hold itself."""
    pending: list[tuple[str, dict[str, Any]]] = [("", chunk)]
    seen = {id(chunk)}
    while pending:
        prefix, mapping = pending.pop()
        for key, value in mapping.items():
            name = f"{prefix}{key}"
            if name.endswith(_NO_PARAMETERS):
                continue
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, dict) and id(value) not in seen:
                seen.add(id(value))
                pending.append((f"{name}.", value))
            else:
                raise UserError(f"{name!r:.200} is no tensor")


def _check_sizes(parts: _Parts, theirs: Mapping[str, Any]) -> None:
    """Refuse a folder whose last ranks are missing: the others would still form a whole model."""
    sizes = {
        "tensor_model_parallel_size": len(parts.files[0]),
        "model_parallel_size": len(parts.files[0]),  # in older files
        "pipeline_model_parallel_size": len(parts.files),
    }
    for name, found in sizes.items():
        if (told := theirs.get(name)) is not None and told != found:
            raise UserError(f"its option {name} is {told!r:.40}, but there are files of {found}")


def _model(theirs: Mapping[str, Any], vocab_size: int) -> tuple[str, dict[str, Any]]:
    """The name of ftk's model, and its options.

    Raises:
        UserError: an option that would change the model's answers and that ftk's cannot follow.
    """
    for name in _OFF:
        if theirs.get(name):
            raise UserError(f"its option {name} is {theirs[name]!r:.40}, which ftk's models do not have")
    if missing := [name for name in _NEEDED if theirs.get(name) is None]:
        raise UserError(f"its options have no {missing[0]}")
    older = _ROTARY if theirs.get("use_rotary_position_embeddings") else _LEARNED
    positions = theirs.get("position_embedding_type") or older
    if not isinstance(positions, str) or positions not in _FAMILIES:
        raise UserError(f"its option position_embedding_type is {positions!r:.40}; ftk reads {', '.join(_FAMILIES)}")
    for name, wanted in _FAMILIES[positions].items():
        found = _ABSENT[name] if theirs.get(name) is None else theirs[name]
        if found != wanted:
            raise UserError(
                f"its option {name} is {found!r:.40}; of models with position_embedding_type {positions} ftk reads"
                f" those with {wanted!r}"
            )
    options = {ours: theirs[name] for name, ours in (_NEEDED | _USED).items() if theirs.get(name) is not None}
    options["vocab_size"] = vocab_size
    if "dropout" in options:
        options["embedding_dropout"] = options["dropout"]
    size, heads, width = (theirs.get(name) for name in ("kv_channels", "num_attention_heads", "hidden_size"))
    own_size = isinstance(size, int) and isinstance(heads, int) and size * heads != width
    if positions == _LEARNED:
        if own_size:
            raise UserError(f"its option kv_channels is {size}; ftk's gpt2 has hidden_size / num_attention_heads")
        # The fused kernel computes the tanh form, which is the default.
        is_tanh = theirs.get("openai_gelu") or theirs.get("bias_gelu_fusion") in (None, True)
        return "gpt2", options | {"activation": "gelu_tanh" if is_tanh else "gelu"}
    with_bias, with_norms = bool(theirs.get("add_qkv_bias")), bool(theirs.get("qk_layernorm"))
    if with_bias and with_norms:
        raise UserError("its options add_qkv_bias and qk_layernorm are both on; none of ftk's models has both")
    options |= {
        "tie_embeddings": not theirs.get("untie_embeddings_and_output_weights"),
        "num_kv_heads": theirs.get("num_query_groups") if theirs.get("group_query_attention") else None,
        "head_dim": size if own_size else None,
    }
    return "qwen2" if with_bias else "qwen3" if with_norms else "llama", options | _rope(theirs)


def _padding(theirs: Mapping[str, Any], vocab_size: int, num_ranks: int) -> int:
    """What the number of rows was made a multiple of; 1 where it is no multiple of what the options say."""
    told = theirs.get("make_vocab_size_divisible_by")
    multiple = (told if isinstance(told, int) and told > 0 else 128) * num_ranks
    return multiple if vocab_size % multiple == 0 else 1


def _rope(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Options of rotary positions (megatron/core/models/common/embeddings/rotary_pos_embedding.py)."""
    stretch = theirs.get("rotary_seq_len_interpolation_factor") or 1
    options: dict[str, Any] = {"rope_theta": theirs.get("rotary_base") or 10000.0}
    if theirs.get("use_rope_scaling"):
        if stretch != 1:
            raise UserError("its options use_rope_scaling and rotary_seq_len_interpolation_factor are both given")
        options |= {"rope_scaling": "llama3", "rope_factor": theirs.get("rope_scaling_factor") or 8.0}
        return options | {"rope_low": 1.0, "rope_high": 4.0, "rope_original_positions": 8192}  # constants there
    return options if stretch == 1 else options | {"rope_scaling": "linear", "rope_factor": stretch}


def _whole(parts: _Parts, config: Any, gated: bool) -> LazyTensors:
    """The parameters in ftk's names and layouts; one is put together of its parts when it is read."""
    stored, version = parts.tensors(), parts.first.version
    older = {name.replace(_OLD_QKV, _QKV): name for name in stored if f".{_OLD_QKV}." in name}
    if twice := older.keys() & stored.keys():
        raise UserError(f"holds {min(twice)!r} under two names")
    stored |= {name: stored.pop(old) for name, old in older.items()}
    if older and version < 2 and config.kv_heads != config.num_attention_heads:
        raise UserError(f"checkpoint_version is {version}, in which there were no grouped key heads")
    heads = config.num_attention_heads // len(parts.files[0])
    cuts = (
        Cut(re.compile(rf"^({re.escape(_EMBEDDING)}|{re.escape(_HEAD)}|{re.escape(_COPIES[0])})$"), 0),
        Cut(re.compile(rf"\.{re.escape(_QKV)}\.(weight|bias)$"), 0),
        Cut(re.compile(rf"\.{re.escape(_INNER)}\.(weight|bias)$"), 0, pieces=2 if gated else 1),
        Cut(re.compile(r"\.(self_attention\.linear_proj|mlp\.linear_fc2)\.weight$"), 1),
    )

    def whole(name: str, tensors: Sequence[Tensor]) -> Tensor:
        if name in older:
            tensors = [_by_head(rows, version, heads) for rows in tensors]
        return merge(name, tensors, cuts)

    described = {}
    for name, tensors in stored.items():
        try:
            if cut_of(name, cuts) is None and not _are_alike(tensors):
                raise UserError(
                    f"{name!r} is whole on each rank, but differs between ranks; the files are of different runs"
                )
            described[name] = whole(name, [tensor.to("meta") for tensor in tensors])
        except (IndexError, RuntimeError, ValueError) as error:
            shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
            raise UserError(f"the parts of {name!r} do not fit, {shapes}") from error
    theirs = LazyTensors(described, lambda name: whole(name, stored[name]))
    if config.tie_embeddings:
        if differing := [name for name in _COPIES if theirs.differ(name, _EMBEDDING)]:
            raise UserError(f"{differing[0]!r} differs from {_EMBEDDING!r}, but by its options they are one")
        theirs = LazyTensors({n: one for n, one in theirs.described.items() if n not in _COPIES}, theirs.read)
    return renamed(theirs, _RENAMES[gated], config)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether the parts are of one run, where they may differ by rounding; only vectors are looked at."""
    if tensors[0].dim() != 1:
        return True
    first, *others = (tensor.float() for tensor in tensors)
    return all(torch.allclose(first, other, rtol=1e-2, atol=1e-3) for other in others)


def _by_head(rows: Tensor, version: float, num_heads: int) -> Tensor:
    """Rows of queries, keys and values of one part, [A, 3, D] or by groups [K, A/K + 2, D] from version 2 on.

    Those of `query_key_value` were [3, A, D] in version 0 and [A, D, 3] in version 1; no other name is touched by
    `fix_query_key_value_ordering` there.
    """
    if version >= 2:
        return rows
    if version == 1:
        return rows.unflatten(0, (num_heads, -1, 3)).transpose(1, 2).flatten(0, 2)
    return rows.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)


@contextmanager
def _naming(place: Path) -> Iterator[None]:
    """Put the place in front of errors that do not name it."""
    try:
        yield
    except UserError as error:
        if str(error).startswith(str(place)):
            raise
        raise UserError(f"{place}: {error}") from error
