"""Budgets and pauses: counted from the ledger, full again after each commit, the same however often one asks."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api import Backoff, Budgets
from orchestrator.budgets import NO_NEW_COMMIT, account, pause, spent
from trainer.rundir.records import Ending, Evidence

FREE = ("preempted", "maintenance", "plan-change", "completed")
COUNTED = ("host-failure", "hang", "storage", "application-error", "unknown", "gone")


def ledger(*entries: tuple[str, int] | tuple[str, int, bool]) -> list[Ending]:
    """Entries (cause, committed step, charged): one attempt each."""
    made = []
    for attempt, (cause, step, *charged) in enumerate(entries, start=1):
        made.append(
            Ending.model_validate(
                {
                    "attempt": attempt,
                    "start": 1,
                    "index": 1,
                    "key": f"k{attempt}",
                    "cause": cause,
                    "evidence": [Evidence(source="s", field="f", value="v")],
                    "charged": charged[0] if charged else cause not in FREE,
                    "last_committed_step": step,
                }
            )
        )
    return made


def test_bad_configuration_ends_a_run_at_once() -> None:
    out = spent(ledger(("bad-configuration", 0)), 0, Budgets())
    assert out is not None
    assert (out.cause, out.count, out.limit) == ("bad-configuration", 1, 0)


def test_three_application_errors_are_tolerated_and_a_fourth_is_not() -> None:
    three = ledger(*[("application-error", 0)] * 3)
    assert spent(three, 0, Budgets()) is None
    four = ledger(*[("application-error", 0)] * 4)
    out = spent(four, 0, Budgets())
    assert out is not None
    assert out.cause == "application-error"


def test_a_new_commit_fills_the_budgets_again() -> None:
    entries = ledger(*[("application-error", 0)] * 3, ("application-error", 8), *[("application-error", 8)] * 2)
    assert spent(entries, 8, Budgets()) is None
    assert account(entries, 8).charged == {"application-error": 3}
    assert account(entries, 12).charged == {}, "a commit after the last ending counts too"


def test_the_same_step_again_is_no_progress() -> None:
    entries = ledger(("application-error", 8), *[("application-error", 8)] * 3)
    assert spent(entries, 8, Budgets()) is not None


def test_without_commits_many_different_causes_end_the_run() -> None:
    entries = ledger(*[("host-failure", 0), ("hang", 0)] * 5)
    out = spent(entries, 0, Budgets())
    assert out is not None
    assert (out.cause, out.count) == (NO_NEW_COMMIT, 10)


def test_what_nobody_saw_costs_no_budget_but_counts_as_no_new_commit() -> None:
    entries = ledger(*[("unknown-while-absent", 0, False)] * 10)
    assert account(entries, 0).charged == {}
    out = spent(entries, 0, Budgets())
    assert out is not None
    assert out.cause == NO_NEW_COMMIT


def test_a_store_that_is_away_has_its_own_budget_only() -> None:
    assert spent(ledger(*[("storage", 0)] * 15), 0, Budgets()) is None
    assert spent(ledger(*[("storage", 0)] * 21), 0, Budgets()) is not None


@given(st.lists(st.sampled_from(FREE), max_size=200))
def test_preemptions_and_moves_never_end_a_run(causes) -> None:
    entries = ledger(*[(cause, 0) for cause in causes])
    assert spent(entries, 0, Budgets()) is None
    assert not account(entries, 0).needs_pause


@given(st.lists(st.tuples(st.sampled_from(COUNTED + FREE), st.integers(0, 5)), max_size=30))
def test_one_ending_is_charged_once_and_the_order_of_reading_does_not_matter(pairs) -> None:
    step, entries = 0, []
    for cause, advance in pairs:
        step += advance
        entries.append((cause, step))
    made = ledger(*entries)
    again = [*reversed(made), *made]
    assert account(again, step).charged == account(made, step).charged
    twins = [*made, *(e.model_copy(update={"key": f"other-{e.key}", "index": 2}) for e in made)]
    assert account(twins, step).charged == account(made, step).charged, "one start, two keys"


@given(st.integers(0, 100), st.integers(0, 1000), st.floats(0, 1), st.floats(0.1, 100), st.floats(100, 1000))
def test_the_pause_is_bounded_and_the_same_each_time(failures, seed, jitter, initial, longest) -> None:
    backoff = Backoff.model_validate({"initial": initial, "max": longest, "jitter": jitter})
    seconds = pause(backoff, failures, "demo", seed)
    assert seconds == pause(backoff, failures, "demo", seed)
    assert 0 <= seconds <= longest
    full = min(longest, initial * 2.0 ** max(failures - 1, 0))
    assert seconds <= full
    assert seconds >= full * (1 - jitter) - 1e-9 if failures else seconds == 0


def test_pauses_double_and_runs_do_not_return_together() -> None:
    exact = Backoff.model_validate({"initial": 5, "max": 300, "jitter": 0})
    assert [pause(exact, n, "demo", 1) for n in (0, 1, 2, 3, 10)] == [0, 5, 10, 20, 300]
    jittered = Backoff.model_validate({"initial": 5, "max": 300, "jitter": 0.5})
    assert len({pause(jittered, 4, f"run-{n}", 1) for n in range(20)}) == 20


def test_going_on_after_a_suspension_that_was_asked_for_waits_for_nothing() -> None:
    assert not account(ledger(("deactivated", 5, False)), 5).needs_pause
    assert account(ledger(("deactivated", 5, False)), 5).failures == 0
    assert account(ledger(("deactivated", 5, True)), 5).needs_pause
