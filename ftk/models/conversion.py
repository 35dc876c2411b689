"""What a family's converters are: what is read from and written to files of other programs, and how it is described.

The machinery that reads and writes checkpoints is `ftk.checkpoint.convert`; here are the values that pass between it
and a family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from ftk.errors import UserError
from ftk.models.renames import LazyTensors, Rename
from ftk.modules.heads import HeadShape

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM_STEP = "step"

HF_WEIGHTS, HF_PICKLED = "model.safetensors", "pytorch_model.bin"  # of Hugging Face's folders
HF_INDEX = ".index.json"  # suffix of the index of weights that are split into several files

_ACTIVATION_KEYS = ("activation_function", "hidden_act")
ACTIVATIONS = {  # their name -> ours, where a family has the choice; the first of a kind is written
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh", "gelu_accurate"), "gelu_tanh"),
    **{"gelu": "gelu", "gelu_python": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"},
}


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
    *("author", "created_date", "license"),  # notes
    *("sbert_ce_default_activation_function", "sentence_transformers"),  # what that library computes from the scores
    # Of generation, which older files kept here.
    *("do_sample", "max_length", "min_length", "max_new_tokens", "num_beams", "num_return_sequences", "early_stopping"),
    *("length_penalty", "no_repeat_ngram_size", "repetition_penalty", "temperature", "top_k", "top_p", "typical_p"),
    *("diversity_penalty", "encoder_no_repeat_ngram_size", "num_beam_groups", "badwordsids"),
}
