"""Where the built-in names live: kind -> name -> the module whose import registers the name.

This is a table of contents, not a second way to register: each module uses the same decorators as a plugin,
and a test compares the table with what the modules register.
"""

from __future__ import annotations

BUILTIN_MODULES: dict[str, dict[str, str]] = {
    "task": {
        "causal_lm": "ftk.tasks.causal_lm.task",
        "glm_blank": "ftk.tasks.glm_blank.task",
    },
    "model": {
        "glm": "ftk.models.glm",
        "gpt2": "ftk.models.gpt2",
    },
    "architecture": {
        "glm_tiny": "ftk.models.glm.architectures",
        "glm_base": "ftk.models.glm.architectures",
        "glm_large": "ftk.models.glm.architectures",
        "glm_large_chinese": "ftk.models.glm.architectures",
        "glm_roberta_large": "ftk.models.glm.architectures",
        "glm_410m": "ftk.models.glm.architectures",
        "glm_515m": "ftk.models.glm.architectures",
        "glm_2b": "ftk.models.glm.architectures",
        "glm_10b": "ftk.models.glm.architectures",
        "glm_10b_chinese": "ftk.models.glm.architectures",
        "gpt2": "ftk.models.gpt2",
        "gpt2_large": "ftk.models.gpt2",
        "gpt2_medium": "ftk.models.gpt2",
        "gpt2_tiny": "ftk.models.gpt2",
        "gpt2_xl": "ftk.models.gpt2",
    },
    "criterion": {
        "cross_entropy": "ftk.criterions.cross_entropy",
    },
    "optimizer": {
        "adafactor": "ftk.optim.optimizers",
        "adam": "ftk.optim.optimizers",
        "adamw": "ftk.optim.optimizers",
        "composite": "ftk.optim.optimizers",
        "lamb": "ftk.optim.optimizers",
        "lion": "ftk.optim.optimizers",
        "muon": "ftk.optim.optimizers",
        "sgd": "ftk.optim.optimizers",
    },
    "lr_scheduler": {
        "constant": "ftk.optim.schedules",
        "cosine": "ftk.optim.schedules",
        "exponential": "ftk.optim.schedules",
        "inverse_sqrt": "ftk.optim.schedules",
        "linear": "ftk.optim.schedules",
        "noam": "ftk.optim.schedules",
        "one_cycle": "ftk.optim.schedules",
        "polynomial": "ftk.optim.schedules",
        "reduce_on_plateau": "ftk.optim.schedules",
        "step": "ftk.optim.schedules",
        "tri_stage": "ftk.optim.schedules",
        "warmup_stable_decay": "ftk.optim.schedules",
    },
    "dataset": {
        "indexed": "ftk.data.corpora.corpus",
        "raw": "ftk.data.corpora.raw_corpus",
    },
    "tokenizer": {
        "bert_wordpiece": "ftk.tokenizers.bert_wordpiece",
        "fairseq_dict": "ftk.tokenizers.fairseq_dict",
        "gpt2_bpe": "ftk.tokenizers.gpt2_bpe",
        "sentencepiece": "ftk.tokenizers.sentencepiece",
    },
    "special_tokens": {
        "glm": "ftk.tasks.glm_blank.command_tokens",
        "plain": "ftk.tokenizers.special_tokens",
    },
    "search": {
        "beam": "ftk.generation.search.beam",
        "beam_sampling": "ftk.generation.search.beam_sampling",
        "diverse_beam": "ftk.generation.search.diverse_beam",
        "greedy": "ftk.generation.search.greedy",
        "sampling": "ftk.generation.search.sampling",
    },
    "scorer": {
        "exact_match": "ftk.evaluation.answers",
        "token_f1": "ftk.evaluation.answers",
    },
    "converter": {
        "glm": "ftk.models.glm.original",
        "hf": "ftk.checkpoint.huggingface",
    },
    "hf_model": {
        "gpt2": "ftk.models.gpt2.convert",
    },
}

FORMER_NAMES: dict[str, dict[str, str]] = {
    "criterion": {"glm_cross_entropy": "cross_entropy"},
}
"""kind -> a name that configurations on disk still have -> the name of today."""

DEFAULT_SPECIAL_TOKENS = "glm"
"""The layout of special tokens where none is chosen, and of tokenizers on disk that name none."""
