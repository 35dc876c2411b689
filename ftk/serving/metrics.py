"""What the service counts and times, in the text form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Of one service; a registry of its own, so that several services in a process do not meet."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def timed(name: str, what: str) -> Histogram:
            return Histogram(f"ftk_{name}_seconds", what, buckets=_SECONDS, registry=registry)

        self.info = Info("ftk", "What answers", registry=registry)
        self.requests = Counter("ftk_requests", "Requests, by route and status", ["route", "status"], registry=registry)
        self.prompt_tokens = Counter("ftk_prompt_tokens", "Tokens of prompts read", registry=registry)
        self.generation_tokens = Counter("ftk_generation_tokens", "Tokens of answers written", registry=registry)
        self.finished = Counter(
            "ftk_requests_finished",
            "Prompts that are answered (stop, length), or not (cancelled, client_left, timeout, error)",
            ["finish_reason"],
            registry=registry,
        )
        self.running = Gauge("ftk_requests_running", "Prompts in rows", registry=registry)
        self.waiting = Gauge("ftk_requests_waiting", "Prompts that wait for a row", registry=registry)
        self.usage = Gauge("ftk_kv_usage_ratio", "Rows in use / rows", registry=registry)
        self.first_token = timed("time_to_first_token", "From a prompt to the end of the step that reads it")
        self.between_tokens = timed("inter_token_latency", "Time per token: the mean over a piece of text")
        self.whole = timed("e2e_request_latency", "From a prompt to its result")
        self.queued = timed("request_queue_time", "From a prompt to its row")
        self.reading = timed("request_prefill_time", "The step that reads a prompt")
        self.decoding = timed("request_decode_time", "From a prompt's first token to its result")
        self.step = timed("step", "A step of the engine")
        self.step_rows = Histogram("ftk_step_rows", "Prompts in rows in a step", buckets=_ROWS, registry=registry)


def text_of(metrics: Mapping[str, Metrics]) -> bytes:
    """The metrics of models by their names; of several each sample has a label with its model."""
    first, *others = metrics.values()
    return generate_latest(_Labelled(metrics) if others else first.registry)


class _Labelled(CollectorRegistry):
    def __init__(self, metrics: Mapping[str, Metrics]) -> None:
        super().__init__()
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model, own in self.metrics.items():
            for family in own.registry.collect():
                if family.name != "ftk_requests":  # which the guard of all models counts
                    family.samples = [
                        sample._replace(labels={**sample.labels, "model": model}) for sample in family.samples
                    ]
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                families[family.name].samples += family.samples
        return families.values()
