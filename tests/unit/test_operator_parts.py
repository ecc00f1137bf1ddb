"""Statuses, Events, probes, ConfigMaps and the recipes in them: the operator's smaller parts."""

import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
import yaml

from orchestrator.api import ConfigMapKeyRef
from orchestrator.clusters.kubernetes_api import ApiError
from orchestrator.daemon import Look
from orchestrator.decisions import AppendEnding, Freeze, GiveUp, Refused, Wait
from orchestrator.operating.events import event_of
from orchestrator.operating.happenings import NORMAL, NOTE_BYTES, REASONS, Happening, Subject, happenings
from orchestrator.operating.health import serve_health
from orchestrator.operating.preparation import read_config_map
from orchestrator.operating.status_writer import QUIET_SECONDS, StatusWriter, differs
from orchestrator.preparing import load_recipe
from orchestrator.status import RunStatus, status_of
from tests.support.kept import ApiServer
from tests.support.story import a_world, caretaker
from tests.support.world import run_of, tiny_recipe
from trainer.errors import ConfigurationError
from trainer.rundir.records import Ending, Evidence

SUBJECT = Subject("ns", "demo", "uid-1")


def frozen(message: str, word: str = "run directory") -> RunStatus:
    return status_of(run_of(), None, Freeze(message, (word,), 0.0), None, 1000.0)


def with_step(status: RunStatus, step: int, committed: int) -> RunStatus:
    return status.model_copy(update={"step": step, "committed_step": committed, "message": f"step {step}"})


