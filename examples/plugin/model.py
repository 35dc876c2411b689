"""A model, and an architecture of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from ftk.registry import register_architecture, register_model


@dataclass(kw_only=True)
class LSTMConfig:
    vocab_size: int = field(default=1000, metadata={"help": "taken from the tokenizer", "derived": True})
    hidden_size: int = field(default=256, metadata={"help": "width of embedding and state"})
    num_layers: int = field(default=2, metadata={"help": "LSTM layers"})


@register_model("lstm_lm", config=LSTMConfig)
class LSTMLanguageModel(nn.Module):
    """tokens [B, T] -> logits [B, T, V], each from the tokens up to its own place."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lstm = nn.LSTM(config.hidden_size, config.hidden_size, config.num_layers, batch_first=True)
        self.output = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))  # [B, T, H]
        return self.output(states)


@register_architecture("lstm_tiny", model="lstm_lm")
def lstm_tiny() -> LSTMConfig:
    return LSTMConfig(hidden_size=32, num_layers=1)
