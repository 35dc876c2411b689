"""A causal language model with its task: pieces of the corpus are read, the next token is learned at each place."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from ftk.config.options import option
from ftk.registry import register_architecture, register_model, register_task
from ftk.tasks.base import Task


@dataclass(kw_only=True)
class NextTokenConfig:
    window: int = option(64, "length of a sample", min=1, unit="tokens")


class Windows:
    """All documents, each closed by an end token, cut into windows."""

    def __init__(self, documents, window, end):
        self.text = np.concatenate([np.append(documents[i], end) for i in range(len(documents))]).astype(np.int64)
        self.window = window

    def __len__(self):
        return max(1, (len(self.text) - 1) // self.window)

    def sizes(self, epoch):
        return np.full(len(self), self.window, dtype=np.int32)  # [len]

    def sample(self, epoch, index):
        piece = self.text[index * self.window : (index + 1) * self.window + 1]  # [T + 1]
        return {"tokens": piece[:-1], "targets": piece[1:], "loss_mask": np.ones(len(piece) - 1, dtype=bool)}


@register_task("next_token", config=NextTokenConfig, criterion="cross_entropy")
class NextToken(Task):
    special_tokens = "with_end"

    def make_samples(self, documents, seed):
        return Windows(documents, self.config.window, self.tokenizer.special.eos)


@dataclass(kw_only=True)
class LSTMConfig:
    vocab_size: int = option(1, "set by the task", derived=True)
    hidden_size: int = option(256, "width of embedding and state")
    num_layers: int = option(2, "LSTM layers")


@register_model("lstm_lm", config=LSTMConfig, task="next_token")
class LSTM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lstm = nn.LSTM(config.hidden_size, config.hidden_size, config.num_layers, batch_first=True)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def hidden_states(self, tokens):  # [B, T] -> [B, T, H], each from the tokens up to its own place
        return self.lstm(self.embedding(tokens))[0]

    def forward(self, tokens):  # [B, T] -> [B, T, V]
        return self.head(self.hidden_states(tokens))


@register_architecture("lstm_tiny", model="lstm_lm")
def lstm_tiny():
    return LSTMConfig(hidden_size=32, num_layers=1)
