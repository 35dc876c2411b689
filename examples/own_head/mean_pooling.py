"""A pretrained model under a head of one's own, in a loop of one's own: ftk gives the body, the rest is plain PyTorch.

python examples/own_head/mean_pooling.py MODEL TEXTS.tsv    (MODEL: a run, a checkpoint or a Hugging Face folder of a
GLM, an encoder or a causal model; each line of TEXTS a label and a text, with a tab between)
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import ftk

path, file = sys.argv[1:]
model, tokenizer = ftk.load_model(path, "cpu"), ftk.load_tokenizer(path)
names, texts = zip(*(line.split("\t") for line in Path(file).read_text(encoding="utf-8").splitlines()), strict=True)
labels = sorted(set(names))
special, encoded = tokenizer.special, tokenizer.encode_batch(texts)
rows = [[token for token in (special.cls, *ids, special.text_end) if token is not None] for ids in encoded]
lengths = torch.tensor([len(row) for row in rows])  # [N]
tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)  # [N, T]
targets = torch.tensor([labels.index(name) for name in names])  # [N]
# How many tokens all others see: of an encoder's text, of a GLM's context; a causal model takes neither.
seen = [name for name in ("lengths", "context_length") if name in model.INPUTS]


class MeanPooling(nn.Module):
    def __init__(self, size: int, num_labels: int) -> None:
        super().__init__()
        self.output = nn.Linear(size, num_labels)

    def forward(self, hidden, lengths):  # [B, T, H], [B] -> [B, labels]
        is_text = torch.arange(hidden.size(1)) < lengths[:, None]  # [B, T]
        return self.output((hidden * is_text[..., None]).sum(1) / lengths[:, None])


torch.manual_seed(1)
head = MeanPooling(model.config.hidden_size, len(labels))
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
model.train()
for _ in range(20):
    num_right = 0
    for batch in torch.randperm(len(rows)).split(8):
        hidden = model.hidden_states(tokens[batch], **dict.fromkeys(seen, lengths[batch]))  # [B, T, H]
        scores = head(hidden, lengths[batch])
        F.cross_entropy(scores, targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_right += int((scores.argmax(-1) == targets[batch]).sum())
print(f"{num_right} of {len(rows)} right")
