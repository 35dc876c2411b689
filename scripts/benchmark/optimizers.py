"""What a step of each optimizer costs: milliseconds, and bytes of state per parameter.

    python scripts/benchmark/optimizers.py
    python scripts/benchmark/optimizers.py --layers 12 --hidden 768 --json out.json

The weights are those of a GLM, the gradients random; forward and backward passes are not made. All optimizers take
turns, --rounds times --steps steps each; the figure is the best round's mean, the ratio that to the best of AdamW.
`torch adafactor` and `torch muon` are those of torch.optim, for comparison, the latter with AdamW for the rest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import nn

from ftk.models import build_model
from ftk.optim.base import step_unless
from ftk.optim.joined import JoinedOptimizer
from ftk.optim.parameter_groups import parameter_groups
from ftk.registry import OPTIMIZERS

OPTIONS = {"sgd": {"momentum": 0.9}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=30592)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    sizes = {"num_layers": arguments.layers, "hidden_size": arguments.hidden, "vocab_size": arguments.vocab_size}
    model = build_model("glm_tiny", **sizes, num_attention_heads=arguments.heads).to(arguments.device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    numbers = sum(parameter.numel() for parameter in model.parameters())

    optimizers = {name: build(name, model) for name in OPTIMIZERS.names()} | torchs(model)
    best = dict.fromkeys(optimizers, float("inf"))
    for _ in range(arguments.rounds):
        for name, optimizer in optimizers.items():
            best[name] = min(best[name], seconds(optimizer, arguments.steps, arguments.device))
    print(f"{numbers / 1e6:.1f} M parameters on {arguments.device}, {torch.get_num_threads()} threads")
    print(f"{'optimizer':<16}{'ms':>9}{'of adamw':>10}{'state, bytes per parameter':>28}")
    rows = []
    for name, optimizer in sorted(optimizers.items(), key=lambda item: best[item[0]]):
        state = sum(t.nbytes for entries in optimizer.state.values() for t in entries.values()) / numbers
        rows.append({"optimizer": name, "seconds": best[name], "state_bytes_per_parameter": state})
        print(f"{name:<16}{1e3 * best[name]:>9.1f}{best[name] / best['adamw']:>10.2f}{state:>28.2f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as stream:
            json.dump({"parameters": numbers, "device": arguments.device, "rows": rows}, stream, indent=2)


def build(name: str, model: nn.Module) -> torch.optim.Optimizer:
    entry = OPTIMIZERS.get(name)
    config = entry.config(lr=1e-6, **OPTIONS.get(name, {}))
    return entry.target(config, param_groups=parameter_groups(model, config.weight_decay))


def torchs(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    parameters = list(model.parameters())
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
    return {
        "torch adafactor": torch.optim.Adafactor(parameters, lr=1e-6),
        "torch muon": JoinedOptimizer([torch.optim.Muon(hidden, lr=1e-6), torch.optim.AdamW(rest, 1e-6, fused=True)]),
    }


def seconds(optimizer: torch.optim.Optimizer, steps: int, device: str) -> float:
    """Mean time of a step; one more before warms up."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    no = torch.zeros((), dtype=torch.bool, device=device)
    step_unless(optimizer, no)
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step_unless(optimizer, no)
    wait()
    return (time.perf_counter() - start) / steps


if __name__ == "__main__":
    main()
