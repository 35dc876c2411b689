"""Writes the golden checkpoints of Megatron-LM and their logits, by Megatron-Core itself, on a CPU.

    pip install --no-deps megatron-core==0.16.1
    torchrun --nproc-per-node 4 tests/golden/megatron/make.py llama

NAME is one of `CASES`; the number of processes is that of its tensor parallel ranks times its pipeline stages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import functional as F

ROTARY: dict[str, Any] = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "norm_epsilon": 1e-6,
    "rotary_base": 5000,
}
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # tensor parallel ranks, stages, chunks of each, options
    "gpt2": (2, 2, 2, {}),
    "llama": (
        *(2, 2, 1),
        ROTARY | {"use_rope_scaling": True, "rotary_base": 500000, "untie_embeddings_and_output_weights": True},
    ),
    "qwen2": (2, 1, 1, ROTARY | {"add_qkv_bias": True, "rotary_seq_len_interpolation_factor": 4}),
    "qwen3": (1, 1, 1, ROTARY | {"qk_layernorm": True, "kv_channels": 6}),
}
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 32  # [B, T]


def main(name: str) -> None:
    ranks, stages, chunks, options = CASES[name]
    distributed.init_process_group("gloo")
    # Megatron-Core asks for a GPU where none is needed.
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *ignored: self
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    parallel_state.initialize_model_parallel(ranks, stages, chunks if chunks > 1 else None)
    rank = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    is_rotary = name != "gpt2"
    args = argparse.Namespace(
        **{"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "kv_channels": 4},
        **{"max_position_embeddings": 16, "padded_vocab_size": 32, "init_method_std": 0.02, "hidden_dropout": 0.0},
        **{"attention_dropout": 0.0, "tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages},
        **{"swiglu": is_rotary, "add_bias_linear": not is_rotary, "bias_gelu_fusion": not is_rotary},
        **{"attention_backend": AttnBackend.local, "params_dtype": torch.float32, "rope_scaling_factor": 8.0},
        normalization="RMSNorm" if is_rotary else "LayerNorm",
        position_embedding_type="rope" if is_rotary else "learned_absolute",
    )
    vars(args).update(options)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        kv_channels=args.kv_channels,
        num_query_groups=options.get("num_query_groups"),
        normalization=args.normalization,
        layernorm_epsilon=options.get("norm_epsilon", 1e-5),
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=options.get("add_qkv_bias", False),
        qk_layernorm=options.get("qk_layernorm", False),
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=args.bias_gelu_fusion,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=args.attention_backend,
        tensor_model_parallel_size=ranks,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        **dict.fromkeys(("masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion"), False),
    )
    models = []
    for chunk in range(chunks):
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=(stage, chunk) == (0, 0),
            post_process=(stage, chunk) == (stages - 1, chunks - 1),
            parallel_output=False,
            share_embeddings_and_output_weights="untie_embeddings_and_output_weights" not in options,
            position_embedding_type=args.position_embedding_type,
            rotary_base=options.get("rotary_base", 10000),
            rope_scaling=options.get("use_rope_scaling", False),
            seq_len_interpolation_factor=options.get("rotary_seq_len_interpolation_factor"),
            vp_stage=chunk if chunks > 1 else None,
        ).eval()
        draw(model, f"{stage} {chunk}", rank)
        models.append(model)

    hidden: Any = None
    for step in range(stages * chunks):
        if step % stages == stage:
            model = models[step // stages]
            if hidden is not None:
                model.set_input_tensor(hidden)
            places, mask = torch.arange(12).expand(2, 12), ~torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
            with torch.no_grad():
                hidden = model(TOKENS, places, mask)
        all_of_them: list[Any] = [None] * (ranks * stages)
        distributed.all_gather_object(all_of_them, (stage, hidden))
        hidden = next(one for place, one in all_of_them if place == step % stages)
    folder = Path(__file__).parent / name
    part = folder / "iter_0000007" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
    part.mkdir(parents=True, exist_ok=True)
    states = [model.state_dict_for_save_checkpoint() for model in models]
    content = {"model" if chunks == 1 else f"model{chunk}": state for chunk, state in enumerate(states)}
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 7, **content}, part / "model_optim_rng.pt")
    if distributed.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
        torch.save(hidden, folder / "logits.pt")


@torch.no_grad()
def draw(model: torch.nn.Module, place: str, rank: int) -> None:
    """Random weights, the same on all ranks where they have one tensor."""
    is_tied = getattr(model, "share_embeddings_and_output_weights", False)
    for name, parameter in model.named_parameters():
        shared = "embedding.word_embeddings.weight" if is_tied and name == "output_layer.weight" else name
        key = (place if ".layers." in name else "", shared, rank * getattr(parameter, "tensor_model_parallel", False))
        generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # without Megatron-Core's threads
