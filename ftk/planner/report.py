"""What ftk-plan prints: plans side by side, one in detail, why others cannot be; as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftk.errors import counted
from ftk.planner.cluster import GIB, Cluster
from ftk.planner.communication import Traffic
from ftk.planner.layout import Layout, Workload
from ftk.planner.model_shape import ModelShape
from ftk.planner.search import Plan, SearchResult, best_of_each_mesh, messages
from ftk.planner.step_time import LAUNCHES_SECONDS, ring
from ftk.terminal import in_columns

NUMBERS_SHOWN = 8
NOT_PLANNED = (
    "--cpu-offload",
    "--pipeline-layers",
    "--gradient-compression",
    "--weights",
    "--reduce-dtype",
    "--prefetch-blocks",
    "--compile",
)
"""Flags of ftk-train that change memory, messages or time, and that plans ignore."""

MEMORY_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "average": "moving average",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "buffers": "gathered weights, messages",
    "received": "received hidden states",
}
TIME_PARTS = {
    "compute": "matrix products",
    "elementwise": "norms, activations, dropout",
    "tensor": "tensor parallel messages",
    "pipeline": "pipeline messages",
    "data": "data parallel messages not hidden",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class Question:
    """The question."""

    name: str  # of the architecture
    shape: ModelShape
    work: Workload
    cluster: Cluster
    gpus: int
    optimizer: str


def text(question: Question, found: SearchResult, top: int, show_all: bool) -> str:
    """Three parts: the question, the plans with the first one in detail, what was left out.

    Args:
        top: number of plans to show.
        show_all: all layouts, not only the best one of each mesh.
    """
    lines = [*_question_lines(question), ""]
    plans = found.plans if show_all else best_of_each_mesh(found.plans)
    if plans:
        lines += [*in_columns(_plan_rows(plans[:top], question)), ""]
        if len(plans) > top:
            lines += [f"and {len(plans) - top} more (--top)", ""]
        lines += [*_detail(plans[0], question), ""]
    else:
        lines += [*_nothing_fits(found, question.work), ""]
    lines += [*_refused_lines(found), f"Assumed at their defaults: {', '.join(NOT_PLANNED)}."]
    return "\n".join(lines).rstrip()


def tree(question: Question, found: SearchResult, top: int, show_all: bool) -> dict[str, Any]:
    """The same for programs: bytes, seconds, counts."""
    shape, cluster = question.shape, question.cluster
    plans = found.plans if show_all else best_of_each_mesh(found.plans)
    return {
        "model": {
            "name": question.name,
            "parameters": shape.num_parameters,
            "num_layers": shape.num_layers,
            "encoder_layers": shape.encoder_layers,
            "hidden_size": shape.hidden_size,
            "num_attention_heads": shape.num_attention_heads,
            "inner_size": shape.inner_size,
            "vocab_size": shape.vocab_size,
        },
        "work": asdict(question.work) | {"optimizer": question.optimizer},
        "cluster": asdict(cluster) | {"gpus": question.gpus},
        "feasible": len(found.plans),
        "plans": [_plan_tree(plan, question) for plan in plans[:top]],
        "not_planned": list(NOT_PLANNED),
        "refused": {reason: numbers.total() for reason, numbers in found.refused.items()},
    }


# -- text ---------------------------------------------------------------------------------------------------------


def _question_lines(question: Question) -> Iterator[str]:
    shape, work, cluster = question.shape, question.work, question.cluster
    yield f"model    {question.name}"
    decoder_layers = shape.num_layers - shape.encoder_layers
    layers = f"{shape.encoder_layers} + {decoder_layers}" if shape.encoder_layers else f"{shape.num_layers}"
    yield (
        f"         {shape.num_parameters:,} parameters; {layers} layers, hidden "
        f"{shape.hidden_size}, inner {shape.inner_size}, {shape.num_attention_heads} heads, {shape.vocab_size} tokens"
    )
    tokens, with_loss = f"{work.num_tokens:,} tokens", f"{work.loss_share:.0%} with loss"
    if work.decoder_tokens:
        tokens = f"{work.num_tokens:,} tokens for the encoder and {work.decoder_tokens:,} for the decoder"
        with_loss = f"{work.loss_share:.0%} of the decoder's with loss"
    yield (
        f"update   {counted(work.global_batch, 'sample', ',')} of {tokens}, in all "
        f"{work.global_batch * (work.num_tokens + work.decoder_tokens):,} tokens, {with_loss}; {work.precision}, "
        f"{question.optimizer}"
    )
    yield (
        f"cluster  {question.gpus:,} {cluster.name}, {cluster.gpus_per_node} a node; of each "
        f"{cluster.memory_bytes / GIB:.1f} GiB to use, {cluster.flops(work.precision) / 1e12:.0f} TFLOP/s, "
        f"{cluster.node_bandwidth / 1e9:g} GB/s in the node, {cluster.network_bandwidth / 1e9:g} GB/s between nodes"
    )


def _plan_rows(plans: Sequence[Plan], question: Question) -> Iterator[list[str]]:
    measures = ["batch", "GiB", "step s", "MFU", "tokens/s/GPU", "waiting"]
    yield ["T", "P", "S", "R", "SP", "ZeRO", "checkpointing", *measures]
    for plan in plans:
        layout, time = plan.layout, plan.time
        waiting = (time.tensor + time.pipeline + time.data + time.bubble) / time.total
        yield [
            *map(str, (layout.tensor, layout.pipeline, layout.shard, layout.replicate)),
            "yes" if layout.sequence_parallel else "-",
            str(layout.zero_stage) if layout.shard > 1 else "-",
            layout.checkpointing,
            f"{layout.batch_size} x {layout.micro_batches(question.work.global_batch)}",
            f"{plan.memory.total / GIB:.1f}",
            f"{time.total:.3g}",
            f"{time.mfu:.1%}",
            f"{time.tokens_per_second / layout.world:,.0f}",
            f"{waiting:.0%}",
        ]


def _detail(plan: Plan, question: Question) -> Iterator[str]:
    yield "The first of them:"
    layout = plan.layout
    yield f"  {layout.flags(question.work)}"
    yield ""
    rows = [["memory of a process", "GiB"]]
    rows += [
        [MEMORY_PARTS[name], f"{value / GIB:.2f}"]
        for name, value in plan.memory.parts().items()
        if value or name not in ("average", "received")
    ]
    yield from in_columns([*rows, ["in all", f"{plan.memory.total / GIB:.2f}"]])
    yield ""
    yield from in_columns(_message_rows(messages(plan, question.shape, question.work), layout))
    yield ""
    rows = [["time of an update", "s", "share"]]
    for name, value in plan.time.parts.items():
        rows.append([TIME_PARTS[name], f"{value:.3f}", f"{value / plan.time.total:.1%}"])
    yield from in_columns([*rows, ["in all", f"{plan.time.total:.3f}", f"MFU {plan.time.mfu:.1%}"]])
    yield ""
    yield (
        "Times are estimates, never compared with a cluster. A layer of a micro-batch takes at least "
        f"{LAUNCHES_SECONDS * 1e3:g} ms: a guess at what starting its kernels takes."
    )


def _message_rows(found: Sequence[Traffic], layout: Layout) -> Iterator[list[str]]:
    yield ["messages of an update and process", "collective", "of", "times", "MiB each", "GiB in all", "GiB sent"]
    for traffic in found:
        size, _ = ring(traffic.dimension, layout)
        is_regathered = traffic.when == "backward" and traffic.what.startswith("parameters")
        yield [
            f"{traffic.what}, backward" if is_regathered else traffic.what,
            traffic.collective,
            f"{size} {traffic.dimension}",
            str(traffic.count),
            f"{traffic.message_bytes / 2**20:.2f}",
            f"{traffic.total_bytes / GIB:.2f}",
            f"{traffic.sent_bytes(size) / GIB:.2f}",
        ]


def _nothing_fits(found: SearchResult, work: Workload) -> Iterator[str]:
    if found.smallest is None:  # memory is not the matter
        if found.refused:
            yield f"Nothing is possible with {work.global_batch:,} samples per update, for the reasons below."
        else:
            yield "Nothing is possible: the sizes given leave more GPUs than the model has heads or layers for."
        return
    layout, needed = found.smallest
    yield "Nothing fits."
    yield f"The least memory: {needed.total / GIB:.1f} GiB by {layout.flags(work)}"
    yield "  " + ", ".join(f"{MEMORY_PARTS[name]} {value / GIB:.1f}" for name, value in needed.parts().items() if value)


def _refused_lines(found: SearchResult) -> Iterator[str]:
    if not found.refused:
        return
    totals = {reason: numbers.total() for reason, numbers in found.refused.items()}
    yield f"Left out of {sum(totals.values()) + len(found.plans):,} combinations:"
    for reason, total in sorted(totals.items(), key=lambda item: -item[1]):
        numbers = [text for text in found.refused[reason] if text]
        shown = ", ".join(numbers[:NUMBERS_SHOWN]) + (", ..." if len(numbers) > NUMBERS_SHOWN else "")
        yield f"  {total:>6,}  {reason}" + (f": {shown}" if shown else "")


# -- JSON ---------------------------------------------------------------------------------------------------------


def _plan_tree(plan: Plan, question: Question) -> dict[str, Any]:
    layout = plan.layout
    return {
        "layout": asdict(layout) | {"micro_batches": layout.micro_batches(question.work.global_batch)},
        "flags": layout.flags(question.work),
        "memory_bytes": plan.memory.parts() | {"total": plan.memory.total},
        "messages": [
            asdict(message)
            | {"total_bytes": message.total_bytes, "sent_bytes": message.sent_bytes(ring(message.dimension, layout)[0])}
            for message in messages(plan, question.shape, question.work)
        ],
        "seconds": plan.time.parts | {"total": plan.time.total},
        "mfu": plan.time.mfu,
        "tokens_per_second": plan.time.tokens_per_second,
    }
