"""Text to ids and back: tokenizers, special tokens around them, and how to build, save and load them.

Importing this package imports neither sentencepiece nor tokenizers nor torch; a library is imported by the
module that registers the tokenizer that is asked for.
"""

from __future__ import annotations

from ftk.tokenizers.base import Tokenizer, TokenizerConfig
from ftk.tokenizers.build import build_tokenizer, load_tokenizer, with_special_tokens
from ftk.tokenizers.files import find_description
from ftk.tokenizers.special_tokens import CommandToken, SpecialTokens
from ftk.tokenizers.train_sentencepiece import train_sentencepiece

__all__ = [
    "CommandToken",
    "SpecialTokens",
    "Tokenizer",
    "TokenizerConfig",
    "build_tokenizer",
    "find_description",
    "load_tokenizer",
    "train_sentencepiece",
    "with_special_tokens",
]
