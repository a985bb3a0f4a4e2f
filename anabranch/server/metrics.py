"""Prometheus metrics: latencies of answers counted here, everything else read from the engine when it is asked for.

Names are vLLM's with our prefix, so that a dashboard ports by a rename.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "anabranch:"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_GAUGES = (
    ("num_requests_running", "running", "Answers being computed."),
    ("num_requests_waiting", "waiting", "Answers that wait for a slot."),
    ("state_slots_used", "slots_used", "Recurrent-state slots in use."),
    ("state_slots_total", "slots_total", "Recurrent-state slots there are."),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of all requests."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
    ("num_preemptions", "preemptions", "Requests that gave their memory back and started again."),
    ("nonfinite_logits", "nonfinite", "Requests ended by a logit that was not finite."),
)
_LABELLED = (
    ("request_success", "finished", "finished_reason", "Answers that ended, by reason."),
    ("graph_replays", "graph_replays", "size", "Steps replayed from a captured graph, by its size."),
    ("eager_steps", "eager_steps", "reason", "Steps run without a graph, by reason."),
)


class Measured(Protocol):
    """What the metrics need of the engine: its counters, and the chosen path and reason of each fusion."""

    def stats(self) -> Mapping[str, Any]: ...

    def fusions(self) -> Mapping[str, tuple[str, str]]: ...


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str, engine: Measured) -> None:
        self.registry, labels = CollectorRegistry(), ("model_name",)

        def histogram(name: str, help_text: str) -> Histogram:
            metric = Histogram(PREFIX + name, help_text, labels, registry=self.registry, buckets=_SECONDS)
            return metric.labels(model_name)

        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between tokens; tokens that came together share their time."
        )
        self.queue = histogram("request_queue_time_seconds", "From arrival to the first step that computes.")
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.")
        self._collector = _EngineCollector(model_name, engine)
        self.registry.register(self._collector)

    def text(self, expert_load: Mapping[str, Any] | None = None) -> bytes:
        """The exposition format; with what experts were given, as in `/server_info`, where that is counted."""
        self._collector.expert_load = expert_load
        return generate_latest(self.registry)


class Stopwatch:
    """Times one answer, token by token."""

    def __init__(self, metrics: Metrics, now: float) -> None:
        self._metrics, self._arrived = metrics, now
        self._last: float | None = None

    def queued(self, seconds: float | None) -> None:
        """How long the answer waited, when that becomes known."""
        if seconds is not None:
            self._metrics.queue.observe(seconds)

    def tokens(self, count: int, now: float) -> None:
        """`count` tokens became known together."""
        if not count:
            return
        if self._last is None:
            self._metrics.first_token.observe(now - self._arrived)
        else:
            for _ in range(count):
                self._metrics.inter_token.observe((now - self._last) / count)
        self._last = now

    def end(self, now: float) -> None:
        """The answer is complete."""
        self._metrics.whole.observe(now - self._arrived)


class _EngineCollector(Collector):
    def __init__(self, model_name: str, engine: Measured) -> None:
        self._model, self._engine = model_name, engine
        self.expert_load: Mapping[str, Any] | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, key, help_text in _GAUGES:
            yield self._gauge(name, help_text, stats[key])
        used = stats["pages_used"] / max(1, stats["pages_total"])
        yield self._gauge("kv_cache_usage_perc", "Share of latent pages in use, 0 to 1.", used)
        for name, key, help_text in _COUNTERS:
            family = CounterMetricFamily(PREFIX + name, help_text, labels=("model_name",))
            family.add_metric((self._model,), stats[key])
            yield family
        for name, key, label, help_text in _LABELLED:
            family = CounterMetricFamily(PREFIX + name, help_text, labels=("model_name", label))
            for value, count in stats[key].items():
                family.add_metric((self._model, str(value)), count)
            yield family
        yield self._fusions()
        if self.expert_load is not None:
            yield from self._experts(self.expert_load)

    def _experts(self, load: Mapping[str, Any]) -> Iterator[Metric]:
        """By layer and by expert group: a series for each expert of each layer would be thousands."""
        for label, name, given in (
            ("layer", "expert", {layer: sum(counts) for layer, counts in load["tokens"].items()}),
            ("ep_rank", "ep_rank", dict(enumerate(load["by_ep_rank"]))),
        ):
            help_text = f"Tokens given to routed experts, once for each expert chosen, by {label}."
            family = CounterMetricFamily(f"{PREFIX}{name}_tokens", help_text, labels=("model_name", label))
            for value, count in given.items():
                family.add_metric((self._model, str(value)), count)
            yield family
        help_text = "Tokens of a layer's busiest expert over those of its average one."
        family = GaugeMetricFamily(PREFIX + "expert_imbalance", help_text, labels=("model_name", "layer"))
        for layer, counts in load["tokens"].items():
            if sum(counts):
                family.add_metric((self._model, layer), max(counts) * len(counts) / sum(counts))
        yield family
        if load["imbalance"] is not None:
            help_text = "Tokens of the busiest expert group over those of the average one."
            yield self._gauge("ep_rank_imbalance", help_text, load["imbalance"])

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _fusions(self) -> GaugeMetricFamily:
        labels = ("model_name", "name", "path", "reason")
        family = GaugeMetricFamily(PREFIX + "fusion_active", "1 for the projection path in use.", labels=labels)
        for name, (path, reason) in self._engine.fusions().items():
            family.add_metric((self._model, name, path, reason), 1)
        return family
