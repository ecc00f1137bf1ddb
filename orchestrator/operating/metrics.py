"""/metrics for Prometheus: of each run what its status says, and of the operator's own work how much and how long.

Only the replica that works has runs to tell of; so a sum over replicas counts each once.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.status_model import RunStatus

Told = tuple[str, str, RunStatus]  # namespace, name, status
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VISIT_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# Name, what it is, attribute of the status.
NUMBERS = (
    ("step", "last completed step", "step"),
    ("committed_step", "the step that a resumed run continues from", "committed_step"),
    ("target_step", "the run is done when this step is committed", "target_step"),
    ("attempt", "submissions so far", "attempt"),
    ("start", "starts of the current attempt so far", "start"),
    ("preemptions", "endings because the machines were taken back, in the whole ledger", "preemptions"),
    ("per_device_batch", "instances per device and step", "per_device_batch"),
)


class Metrics:
    """What one operator process has to tell."""

    def __init__(
        self, runs: Callable[[], Iterable[Told]], waiting: Callable[[], int], leads: Callable[[], bool]
    ) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._registry.register(_Runs(runs, waiting, leads))
        self.visits = Histogram(
            "untildone_operator_visit_seconds",
            "how long one look at a run took, with its act",
            buckets=VISIT_SECONDS,
            registry=self._registry,
        )
        self.waited = Histogram(
            "untildone_operator_waited_seconds",
            "how long a run that wanted a look waited for a worker",
            buckets=VISIT_SECONDS,
            registry=self._registry,
        )
        self.failures = Counter(
            "untildone_operator_failed_visits",
            "looks that ended without an answer (unavailable) or with an unforeseen error (error)",
            ["kind"],
            registry=self._registry,
        )
        for kind in ("unavailable", "error"):
            self.failures.labels(kind)

    def text(self) -> str:
        """In Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _Runs(Collector):
    def __init__(
        self, runs: Callable[[], Iterable[Told]], waiting: Callable[[], int], leads: Callable[[], bool]
    ) -> None:
        self._runs, self._waiting, self._leads = runs, waiting, leads

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is asked when it is registered

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("untildone_operator_leads", "1 on the replica that works", value=int(self._leads()))
        yield GaugeMetricFamily("untildone_operator_queue", "runs that wait for a worker", value=self._waiting())
        run = ["namespace", "run"]
        numbers = [(GaugeMetricFamily(f"untildone_run_{n}", text, labels=run), at) for n, text, at in NUMBERS]
        last = GaugeMetricFamily(
            "untildone_run_last_commit_timestamp_seconds", "when the last commit was seen", labels=run
        )
        said = GaugeMetricFamily("untildone_run_condition", "1: it holds", labels=[*run, "condition", "reason"])
        for namespace, name, status in self._runs():
            for family, attribute in numbers:
                value = getattr(status, attribute)
                if value is not None:
                    family.add_metric([namespace, name], value)
            if status.last_commit_time is not None:
                last.add_metric([namespace, name], status.last_commit_time.timestamp())
            for condition in status.conditions:
                truth = {"True": 1.0, "False": 0.0}.get(condition.status, float("nan"))
                said.add_metric([namespace, name, condition.type, condition.reason], truth)
        yield from (family for family, _ in numbers)
        yield last
        yield said