def test_news_at_once_figures_once_a_minute_nothing_when_nothing_changed() -> None:
    now = 0.0
    server = ApiServer()
    writer = StatusWriter(server, SUBJECT, None, lambda: now)
    status = frozen("a")
    assert writer.write(status) is None and len(server.statuses) == 1
    assert writer.write(status) is None and len(server.statuses) == 1
    for second in range(1, 181):
        now = float(second)
        due = writer.write(with_step(status, second, second // 2))
        assert due is None or due == pytest.approx(QUIET_SECONDS - (second % QUIET_SECONDS))
    assert len(server.statuses) == 1 + 3
    other = status_of(run_of(), None, Refused("b"), None, 1000.0)
    assert writer.write(other) is None and len(server.statuses) == 5
    now += 1
    assert writer.write(status) is None and len(server.statuses) == 6


def test_a_refused_status_is_tried_again_once_a_minute() -> None:
    now = 0.0
    server = ApiServer(refuses={"/status": 403})
    writer = StatusWriter(server, SUBJECT, None, lambda: now)
    for _ in range(180):
        due = writer.write(frozen("a"))
        assert due is not None and 0 < due <= QUIET_SECONDS
        now += 1
    assert server.asked == 3
    server.refuses = {}
    now += QUIET_SECONDS
    assert writer.write(frozen("a")) is None and len(server.statuses) == 1


@pytest.mark.parametrize("status", [404, 409])
def test_the_status_of_a_run_that_is_gone_is_nobodys_business(status: int) -> None:
    server = ApiServer(refuses={"/status": status})
    StatusWriter(server, SUBJECT, None).write(frozen("a"))
    assert server.statuses == []


def test_a_commit_alone_is_no_news_but_another_condition_is() -> None:
    old = frozen("a")
    assert not differs(old, with_step(old, 7, 7))
    assert differs(None, old)
    assert differs(old, status_of(run_of(), None, Refused("a"), old, 1000.0))


def test_every_cause_has_a_reason_of_its_own() -> None:
    causes = set(Ending.model_fields["cause"].annotation.__args__)  # type: ignore[union-attr]
    assert set(REASONS) == causes
    assert len(set(REASONS.values())) == len(causes)
    assert causes >= NORMAL


def test_an_event_is_one_that_the_api_server_takes() -> None:
    long = Happening("x/1", "Hang", "ß" * 2000, (1, 1), warning=True)
    event = event_of(SUBJECT, long, "operator-0" * 30, 1_700_000_000.0)
    assert event["metadata"]["name"] == long.name(SUBJECT)
    assert len(event["metadata"]["name"]) <= 63
    assert event["involvedObject"]["uid"] == "uid-1" and event["type"] == "Warning"
    assert event["firstTimestamp"] == "2023-11-14T22:13:20Z"
    assert len(event["reportingInstance"]) <= 128
    assert long.name(SUBJECT) != long.name(Subject("ns", "demo", "uid-2"))


def test_notes_carry_the_evidence_and_are_cut_to_what_an_event_may_hold() -> None:
    with a_world() as world:
        keeper = caretaker(world)
        look = keeper.look()
        evidence = tuple(Evidence(source=f"pod {n}", field="signal", value="9 " * 60) for n in range(20))
        given_up = Look(look.observation, GiveUp("hang 11 time(s)", "hang", evidence), look.now)
        (told,) = happenings(keeper.run, given_up)
        assert told.reason == "BudgetExhausted" and told.warning
        assert "pod 0: signal = 9 9" in told.note
        assert len(told.note.encode()) <= NOTE_BYTES


def test_an_ending_is_told_before_the_gang_that_follows() -> None:
    with a_world() as world:
        keeper = caretaker(world)
        for _ in range(60):
            look = keeper.step()
            if isinstance(look.decision, AppendEnding):
                assert all(h.what.startswith(("ending/", "state/")) for h in happenings(keeper.run, look))
                break
            world.tick()
        else:
            pytest.fail("nothing ended")
        assert happenings(keeper.run, keeper.look())[0].reason == "HostFailure"


def test_waiting_is_no_event() -> None:
    with a_world() as world:
        keeper = caretaker(world)
        look = keeper.look()
        for decision in (Wait("Queued", "waits"), Wait("Training", "trains"), Wait("Starting", "starts")):
            assert happenings(keeper.run, Look(look.observation, decision, look.now)) == ()


def test_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "127.0.0.1")
    wrong: list[str] = []
    checks: dict[str, Any] = {"/healthz": lambda: None, "/readyz": lambda: wrong[0] if wrong else None}
    server, port = serve_health(0, checks, {"/metrics": lambda: "x 1\n"})
    try:
        assert fetch(port, "/healthz") == (200, "ok\n")
        assert fetch(port, "/readyz?verbose") == (200, "ok\n")
        wrong.append("not yet")
        assert fetch(port, "/readyz") == (503, "not yet\n")
        assert fetch(port, "/metrics") == (200, "x 1\n")
        assert fetch(port, "/metric")[0] == 404
    finally:
        server.shutdown()
        server.server_close()
    assert "health" not in {thread.name for thread in threading.enumerate() if thread.is_alive()}


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class ConfigMaps:
    """An API server with one ConfigMap."""

    def __init__(self, data: dict[str, str] | None = None, status: int = 0) -> None:
        self.data, self.status = data, status

    def request(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        assert (method, path) == ("GET", "/api/v1/namespaces/ns/configmaps/mine")
        if self.status:
            raise ApiError(self.status, "Forbidden", "configmaps is forbidden")
        if self.data is None:
            raise ApiError(404, "NotFound", "not found")
        return {"data": self.data}


def recipe_of(text: str, overrides: dict[str, Any] | None = None) -> Any:
    run = run_of(recipe={"configMap": {"name": "mine"}, "overrides": overrides or {}})
    return load_recipe(run, lambda key: read_config_map(ConfigMaps({"recipe.yaml": text}), "ns", key))


def test_a_recipe_in_a_config_map_is_the_recipe_with_the_overrides() -> None:
    recipe = tiny_recipe()
    assert recipe_of(yaml.safe_dump(recipe.model_dump(mode="json"))) == recipe
    assert recipe_of(recipe.canonical().decode()) == recipe  # JSON is YAML
    assert recipe_of(recipe.canonical().decode(), {"global_batch": 8}).global_batch == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "a recipe is a mapping"),
        ("a: [", "not YAML"),
        ("[" * 5000, "nested too deeply"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("name: x\nmodle: {}", "did you mean 'model'"),
    ],
)
def test_a_bad_document_names_config_map_key_and_field(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        recipe_of(text)
    assert "spec.recipe.configMap mine, key recipe.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (ConfigMaps(), "there is no such ConfigMap"),
        (ConfigMaps({"other": ""}), r"has no key 'recipe.yaml' \(keys: other\)"),
        (ConfigMaps(status=403), "verb get on configmaps"),
    ],
)
def test_a_missing_config_map_is_named_with_the_fix(maps: ConfigMaps, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_config_map(maps, "ns", ConfigMapKeyRef.model_validate({"name": "mine"}))
    assert "spec.recipe.configMap mine in namespace ns" in str(caught.value)
