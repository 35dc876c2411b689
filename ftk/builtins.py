"""Where the built-in names live: kind -> name -> the module whose import registers the name.

This is a table of contents, not a second way to register: each module uses the same decorators as a plugin,
and a test compares the table with what the modules register.
"""

from __future__ import annotations

BUILTIN_MODULES: dict[str, dict[str, str]] = {
    "task": {
        "causal_lm": "ftk.tasks.causal_lm.task",
        "glm_blank": "ftk.tasks.glm_blank.task",
        "masked_lm": "ftk.tasks.masked_lm.task",
    },
    "model": {
        "glm": "ftk.models.glm",
        "gpt2": "ftk.models.gpt2",
        "llama": "ftk.models.llama",
        "mistral": "ftk.models.mistral",
        "opt": "ftk.models.opt",
        "qwen2": "ftk.models.qwen2",
        "qwen3": "ftk.models.qwen3",
    },
    "architecture": {
        "glm_tiny": "ftk.models.glm",
        "glm_base": "ftk.models.glm",
        "glm_large": "ftk.models.glm",
        "glm_large_chinese": "ftk.models.glm",
        "glm_roberta_large": "ftk.models.glm",
        "glm_410m": "ftk.models.glm",
        "glm_515m": "ftk.models.glm",
        "glm_2b": "ftk.models.glm",
        "glm_10b": "ftk.models.glm",
        "glm_10b_chinese": "ftk.models.glm",
        "gpt2": "ftk.models.gpt2",
        "gpt2_large": "ftk.models.gpt2",
        "gpt2_medium": "ftk.models.gpt2",
        "gpt2_tiny": "ftk.models.gpt2",
        "gpt2_xl": "ftk.models.gpt2",
        "llama_tiny": "ftk.models.llama",
        "llama_7b": "ftk.models.llama",
        "llama_13b": "ftk.models.llama",
        "llama_33b": "ftk.models.llama",
        "llama_65b": "ftk.models.llama",
        "llama2_7b": "ftk.models.llama",
        "llama2_13b": "ftk.models.llama",
        "llama2_70b": "ftk.models.llama",
        "llama3_8b": "ftk.models.llama",
        "llama3_70b": "ftk.models.llama",
        "llama3_1_8b": "ftk.models.llama",
        "llama3_1_70b": "ftk.models.llama",
        "llama3_1_405b": "ftk.models.llama",
        "llama3_2_1b": "ftk.models.llama",
        "llama3_2_3b": "ftk.models.llama",
        "mistral_7b": "ftk.models.mistral",
        "mistral_7b_v0_3": "ftk.models.mistral",
        "opt_tiny": "ftk.models.opt",
        "opt_125m": "ftk.models.opt",
        "opt_350m": "ftk.models.opt",
        "opt_1_3b": "ftk.models.opt",
        "opt_2_7b": "ftk.models.opt",
        "opt_6_7b": "ftk.models.opt",
        "opt_13b": "ftk.models.opt",
        "opt_30b": "ftk.models.opt",
        "opt_66b": "ftk.models.opt",
        "opt_175b": "ftk.models.opt",
        "qwen2_tiny": "ftk.models.qwen2",
        "qwen2_0_5b": "ftk.models.qwen2",
        "qwen2_1_5b": "ftk.models.qwen2",
        "qwen2_5_3b": "ftk.models.qwen2",
        "qwen2_7b": "ftk.models.qwen2",
        "qwen2_5_14b": "ftk.models.qwen2",
        "qwen2_5_32b": "ftk.models.qwen2",
        "qwen2_72b": "ftk.models.qwen2",
        "qwen3_tiny": "ftk.models.qwen3",
        "qwen3_0_6b": "ftk.models.qwen3",
        "qwen3_1_7b": "ftk.models.qwen3",
        "qwen3_4b": "ftk.models.qwen3",
        "qwen3_8b": "ftk.models.qwen3",
        "qwen3_14b": "ftk.models.qwen3",
        "qwen3_32b": "ftk.models.qwen3",
    },
    "criterion": {
        "cross_entropy": "ftk.criterions.cross_entropy",
        "masked_lm": "ftk.tasks.masked_lm.criterion",
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
        "hf": "ftk.tokenizers.hf",
        "sentencepiece": "ftk.tokenizers.sentencepiece",
    },
    "special_tokens": {
        "glm": "ftk.tasks.glm_blank.command_tokens",
        "plain": "ftk.tokenizers.special_tokens",
        "with_end": "ftk.tokenizers.special_tokens",
        "with_mask": "ftk.tokenizers.special_tokens",
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
        "llama": "ftk.models.llama.convert",
        "mistral": "ftk.models.mistral.convert",
        "opt": "ftk.models.opt.convert",
        "qwen2": "ftk.models.qwen2.convert",
        "qwen3": "ftk.models.qwen3.convert",
    },
}

FORMER_NAMES: dict[str, dict[str, str]] = {
    "criterion": {"glm_cross_entropy": "cross_entropy"},
    "option": {"constraint_blanks": "constraint_answers"},
}
"""kind -> a name that configurations on disk and commands still have -> the name of today."""

UNNAMED_SPECIAL_TOKENS = "glm"
"""The layout of special tokens of saved tokenizers that name none: when they were saved, there was no other."""

FIRST_ARCHITECTURES = {"plain": "glm_tiny", "glm": "glm_tiny"}
FIRST_ARCHITECTURE = "gpt2_tiny"
"""What ftk-preprocess suggests for a first training, by layout of special tokens; the second for all other layouts."""
