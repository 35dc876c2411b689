"""A search state out of lists, a tokenizer of letters, and models that are tables."""

from __future__ import annotations

import torch

from ftk.generation.processors.base import SearchState
from ftk.tokenizers.base import Tokenizer, TokenizerConfig
from ftk.tokenizers.special_tokens import CommandToken
from ftk.tokenizers.token_bytes import NO_SPACE, TokenBytes

ENDS = (2,)


def state_of(tokens, logits=None, vocab_size=8, blank=None, contexts=None, ends=ENDS, max_len=10, seed=0):
    """tokens: [N][W] lists of one length."""
    tokens = torch.tensor(tokens, dtype=torch.int64)
    if tokens.dim() == 2:  # no token so far
        tokens = tokens[:, :, None]
    num, width = tokens.shape[:2]
    if logits is None:
        logits = torch.randn(num, width, vocab_size, generator=torch.Generator().manual_seed(seed))
    contexts = [[4]] * num if contexts is None else contexts
    return SearchState(tokens, contexts, blank or [0] * num, ends, max_len, logits, logits.log_softmax(-1))


def run(processor, state):
    """What a processor makes of the model's own log-probabilities, [N][W][V] as a list."""
    own = state.logprobs.clone()
    logits = state.logits.clone()
    result = processor(state, state.logprobs.clone())
    assert torch.equal(state.logprobs.nan_to_num(7.0), own.nan_to_num(7.0)), "the model's own were changed"
    assert torch.equal(state.logits.nan_to_num(7.0), logits.nan_to_num(7.0)), "the model's own were changed"
    assert result.shape == own.shape
    assert result.dtype == torch.float32
    return result


def allowed(scores):
    """Which tokens are not forbidden: [N][W] sets."""
    return [[{token for token, one in enumerate(row) if one > -torch.inf} for row in rows] for rows in scores.tolist()]


class Letters(Tokenizer):
    """Each of a to z is a token from 10 on; " a" is another than "a"; "<" ... ">" hold command tokens."""

    name = "letters"
    COMMANDS = (("pad", 0), ("unk", 1), ("eop", 2), ("sop", 3), ("MASK", 4), ("ENC", 5), ("eos", 6))

    def __init__(self):
        commands = [CommandToken(name, f"<{name}>", id_) for name, id_ in self.COMMANDS]
        super().__init__(TokenizerConfig(path=""), files=(), command_tokens=commands, num_text_tokens=62)

    def decode(self, ids):
        return "".join(map(self.token_text, map(int, ids)))

    def token_text(self, token_id):
        if token_id in self._command_texts:
            return self._command_texts[token_id]
        if 10 <= token_id < 36:
            return chr(ord("a") + token_id - 10)
        return " " + chr(ord("a") + token_id - 36) if 36 <= token_id < 62 else ""

    def token_bytes(self):
        return TokenBytes([b"" if id_ < 10 else self.token_text(id_).encode() for id_ in range(62)], NO_SPACE)

    def _encode_text(self, text):
        ids, at = [], 0
        while at < len(text):
            space = text[at] == " " and at + 1 < len(text) and text[at + 1].isalpha()
            letter = text[at + space]
            ids.append(ord(letter) - ord("a") + (36 if space else 10) if "a" <= letter <= "z" else 1)
            at += 1 + space
        return ids

    def _encode_texts(self, texts):
        return [self._encode_text(text) for text in texts]
