"""Status words and the answer of `explain`: one screen, with evidence, next action, its time and the budgets left."""

import json

import pytest

from orchestrator.decisions import Act, GiveUp
from orchestrator.explain import Explanation, explanation, render, status_line, status_word
from orchestrator.lifecycle import decide
from orchestrator.memory import Memory
from orchestrator.observation import CLUSTER, Observation
from orchestrator.observe import read_observation
from tests.support.world import TARGET, World, run_of
from tests.unit.test_lifecycle import ENDED, NOW, RUN, ending, gang, head, look, spec, view
from trainer.rundir.records import Evidence


def explained(o: Observation) -> Explanation:
    return explanation(RUN, o, decide(RUN, o, NOW), NOW)


QUEUED = look(
    view=view(gang("Queued", 1, ENDED, queued_since=100.0, message="waits for quota"), quota=0),
    endings=(ending("preempted", key="uid-1/adm-1", charged=False),),
)
FAILED = look(view=view(gang("Failed", 1, ENDED)), endings=(ending(key="uid-1/adm-1"),))


@pytest.mark.parametrize(
    ("o", "word"),
    [
        (look(), "Training"),
        (look(unknown={CLUSTER: "timeout"}), "TruthUnknown"),
        (look(refusals=("no",)), "Refused"),
        (QUEUED, "Preempted"),
        (FAILED, "BackingOff"),
        (look(next_spec=spec(2, 1), answered=True), "Switching"),
        (
            look(head=head(TARGET), view=view(gang("Succeeded", 1, ENDED)), endings=(ending(key="uid-1/adm-1"),)),
            "Completed",
        ),
        (
            look(view=view(gang("Failed", 1, ENDED)), endings=(ending("bad-configuration", key="uid-1/adm-1"),)),
            "BudgetExhausted",
        ),
    ],
)
def test_status_words(o: Observation, word: str) -> None:
    e = explained(o)
    assert e.status == word
    assert status_word(RUN, o, decide(RUN, o, NOW)) == word
    assert status_line(e).startswith(f"demo {word} ")


def test_a_waiting_run_says_since_when_why_and_what_comes_next() -> None:
    e = explained(QUEUED)
    assert e.since == 100.0
    assert "8 cpu devices" in e.what
    assert "waits for quota" in e.what
    assert e.next_at == NOW + 20
    assert e.evidence[0].source == "pod demo-a1-0"
    assert e.last_ending is not None
    assert e.last_ending.cause == "preempted"


def test_budgets_left_are_counted_since_the_last_commit() -> None:
    lines = {line.cause: line for line in explained(FAILED).budgets}
    assert (lines["application-error"].used, lines["application-error"].left) == (1, 2)
    assert (lines["no-new-commit"].used, lines["no-new-commit"].left) == (1, 9)
    after = explained(look(endings=(ending(last_committed_step=0, key="k"),)))
    assert {line.cause: line.used for line in after.budgets}["application-error"] == 0


def test_the_unknown_names_its_source_and_when_it_is_asked_again() -> None:
    e = explained(look(unknown={CLUSTER: "connection refused"}))
    assert "connection refused" in e.what
    assert e.next_at is not None
    assert e.next_at > NOW
    assert e.evidence[0].value == "connection refused"


def test_the_text_fits_one_screen_and_says_the_same_as_the_json() -> None:
    for o in (look(), QUEUED, FAILED, look(unknown={CLUSTER: "timeout"})):
        e = explained(o)
        text = render(e)
        assert len(text.splitlines()) <= 24
        assert e.status in text
        assert e.next_action in text
        assert f"target {TARGET}" in text
        assert "\x1b" not in text
        again = Explanation.model_validate_json(json.dumps(e.model_dump(mode="json")))
        assert again == e


def test_giving_up_shows_the_deciding_evidence() -> None:
    o = look(view=view(gang("Failed", 1, ENDED)), endings=(ending("bad-configuration", key="uid-1/adm-1"),))
    decision = decide(RUN, o, NOW)
    assert isinstance(decision, GiveUp)
    text = render(explanation(RUN, o, decision, NOW))
    assert "badConfiguration" in text
    assert "exit code = 1" in text


def test_giving_up_says_what_the_program_said_with_its_fix() -> None:
    fix = "held-out text is in the training data: window 0 of a.bin equals window 0 of b.bin; " + "take one out " * 9
    evidence = (Evidence(source="exit.json of pod demo-a1-0", field="reason", value=fix.strip()),)
    last = ending("bad-configuration", key="uid-1/adm-1").model_copy(update={"evidence": evidence})
    o = look(view=view(gang("Failed", 1, ENDED)), endings=(last,))
    decision = decide(RUN, o, NOW)
    assert isinstance(decision, GiveUp)
    assert fix.strip() in decision.message
    assert f"reason = {fix.strip()}" in render(explanation(RUN, o, decision, NOW))


def test_a_pause_says_what_went_wrong() -> None:
    evidence = (Evidence(source="exit.json", field="reason", value="saving step 8 failed:\nNo space left on device."),)
    last = ending("storage", key="uid-1/adm-1").model_copy(update={"evidence": evidence})
    e = explained(look(view=view(gang("Failed", 1, ENDED)), endings=(last,)))
    assert e.status == "BackingOff"
    assert "(storage: saving step 8 failed: No space left on device)" in e.what


def test_every_moment_of_a_run_can_be_explained() -> None:
    world = World(run_of())
    memory = Memory(lambda: world.now)
    words = set()
    for second in range(120):
        if second == 10:
            world.kill()
        if second == 20:
            world.capacity = 2
        if second == 60:
            world.capacity = 8
        world.tick()
        for _ in range(4):
            o = read_observation(world.run, world.recipe, world, world.rundir, memory)
            decision = decide(world.run, o, world.now)
            e = explanation(world.run, o, decision, world.now)
            assert e.what
            assert e.next_action
            assert render(e)
            words.add(e.status)
            if isinstance(decision, Act):
                world.carry_out(decision)
    assert {"Starting", "Training", "Completed"} <= words
