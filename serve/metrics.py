"""The server's metrics, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.runtime.request import Request
from outrider.runtime.stats import Load

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Counters, gauges and histograms of one server; `docs/reference/metrics.md` lists them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outrider_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"outrider_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Finished requests, by finish reason", "finish_reason")
        self.http_errors = counter("http_errors", "HTTP requests answered with an error, by status", "status")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.cached = counter(
            "cached_prompt_tokens", "Prompt tokens found in a cache, by slot: the request's own or another", "slot"
        )
        self.evicted = counter("evicted_tokens", "Cached tokens that were overwritten while no other slot held them")
        self._evicted = 0
        self.emitted = counter("generation_tokens", "Generated tokens")
        self.rounds = counter("rounds", "Target passes after the prompt; a batched pass counts once for each request")
        self.drafts = counter("spec_decode_num_drafts", "Target passes that verified draft tokens, by drafter", "drafter")
        self.drafted = counter("spec_decode_num_draft_tokens", "Draft tokens")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Accepted draft tokens, by drafter", "drafter")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens, by position in the draft, from 0", "position"
        )
        self.drafted_last = gauge("spec_decode_k", "Draft tokens of the last round; 0 is plain decoding")
        self.batch = gauge("batch_size", "Requests in the last round")
        self.running = gauge("num_requests_running", "Requests that have a slot")
        self.waiting = gauge("num_requests_waiting", "Requests waiting for a slot")
        self.used = gauge("kv_cache_usage", "Share of the KV cache that is in use, 0 to 1")
        self.remembered = gauge("memory_tokens", "Tokens of earlier requests to draft from")
        self.first = histogram("time_to_first_token_seconds", "Seconds from submission to the first token")
        self.per_token = histogram("time_per_output_token_seconds", "Mean seconds between later tokens", SECONDS_PER_TOKEN)
        self.queued = histogram("request_queue_time_seconds", "Seconds from submission to a slot")
        self.whole = histogram("e2e_request_latency_seconds", "Seconds from submission to the last token")

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self.registry)

    def http_error(self, status: int) -> None:
        """Count an HTTP request that was answered with an error."""
        self.http_errors.labels(str(status)).inc()

    def stepped(self, load: Load) -> None:
        """Record the load after a step."""
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.used.set(load.used)
        self.drafted_last.set(load.drafted)
        self.batch.set(load.batch)
        self.remembered.set(load.remembered)
        self.evicted.inc(load.evicted - self._evicted)
        self._evicted = load.evicted

    def began(self, request: Request, now: float) -> None:
        """Record the first token of a request."""
        assert request.admitted is not None
        self.first.observe(now - request.submitted)
        self.queued.observe(request.admitted - request.submitted)

    def ended(self, request: Request, finish_reason: str, now: float, first_token: float | None = None) -> None:
        """Record the end of a request; `first_token` is the time of its first token."""
        stats = request.stats
        self.requests.labels(finish_reason).inc()
        self.whole.observe(now - request.submitted)
        if first_token is not None and stats.emitted > 1:
            self.per_token.observe((now - first_token) / (stats.emitted - 1))
        for metric, value in (
            (self.prompt_tokens, stats.prompt_tokens),
            (self.cached.labels("own"), stats.cached_tokens - stats.copied_tokens),
            (self.cached.labels("other"), stats.copied_tokens),
            (self.emitted, stats.emitted),
            (self.rounds, stats.rounds),
            (self.drafted, stats.drafted),
        ):
            metric.inc(value)
        for by_drafter, counts in ((self.drafts, stats.rounds_by_drafter), (self.accepted, stats.accepted_by_drafter)):
            for drafter, count in counts.items():
                by_drafter.labels(drafter).inc(count)
        for position, count in enumerate(stats.accepted_at):
            self.accepted_at.labels(str(position)).inc(count)
