"""fairseq's checkpoints of Transformers, BARTs, RoBERTas and language models: read, not written."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ftk.checkpoint.fairseq import FairseqConfig
from ftk.checkpoint.fairseq.files import Checkpoint, find, is_checkpoint, read
from ftk.checkpoint.fairseq.options import SOURCE, model_options, task_name
from ftk.checkpoint.weights import digest
from ftk.config.build import build_options
from ftk.errors import UserError, naming_place
from ftk.models.conversion import Contents, Converter
from ftk.models.renames import LazyTensors, renamed, without_copies
from ftk.registry import HF_MODELS, MODELS, TASKS
from ftk.tokenizers.base import Tokenizer
from ftk.tokenizers.fairseq_dict import dictionaries

logger = logging.getLogger(__name__)

_OF_HEADS = "classification_heads."
_LEFT_OUT = re.compile(  # says nothing about the model; the last are copies for torch's fast path, of fairseq 0.12
    r".*\.version|.*\.embed_positions\.(_float_tensor|weights)|.*\.layers\.\d+\.((in|out)_proj|fc[12])_(weight|bias)"
)
_TODAY = (  # older names, as `upgrade_state_dict_named` of fairseq's modules changes them
    (r"^decoder\.(sentence_encoder|lm_head)\.", r"encoder.\1."),
    (r"^encoder\.sentence_encoder\.", "encoder."),
    (r"\.emb_layer_norm\.", ".layernorm_embedding."),
    (r"\.layer_norms\.0\.", ".self_attn_layer_norm."),
    (r"^(encoder.*)\.layer_norms\.1\.", r"\1.final_layer_norm."),
    (r"^(decoder.*)\.layer_norms\.1\.", r"\1.encoder_attn_layer_norm."),
    (r"\.layer_norms\.2\.", ".final_layer_norm."),
    (r"^decoder\.embed_out$", "decoder.output_projection.weight"),
)
_LAYER = r"^encoder\.layers\.(\d+)\."
_ROBERTA_LAYER = r"roberta.encoder.layer.\1."
_TYPES = "roberta.embeddings.token_type_embeddings.weight"  # which fairseq's have not
_HUGGING_FACE = {  # ftk's family -> today's names as Hugging Face has them, whose renames the family gives
    "transformer": ((r"^", "model."),),
    "bart": ((r"^decoder\.output_projection\.", "lm_head."), (r"^(?!lm_head)", "model.")),
    "opt": (
        (r"^decoder\.output_projection\.", "lm_head."),
        (r"^decoder\.layer_norm\.", "decoder.final_layer_norm."),
        (r"^decoder\.project_(in|out)_dim\.", r"decoder.project_\1."),
        (r"^decoder\.", "model.decoder."),
    ),
    "roberta": (
        (r"^encoder\.lm_head\.weight$", "lm_head.decoder.weight"),
        (r"^encoder\.lm_head\.", "lm_head."),
        (r"^encoder\.embed_tokens\.", "roberta.embeddings.word_embeddings."),
        (r"^encoder\.embed_positions\.", "roberta.embeddings.position_embeddings."),
        (r"^encoder\.layernorm_embedding\.", "roberta.embeddings.LayerNorm."),
        (rf"{_LAYER}self_attn\.q_proj", f"{_ROBERTA_LAYER}attention.self.query"),
        (rf"{_LAYER}self_attn\.k_proj", f"{_ROBERTA_LAYER}attention.self.key"),
        (rf"{_LAYER}self_attn\.v_proj", f"{_ROBERTA_LAYER}attention.self.value"),
        (rf"{_LAYER}self_attn\.out_proj", f"{_ROBERTA_LAYER}attention.output.dense"),
        (rf"{_LAYER}self_attn_layer_norm", f"{_ROBERTA_LAYER}attention.output.LayerNorm"),
        (rf"{_LAYER}fc1", f"{_ROBERTA_LAYER}intermediate.dense"),
        (rf"{_LAYER}fc2", f"{_ROBERTA_LAYER}output.dense"),
        (rf"{_LAYER}final_layer_norm", f"{_ROBERTA_LAYER}output.LayerNorm"),
    ),
}
_FIRST_WORDS = range(4, 12)  # of a dictionary, the most frequent ones
_RECORDED = ("eval_bleu_remove_bpe", "post_process", "remove_bpe", "bpe")  # options that say what symbols are
_PIECES = {**dict.fromkeys(("@@ ", "subword_nmt", "fastbpe"), "subword_nmt"), "sentencepiece": "sentencepiece"}


class Fairseq:
    """Files of fairseq, weights in the dtype they are stored in; the optimizer's state is left out."""

    def __init__(self, config: FairseqConfig) -> None:
        self.config = config

    @staticmethod
    def recognises(folder: Path) -> bool:
        return is_checkpoint(folder)

    @staticmethod
    def identity_files(source: Path) -> list[Path]:
        return [find(source)]

    def describe(self, source: Path) -> Contents:
        return _kept(source, digest(find(source).parent), tuple(dataclasses.asdict(self.config).items()))

    def read(self, source: Path) -> Contents:
        checkpoint = read(source)
        contents, stored = self._described(checkpoint)
        if heads := {name.split(".")[1] for name in checkpoint.tensors if name.startswith(_OF_HEADS)}:
            logger.warning("%s: its classification heads are left out: %s", checkpoint.path, ", ".join(sorted(heads)))
        converter = _converter(contents.model)
        with naming_place(checkpoint.path):
            theirs = {_renamed(name, _HUGGING_FACE[contents.model]): tensor for name, tensor in stored.items()}
            if contents.model == "roberta":
                theirs[_TYPES] = stored[SOURCE].new_zeros(1, stored[SOURCE].size(1))
            whole = without_copies(LazyTensors.of(theirs), converter.tied(contents.config))
            ours = renamed(whole, converter.renames, contents.config)
        return dataclasses.replace(contents, tensors=ours)

    def _described(self, checkpoint: Checkpoint) -> tuple[Contents, dict[str, Tensor]]:
        """The contents without tensors; and these, by fairseq's names of today."""
        with naming_place(checkpoint.path):
            tensors = _today(checkpoint.tensors)
            model, options = model_options(checkpoint.options, tensors, self.config.fairseq_model)
            config_type = MODELS.get(model).config
            assert config_type is not None, "families have options"
            config = build_options("model", config_type, options)
        task = _converter(model).task(config)
        task["_name"] = task_name(checkpoint.options, task["_name"])
        tokenizer = self._own_tokenizer(checkpoint, model, config, task["_name"])
        found = Contents(model, config, task=task, num_updates=checkpoint.num_updates, place=checkpoint.path)
        return dataclasses.replace(found, own_tokenizer=tokenizer), tensors

    def _own_tokenizer(
        self, checkpoint: Checkpoint, model: str, config: Any, task: str
    ) -> Callable[[], Tokenizer] | None:
        """A function that builds the tokenizer from the dictionaries; None if the checkpoint's folder has none."""
        given, theirs = self.config.dictionaries, checkpoint.options
        folder = checkpoint.path.parent if given is None else Path(given)
        if given is None and not any(folder.glob("dict*.txt")):
            return None
        recorded = (_PIECES.get(str(theirs.get(name))) for name in _RECORDED)
        pieces = self.config.dictionary_pieces or next(filter(None, recorded), "words")
        sides = [str(theirs[name]) for name in ("source_lang", "target_lang") if theirs.get(name)]
        rows = config.vocab_size, getattr(config, "source_rows", config.vocab_size)

        def made() -> Tokenizer:
            of_task: Any = TASKS.get(task)
            start = "none" if model != "opt" else "bos" if theirs.get("add_bos_token") else "eos"
            remove_bpe = "none" if pieces == "words" else pieces
            tokenizer = dictionaries(folder, sides, remove_bpe=remove_bpe, text_start=start)
            tokenizer = of_task.target.add_special_tokens(tokenizer)
            for side, count in zip((tokenizer, tokenizer.of_source), rows, strict=True):
                _check_dictionary(side, count)
            return tokenizer

        return made


