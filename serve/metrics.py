"""What `/metrics` says, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.runtime.scheduler import Job, Load

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Counters, gauges and histograms of one server; `docs/serve.md` lists them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outrider_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"outrider_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests that ended, by how", "finish_reason")
        self.refused = counter("http_errors", "Requests that were answered with an error, by status", "status")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.cached = counter("cached_prompt_tokens", "Of these, those that a cache held from an answer before")
        self.emitted = counter("generation_tokens", "Tokens that went out")
        self.rounds = counter("rounds", "Passes of the target after the prompts'; of several requests together once for each")
        self.drafts = counter("spec_decode_num_drafts", "Of these, those that checked drafted tokens")
        self.drafted = counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Those, by their place in the round, from 0", "position"
        )
        self.k = gauge("spec_decode_k", "Drafted tokens of the last round; 0 is plain decoding")
        self.batch = gauge("batch_size", "Requests that took part in the last round")
        self.running = gauge("num_requests_running", "Requests that have a slot")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for one")
        self.used = gauge("kv_cache_usage", "Share of the caches' positions that is in use, 0 to 1")
        self.first = histogram("time_to_first_token_seconds", "From a request to its first token")
        self.per_token = histogram("time_per_output_token_seconds", "Mean between later tokens", SECONDS_PER_TOKEN)
        self.queued = histogram("request_queue_time_seconds", "From a request to its slot")
        self.whole = histogram("e2e_request_latency_seconds", "From a request to its last token")

    def stepped(self, load: Load) -> None:
        """After a step."""
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.used.set(load.used)
        self.k.set(load.k)
        self.batch.set(load.batch)

    def began(self, job: Job, now: float) -> None:
        """A request's first token came."""
        assert job.admitted is not None
        self.first.observe(now - job.submitted)
        self.queued.observe(job.admitted - job.submitted)

    def ended(self, job: Job, finish_reason: str, now: float, first: float | None = None) -> None:
        """A request is over; `first` is when its first token came."""
        stats = job.answer.stats
        self.requests.labels(finish_reason).inc()
        self.whole.observe(now - job.submitted)
        if first is not None and stats.emitted > 1:
            self.per_token.observe((now - first) / (stats.emitted - 1))
        for metric, value in (
            (self.prompt_tokens, stats.prompt_tokens),
            (self.cached, stats.cached_tokens),
            (self.emitted, stats.emitted),
            (self.rounds, stats.rounds),
            (self.drafts, stats.drafting_rounds),
            (self.drafted, stats.drafted),
            (self.accepted, stats.accepted),
        ):
            metric.inc(value)
        for position, count in enumerate(stats.accepted_at):
            self.accepted_at.labels(str(position)).inc(count)
