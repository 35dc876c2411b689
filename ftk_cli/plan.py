"""ftk-plan: memory, messages and time of parallel layouts, estimated before any is run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.config import Chosen, compose, section, slot
from ftk.config.options import option
from ftk.errors import UserError, visible
from ftk.planner.cluster import PRESETS, ClusterConfig
from ftk.planner.plan_config import LimitsConfig, WorkConfig
from ftk.registry import ARCHITECTURES, MODELS, OPTIMIZERS, TASKS
from ftk_cli.command import run

if TYPE_CHECKING:
    from ftk.planner.model_shape import ModelShape

DESCRIPTION = """Ranks the layouts for training a model on a cluster: memory by part, messages by collective, time of an
update. Nothing is run, and no weight exists: the model is built without memory (on the meta device).
Example: ftk-plan --arch glm_10b --global-batch-size 1024 --cluster h100-80g --gpus 64"""


@dataclass(kw_only=True)
class OutputConfig:
    top: int = option(10, "number of plans to show", daily=True, min=1, unit="plans")
    all: bool = option(False, "list all that fit, not only the best for each T, P, S and R")
    json: bool = option(False, "print one JSON object: bytes, seconds, counts", daily=True)
    user_dir: str | None = option(None, "your package, folder or file that registers models", metavar="PATH")


@dataclass(kw_only=True)
class PlanRoot:
    RARE = ("optimizer.lr",)  # the optimizer is here for its states alone

    model: Chosen = slot(
        MODELS, flag="--arch", architectures=ARCHITECTURES, help="architecture of the model", short="-a"
    )
    optimizer: Chosen = slot(OPTIMIZERS, flag="--optimizer", default="adamw", help="optimizer, or torch.optim.CLASS")
    work: WorkConfig = section("update")
    cluster: ClusterConfig = section("cluster")
    limits: LimitsConfig = section("layouts")
    output: OutputConfig = section("output")

    def validate(self) -> Iterator[str]:
        if self.work.precision == "bf16" and not PRESETS[self.cluster.cluster].has_bf16:
            yield f"precision is bf16, which {self.cluster.cluster} does not compute in; give --precision fp16"


def main(argv: Sequence[str] | None = None) -> int:
    return run("ftk-plan", body, argv)


def body(argv: list[str]) -> int:
    root = compose(PlanRoot, "ftk-plan", DESCRIPTION, argv)

    from ftk.planner import report
    from ftk.planner.search import check_sizes, search

    if root.work.vocab_size is not None:
        root.model.config.vocab_size = root.work.vocab_size
    shape = shape_of(root.model)
    state_bytes = getattr(root.optimizer.config, "state_bytes", 8.0)
    if root.work.target_length is not None and not shape.encoder_layers:
        raise UserError("--target-length is for encoder-decoders, and this model has one stack; give --seq-length")
    target = (
        _usual_target_length(root.model, root.work.seq_length or shape.max_positions) if shape.encoder_layers else 0
    )
    work = root.work.build(shape.max_positions, state_bytes, _usual_loss_share(root.model), target)
    limit = getattr(root.model.config, "position_limit", shape.max_positions)
    for flag, tokens in (("--seq-length", work.num_tokens), ("--target-length", work.decoder_tokens)):
        if limit is not None and tokens > limit:
            raise UserError(
                f"{flag} {tokens} is more than the {limit} positions of the model; give --max-positions too"
            )
    cluster, gpus = root.cluster.build(), root.cluster.gpus
    check_sizes(gpus, root.limits)
    found = search(shape, work, cluster, gpus, root.limits, root.work.matmul_efficiency)
    question = report.Question(_name(root.model), shape, work, cluster, gpus, root.optimizer.name)
    if root.output.json:
        print(json.dumps(report.tree(question, found, root.output.top, root.output.all)))
    else:
        print(visible(report.text(question, found, root.output.top, root.output.all)))
    return 0 if found.plans else 1


def _usual_loss_share(model: Chosen) -> float:
    """Of the places of a batch of the model's usual task, those that carry loss."""
    if model.entry.task is None:
        return 1.0
    entry = TASKS.get(model.entry.task)
    share: float = entry.target.loss_share(None if entry.config is None else entry.config())  # type: ignore[attr-defined]
    return share


def _usual_target_length(model: Chosen, seq_length: int) -> int:
    """What the decoder reads of a sample of the model's usual task, where the encoder reads `seq_length` tokens."""
    from ftk.tasks.encoder_decoder import both_lengths

    if model.entry.task is None:
        return seq_length
    entry = TASKS.get(model.entry.task)
    config: Any = None if entry.config is None else entry.config()
    if hasattr(config, "seq_length"):
        config = dataclasses.replace(config, seq_length=seq_length)
    lengths = both_lengths(entry.target, config)  # type: ignore[arg-type]  # tasks are classes
    return seq_length if lengths is None else lengths[1]


def _name(model: Chosen) -> str:
    """The architecture, with the values that were given on the command line."""
    if model.arch is None:
        return model.name
    preset = dataclasses.asdict(ARCHITECTURES.get(model.arch).target())
    changed = {key: value for key, value in dataclasses.asdict(model.config).items() if value != preset[key]}
    return model.arch + (f" ({', '.join(f'{key} {value}' for key, value in changed.items())})" if changed else "")


def shape_of(model: Chosen) -> ModelShape:
    """Names and shapes of a model that is built on the meta device."""
    import torch

    from ftk.planner.model_shape import model_shape

    with torch.device("meta"):
        return model_shape(model.build(), model.config)


if __name__ == "__main__":
    raise SystemExit(main())
