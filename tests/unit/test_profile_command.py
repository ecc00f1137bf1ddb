"""`untildone profile` and what `explain` says of profiles: asked for, shown, and refused where no start can obey."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import Exit, main
from orchestrator.clusters.kubernetes_api import KubernetesApi
from orchestrator.commands.profile import MOST_STEPS
from orchestrator.explain import Explanation, render
from orchestrator.looking import with_profiles
from tests.support import bad_runs, runs
from trainer.rundir.profiles import Profile, profile, profiles
from trainer.rundir.records import MOST_PROFILED_STEPS, PROFILED_STEPS, ExitRecord, Request, RequestDone
from trainer.rundir.rundir import RunDirectory


@pytest.fixture
def on_disk(tmp_path: Path) -> RunDirectory:
    rundir = RunDirectory.open(str(tmp_path / "run"), create=True)
    rundir.adopt_spec(runs.spec())
    rundir.swap_to_attempt(1)
    return rundir


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["profile", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command_asks_and_shows(on_disk: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    place = on_disk.uri
    assert run(capsys, place, "--list") == (Exit.DONE, f"no profile was asked of {place}\n", "")
    code, out, _ = run(capsys, place, "--at", "40", "--steps", "3")
    assert code == Exit.DONE and "asked: steps 40–42" in out
    code, out, _ = run(capsys, place, "--hlo", "--json")
    (item,) = json.loads(out)["items"]
    assert (item["kind"], item["status"], item["first"]) == ("dump", "waiting", None)
    waiting, program = profiles(on_disk)
    assert (waiting.request.at, waiting.request.steps, program.request.kind) == (40, 3, "dump")
    on_disk.answer(
        waiting.identifier,
        RequestDone(attempt=1, start=1, first=40, step=42, place="attempts/1/1/profiles/step-40", time=0.0),
    )
    _, out, _ = run(capsys, place, "--list")
    header, one, two = out.splitlines()
    assert header.split() == ["NAME", "STEPS", "STATUS", "WHERE"]
    assert one.split()[1:] == ["40–42", "done", "attempts/1/1/profiles/step-40"]
    assert "waiting" in two
    text = render(
        with_profiles(Explanation(run="r", status="Training", what="", next_action="", target_step=9), on_disk)
    )
    assert f"  Profile  {waiting.identifier} done: steps 40–42; in attempts/1/1/profiles/step-40" in text
    assert profile(on_disk, "nobody") is None


def test_it_says_when_nobody_runs_who_could_take_it(on_disk: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is suspended or waits in the queue: the request is kept, and nobody waits for it unawares."""
    words = "no trainer runs now: the next start takes it"
    assert words in run(capsys, on_disk.uri)[1]
    runs.claim(on_disk)
    assert words not in run(capsys, on_disk.uri)[1]
    on_disk.put_exit(1, 1, ExitRecord(code=75, reason="preempted", step=3, time=0.0))
    assert words in run(capsys, on_disk.uri)[1]


def test_a_request_that_cannot_be_read_hides_no_other(
    on_disk: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    on_disk.create_bytes("requests/profile-0.json", b'{"kind": "from the future", "attempt": 1, "time": 0}')
    on_disk.request("profile-1", Request(kind="profile", attempt=1, time=0.0))
    code, out, err = run(capsys, on_disk.uri, "--list")
    assert code == Exit.DONE and len(out.splitlines()) == 2 and "profile-1" in out
    assert "warning: profile profile-0" in err
    found = with_profiles(Explanation(run="r", status="Training", what="", next_action="", target_step=9), on_disk)
    assert len(found.profiles) == 1 and "profile-0" in found.warnings[0]


def test_a_run_in_a_cluster_is_asked_by_its_name(
    on_disk: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(_self: KubernetesApi, method: str, path: str) -> Any:
        assert (method, path) == ("GET", "/apis/untildone.dev/v1alpha1/namespaces/lab/trainingruns/good")
        return bad_runs.changed(spec__runDirectory=on_disk.uri)

    monkeypatch.setattr(KubernetesApi, "request", get)
    monkeypatch.setattr("orchestrator.clusters.kubernetes_api.configuration_from", lambda *_: None)
    code, out, _ = run(capsys, "good", "-n", "lab")
    assert code == Exit.DONE and "asked: the next 5 steps" in out and "profile good -n lab --list" in out
    assert len(profiles(on_disk)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--at", "101"], "target is step 100"),
        (["--steps", "21"], "1<=x<=20"),
        (["--hlo", "--at", "3"], "--at"),
        (["--list", "--everybody"], "--everybody"),
    ],
)
def test_what_no_start_can_do_is_refused(
    on_disk: RunDirectory, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, _, err = run(capsys, on_disk.uri, *arguments)
    assert code == Exit.USAGE and words in err
    assert profiles(on_disk) == []


def test_a_finished_run_is_asked_for_nothing(on_disk: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    claim = runs.claim(on_disk)
    runs.commit(claim, 100)
    code, _, err = run(capsys, on_disk.uri)
    assert code == Exit.USAGE and "no step is left" in err


def test_what_the_command_takes_is_what_a_request_may_say(
    on_disk: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert MOST_STEPS == MOST_PROFILED_STEPS
    run(capsys, on_disk.uri)
    assert [one.request.steps for one in profiles(on_disk)] == [PROFILED_STEPS]


@pytest.mark.parametrize(
    ("at", "steps", "words"),
    [(7, 3, "steps 7–9"), (7, 1, "step 7"), (None, 5, "the next 5 steps"), (None, 1, "the next step")],
)
def test_steps_in_words(at: int | None, steps: int, words: str) -> None:
    assert Profile("p", Request(kind="profile", attempt=1, at=at, steps=steps, time=0.0)).what == words