@functools.lru_cache(maxsize=8)
def _kept(source: Path, state: str, options: tuple[tuple[str, Any], ...]) -> Contents:
    """What `describe` gives of files that have this `digest`.

    Kept, as an old file can only be read whole, and is described several times.
    """
    return Fairseq(FairseqConfig(**dict(options)))._described(read(source))[0]


def _check_dictionary(tokenizer: Tokenizer, num_rows: int) -> None:
    path, size = tokenizer.files[0].path, tokenizer.vocab_size
    if size > num_rows:
        raise UserError(
            f"{path}: makes {size} tokens, but the model has {num_rows}; this is not the dictionary it was trained with"
        )
    if size < num_rows:
        logger.warning(
            "%s: makes %d tokens, the model has %d; is it the one it was trained with?", path, size, num_rows
        )
    words = [tokenizer.token_text(id_) for id_ in _FIRST_WORDS if id_ < size]
    if all(map(str.isdecimal, words)):
        logger.warning(
            "%s: its words are numbers, as those of GPT-2's BPE, and text is read as such numbers; a tokenizer of that "
            "BPE with the ids of this dictionary can be given instead (`tokenizer`)",
            path,
        )


def _converter(model: str) -> Converter:
    converter: Converter = HF_MODELS.get(model).target()
    return converter


def _today(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Today's names and their tensors, without those that ftk's models do not have."""
    tensors: dict[str, Tensor] = {}
    for old, tensor in stored.items():
        if old.startswith(_OF_HEADS) or _LEFT_OUT.fullmatch(old):
            continue
        found = {_renamed(old, _TODAY): tensor}
        start, joined, kind = old.partition("in_proj_")
        if joined:
            if tensor.dim() == 0 or len(tensor) % 3:
                raise UserError(f"{old} is {list(tensor.shape)}; it holds queries, keys and values")
            names = (_renamed(f"{start}{part}_proj.{kind}", _TODAY) for part in "qkv")
            found = dict(zip(names, tensor.chunk(3), strict=True))
        if twice := found.keys() & tensors.keys():
            raise UserError(f"holds {min(twice)!r} under two names")
        tensors |= found
    return tensors


def _renamed(name: str, patterns: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name
