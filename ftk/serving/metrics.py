"""What the service counts and times, in the text form of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Of one service; a registry of its own, so that several services in a process do not meet."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("ftk_requests", "Requests, by route and status", ["route", "status"], registry=registry)
        self.prompt_tokens = Counter("ftk_prompt_tokens", "Tokens of prompts read", registry=registry)
        self.generation_tokens = Counter("ftk_generation_tokens", "Tokens of answers written", registry=registry)
        self.cancelled = Counter("ftk_cancelled", "Prompts dropped", ["reason"], registry=registry)
        self.running = Gauge("ftk_requests_running", "Prompts in rows", registry=registry)
        self.waiting = Gauge("ftk_requests_waiting", "Prompts that wait for a row", registry=registry)
        self.usage = Gauge("ftk_kv_usage_ratio", "Rows in use / rows", registry=registry)
        self.first_token = Histogram(
            "ftk_time_to_first_token_seconds", "From a prompt to its first text", buckets=_SECONDS, registry=registry
        )
        self.between_tokens = Histogram(
            "ftk_inter_token_latency_seconds", "Between two pieces of text", buckets=_SECONDS, registry=registry
        )
        self.whole = Histogram(
            "ftk_e2e_request_latency_seconds", "From a prompt to its result", buckets=_SECONDS, registry=registry
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
