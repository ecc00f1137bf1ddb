"""What Prometheus reads of an operator: the runs as their statuses have them, and its own work."""

from prometheus_client.parser import text_string_to_metric_families

from orchestrator.operating.metrics import Metrics, Told
from tests.support.kept import Kept
from tests.support.story import TARGET, a_world

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(metrics: Metrics) -> Samples:
    families = text_string_to_metric_families(metrics.text())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_a_run_is_told_as_its_status_has_it() -> None:
    with a_world() as world:
        kept = Kept(world)
        kept.until(lambda: kept.word == "Completed")
        status = kept.keeper.status
        assert status is not None
        told: list[Told] = [("ns", "demo", status)]
        found = read(Metrics(lambda: told, lambda: 3, lambda: True))
        run = frozenset({("namespace", "ns"), ("run", "demo")})
        assert found["untildone_run_committed_step", run] == found["untildone_run_target_step", run] == TARGET
        assert found["untildone_run_attempt", run] == 4
        assert found["untildone_run_preemptions", run] == 1
        assert found["untildone_run_last_commit_timestamp_seconds", run] > 0
        succeeded = run | {("condition", "Succeeded"), ("reason", "Completed")}
        assert found["untildone_run_condition", succeeded] == 1
        assert len([1 for name, _ in found if name == "untildone_run_condition"]) == 9
        assert found["untildone_operator_leads", frozenset()] == 1
        assert found["untildone_operator_queue", frozenset()] == 3


def test_what_is_not_known_is_not_told_and_work_is_counted() -> None:
    with a_world() as world:
        kept = Kept(world)
        kept.change(targetStep="many")
        kept.visit()
        status = kept.keeper.status
        assert status is not None
        metrics = Metrics(lambda: [("ns", "demo", status)], lambda: 0, lambda: False)
        metrics.visits.observe(0.2)
        metrics.failures.labels("error").inc()
        found = read(metrics)
        assert not [name for name, _ in found if name == "untildone_run_committed_step"]
        assert found["untildone_operator_visit_seconds_count", frozenset()] == 1
        assert found["untildone_operator_failed_visits_total", frozenset({("kind", "error")})] == 1
        assert found["untildone_operator_failed_visits_total", frozenset({("kind", "unavailable")})] == 0
        assert found["untildone_operator_leads", frozenset()] == 0
