"""Hugging Face's GPT-2 as it is, its layers cut over processes by a plan of name patterns: tensor parallel.

pip install -c constraints.txt transformers
torchrun --nproc-per-node 2 examples/parallelize/gpt2.py
"""

import torch
import torch.distributed as dist

import ftk

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise SystemExit("gpt2.py needs Hugging Face's package: pip install -c constraints.txt transformers") from None

PLAN = {
    "transformer.wte": "vocab_embedding",
    "transformer.h.*.attn": {"style": "sharded", "divide": ["split_size"]},
    "transformer.h.*.attn.attn_dropout": "sharded",
    "transformer.h.*.attn.resid_dropout": "replicated",
    "transformer.h.*.attn.c_attn": {"style": "column", "fused": 3, "units": 4, "transposed": True, "divide": ["nf"]},
    "transformer.h.*.attn.c_proj": {"style": "row", "transposed": True},
    "transformer.h.*.mlp.c_fc": {"style": "column", "transposed": True, "divide": ["nf"]},
    "transformer.h.*.mlp.c_proj": {"style": "row", "transposed": True},
    "lm_head": "vocab_output",
}

dist.init_process_group("gloo")
torch.manual_seed(0)
special = {"bos_token_id": 0, "eos_token_id": 0}  # GPT-2's own are beyond a vocabulary of 256
config = GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False, **special)
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
model = ftk.parallelize(GPT2LMHeadModel(config), mesh, PLAN)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.arange(4 * 32).view(4, 32) % 256  # [B, T], the same on every process
for update in range(10):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"update {update + 1}: loss {loss.item():.4f}")
dist.barrier()
dist.destroy_process_group()
