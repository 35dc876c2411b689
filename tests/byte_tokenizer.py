"""A tokenizer in Hugging Face's form whose tokens are the bytes of a text, so that ids can be written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from ftk.tokenizers import build_tokenizer
from ftk.tokenizers.base import Tokenizer

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
"""Its special tokens, with ids from 256 on."""

CHATML = """{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template."""

THINKING = "{% if add_generation_prompt and enable_thinking is false %}<think></think>{% endif %}"
"""Behind it: a variable, as Qwen3's template has."""


def byte_tokenizer(folder: Path, eos: str = MARKS[0], chat_template: str | None = None, bos: str = "") -> Tokenizer:
    """Written to a folder, and read from there; `bos` stands in front of every text."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([*MARKS])
    if bos:
        ids = [(bos, made.token_to_id(bos))]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos, "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"bos_token": bos} if bos else {}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return build_tokenizer("hf", path=folder)
