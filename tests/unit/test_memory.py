"""What one orchestrator remembers of its observations: what held without a break, and what nobody saw meanwhile."""

from orchestrator.memory import GAP_SECONDS, Memory


def test_a_gap_breaks_what_must_be_seen_without_a_break_and_keeps_what_names_a_value() -> None:
    now = 0.0
    memory = Memory(lambda: now)
    facts = {"fits/0", "gone/1", "stale/x", "beats/1.1/7", "phase/x/Queued/0"}
    memory.note(facts)
    now += GAP_SECONDS - 1
    marks = memory.note(facts)
    assert all(mark.count == 2 and mark.seconds == GAP_SECONDS - 1 for mark in marks.values())
    now += GAP_SECONDS + 1
    marks = memory.note(facts)
    assert {fact for fact, mark in marks.items() if mark.count == 1} == {"fits/0", "gone/1", "stale/x"}
    assert marks["fits/0"].seconds == 0.0
    assert marks["beats/1.1/7"].seconds == 2 * GAP_SECONDS


def test_blindness_does_the_same() -> None:
    now = 0.0
    memory = Memory(lambda: now)
    memory.note({"fits/0", "beats/1.1/7"})
    now += 5
    assert set(memory.note((), ["cluster"])) == {"beats/1.1/7"}
    now += 5
    marks = memory.note({"fits/0", "beats/1.1/7"})
    assert (marks["fits/0"].seconds, marks["beats/1.1/7"].seconds) == (0.0, 10.0)


def test_forgotten_by_the_beginning_of_their_names() -> None:
    memory = Memory(lambda: 0.0)
    memory.note({"fits/0", "fits/1", "gone/1"})
    memory.forget(("fits/",))
    assert {fact: mark.count for fact, mark in memory.note({"fits/0", "gone/1"}).items()} == {"fits/0": 1, "gone/1": 2}
