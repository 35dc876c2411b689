"""ftk's int8 beside llama.cpp's q8_0: one prompt, the same LLaMA-shaped model of random weights.

    python -m venv llama && llama/bin/pip install llama-cpp-python gguf
    python scripts/benchmark/llama_cpp.py --python llama/bin/python

llama.cpp runs in the Python of --python, as a process that lives through the rounds and sleeps while ftk has its turn.
A round reads a prompt of 256 tokens and then decodes --tokens tokens; its figure is the tokens a second of the latter,
of all rounds the median, and the median of the quotients of neighbours. ftk's time counts the search of the likeliest
token, llama.cpp's does not. Both keep the token embedding, which is the output layer too, in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import ftk
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.models import build_model
from ftk.modules.few_rows_layer import prepare
from ftk.modules.quantization import Quantization, quantize_model

SHAPE = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "ffn_hidden_size": 2048, "vocab_size": 32000}
PROMPT = 256

THEIRS = """
import json, sys, time
import numpy as np
import gguf
from llama_cpp import Llama

weights, shape, num_tokens, threads = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
stored = np.load(weights)
path = weights + ".gguf"
writer = gguf.GGUFWriter(path, "llama")
writer.add_context_length(1024)
writer.add_embedding_length(shape["hidden_size"])
writer.add_block_count(shape["num_layers"])
writer.add_feed_forward_length(shape["ffn_hidden_size"])
writer.add_head_count(shape["num_attention_heads"])
writer.add_head_count_kv(shape["num_attention_heads"])
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(shape["hidden_size"] // shape["num_attention_heads"])
writer.add_tokenizer_model("llama")
tokens = [b"<unk>", b"<s>", b"</s>"] + [b"t%d" % n for n in range(3, shape["vocab_size"])]
writer.add_token_list(tokens)
writer.add_token_scores([0.0] * len(tokens))
writer.add_token_types([2, 3, 3] + [1] * (len(tokens) - 3))
for name in stored.files:
    array = stored[name]
    if array.ndim == 1:
        writer.add_tensor(name, array)
    else:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
model = Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False)
for line in sys.stdin:
    model.reset()
    model.eval(json.loads(line))
    begun = time.perf_counter()
    for token in range(3, num_tokens + 3):  # any: asking for the scores in Python takes longer than the step
        model.eval([token])
    print(time.perf_counter() - begun, flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python that has llama-cpp-python and gguf")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are decoded")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build_model("llama_tiny", tie_embeddings=True, max_positions=1024, num_kv_heads=None, **SHAPE).eval()
    prompt = torch.randint(3, SHAPE["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    with tempfile.TemporaryDirectory() as place:
        weights = Path(place) / "weights.npz"
        np.savez(weights, **named_as_theirs(model))
        quantize_model(model, Quantization(weights="int8"))
        prepare(model)  # as ftk.load_generator does
        theirs = subprocess.Popen(
            [options.python, "-c", THEIRS, str(weights), json.dumps(SHAPE), str(options.tokens), str(options.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert theirs.stdin is not None
        assert theirs.stdout is not None
        rates: list[tuple[float, float]] = []
        for number in range(options.rounds + 1):
            print(json.dumps(prompt), file=theirs.stdin, flush=True)
            answer = theirs.stdout.readline()
            if not answer:
                sys.exit("llama.cpp's process ended; its error stands above")
            pair = options.tokens / decoded(model, prompt, options.tokens), options.tokens / float(answer)
            if number:  # the first turn warms up
                rates.append(pair)
        theirs.stdin.close()
        theirs.wait()
    ours, other = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(one / two for one, two in rates)
    print(f"ftk {ftk.__version__} int8 {ours:.1f} tokens/s, llama.cpp q8_0 {other:.1f} tokens/s, x {ratio:.2f}")
    return 0


def named_as_theirs(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The weights by the names of GGUF; heads stay as they are, which changes no shape and so no time."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    found = {"token_embd.weight": state["token_embedding.weight"], "output_norm.weight": state["final_norm.weight"]}
    for number in range(SHAPE["num_layers"]):
        ours, blk = f"layers.{number}", f"blk.{number}"
        parts = np.split(state[f"{ours}.attention.qkv.weight"], 3)
        found |= {f"{blk}.attn_{name}.weight": part for name, part in zip("qkv", parts, strict=True)}
        for theirs, name in {
            "attn_norm": "attention_norm",
            "attn_output": "attention.output",
            "ffn_norm": "feed_forward_norm",
            "ffn_gate": "feed_forward.gate",
            "ffn_up": "feed_forward.inner",
            "ffn_down": "feed_forward.output",
        }.items():
            found[f"{blk}.{theirs}.weight"] = state[f"{ours}.{name}.weight"]
    return found


@torch.no_grad()
def decoded(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> float:
    """Seconds behind the first token of an answer of `num_tokens` + 1."""
    times = [time.perf_counter()]
    for length in (1, num_tokens + 1):
        requests = [Request(prompt, GenerationConfig(max_len=length))]
        [[best]] = engine_for(model, Continuation([2], 1024), requests, batch_size=1).answers(requests)
        assert len(best.tokens) == length, "the answer ended early; take another seed"
        times.append(time.perf_counter())
    return (times[2] - times[1]) - (times[1] - times[0])


if __name__ == "__main__":
    raise SystemExit(main())
