"""Copies of the cluster's objects when the API server misbehaves: never believed too long, never wrong for long."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.clusters import kubernetes_api, kubernetes_reflector
from orchestrator.clusters.base import ClusterUnavailable
from orchestrator.clusters.kubernetes_api import ApiError
from orchestrator.clusters.kubernetes_reflector import Kind, Reflector
from tests.support.api_server import Answer, ApiServer, Exchange, events, listing, refusal, stay

Object = dict[str, Any]
Change = tuple[Object | None, Object | None]


def thing(name: str, version: int, value: str = "a", uid: str | None = None) -> Object:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": uid or f"uid-{name}", "resourceVersion": str(version)},
        "value": value,
    }


def by_value(obj: Object) -> tuple[str, str]:
    return "ns", obj["value"]


THINGS = Kind("example.dev/v1", "things", lambda obj: obj, by_value, selector="mine")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_reflector, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(kubernetes_reflector, "BACKOFF_MAX_SECONDS", 0.05)
    monkeypatch.setattr(kubernetes_reflector, "FORBIDDEN_SECONDS", 0.05)
    monkeypatch.setattr(kubernetes_reflector, "WATCH_SECONDS", 1)
    monkeypatch.setattr(kubernetes_api, "WATCH_SLACK_SECONDS", 0.2)


class Seen:
    """A reflector on a planned server."""

    def __init__(self, *plan: Answer, default: Answer | None = None) -> None:
        self.server = ApiServer(*plan, default=default or events(then=stay()))
        self.changes: list[Change] = []
        self.copy = Reflector(self.server.api(), THINGS, "ns", lambda old, new: self.changes.append((old, new)))
        self.copy.start()

    @property
    def names(self) -> dict[str, str]:
        return {obj["metadata"]["name"]: obj["value"] for obj in self.copy.objects()}

    def until(self, what: Callable[[], Any], seconds: float = 5.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, (self.names, self.error(), [r.query for r in self.server.requests])
            time.sleep(0.005)
        return found

    def failure(self) -> str:
        """Why the copy is not believed, once something has been heard."""
        return self.error() if self.copy.wait(0) else ""

    def error(self) -> str:
        try:
            self.copy.check()
        except ClusterUnavailable as error:
            return str(error)
        return ""


@pytest.fixture
def seen() -> Iterator[Callable[..., Seen]]:
    made: list[Seen] = []

    def make(*plan: Answer, default: Answer | None = None) -> Seen:
        made.append(Seen(*plan, default=default))
        return made[-1]

    yield make
    for one in made:
        one.copy.stop()
        one.server.stop()


def hold() -> Answer:
    return events(then=stay(0.9))


def test_lists_then_watches_from_there(seen: Callable[..., Seen]) -> None:
    one = seen(
        listing([thing("x", 1), thing("y", 2)], 5),
        events(("MODIFIED", thing("x", 6, "b")), ("DELETED", thing("y", 7)), ("ADDED", thing("z", 8)), then=stay(0.5)),
    )
    one.until(lambda: one.names == {"x": "b", "z": "a"})
    assert one.error() == ""
    lists, watch = one.server.requests[0], one.server.requests[1]
    assert lists.path == watch.path == "/apis/example.dev/v1/namespaces/ns/things"
    assert lists.query["labelSelector"] == watch.query["labelSelector"] == "mine"
    assert watch.query["resourceVersion"] == "5" and watch.query["allowWatchBookmarks"] == "true"
    assert [obj["metadata"]["name"] for obj in one.copy.indexed(("ns", "a"))] == ["z"]
    assert [obj["metadata"]["name"] for obj in one.copy.indexed(("ns", "b"))] == ["x"]


def test_nothing_is_known_before_the_first_list(seen: Callable[..., Seen]) -> None:
    one = seen(stay(0.3), default=stay(0.3))
    assert one.error() == "things have not been read yet"


def test_a_deletion_that_nobody_reported_shows_in_the_next_list(seen: Callable[..., Seen]) -> None:
    one = seen(listing([thing("x", 1), thing("y", 2)], 5), hold(), listing([thing("x", 1)], 9), hold())
    one.until(lambda: one.names == {"x": "a"})
    assert one.changes[-1] == (thing("y", 2), None)


def test_an_empty_list_is_an_answer(seen: Callable[..., Seen]) -> None:
    one = seen(listing([thing("x", 1)], 5), hold(), listing([], 9), hold())
    one.until(lambda: one.copy.objects() == [] and one.changes)
    assert one.error() == ""


def test_an_error_is_never_an_empty_list(seen: Callable[..., Seen]) -> None:
    one = seen(listing([thing("x", 1)], 5), events(), default=refusal(500, message="etcd is away"))
    one.until(one.failure)
    assert one.names == {"x": "a"} and "etcd is away" in one.error()


@pytest.mark.parametrize("gone", ["answer", "event"])
def test_410_is_made_up_for_by_a_list(seen: Callable[..., Seen], gone: str) -> None:
    status = {"code": 410, "reason": "Expired", "message": "too old resource version"}
    too_old = refusal(410, "Expired") if gone == "answer" else events(("ERROR", status))
    one = seen(listing([thing("x", 1)], 5), too_old, listing([thing("y", 8)], 9), hold())
    one.until(lambda: one.names == {"y": "a"})
    assert one.error() == ""
    assert (thing("x", 1), None) in one.changes


def test_410_again_and_again_is_not_a_tight_loop(seen: Callable[..., Seen]) -> None:
    def answer(exchange: Exchange) -> None:
        (refusal(410, "Expired") if exchange.watching else listing([thing("x", 1)], 5))(exchange)

    one = seen(default=answer)
    one.until(lambda: len(one.server.requests) >= 8)
    time.sleep(0.3)
    assert len(one.server.requests) < 60


@pytest.mark.parametrize("how", ["line", "chunk", "garbage"])
def test_a_watch_that_is_cut_is_an_error_until_the_next_list(seen: Callable[..., Seen], how: str) -> None:
    def cut(exchange: Exchange) -> None:
        exchange.begin()
        exchange.event("MODIFIED", thing("x", 6, "b"))
        if how == "garbage":
            exchange.chunk(b"<html>bad gateway</html>\n")
        else:
            exchange.chunk(b'{"type": "MODIFIED", "object": {"meta')
        exchange.end() if how == "line" else exchange.cut()

    one = seen(listing([thing("x", 1)], 5), cut, stay(0.3), default=events(then=stay()))
    one.until(one.failure)
    assert one.names == {"x": "b"}  # what came before it is true


def test_after_a_cut_everything_is_right_again(seen: Callable[..., Seen]) -> None:
    one = seen(
        listing([thing("x", 1)], 5),
        events(("MODIFIED", thing("x", 6, "b")), then=lambda e: e.cut()),
        listing([thing("x", 9, "c")], 9),
        hold(),
    )
    one.until(lambda: one.names == {"x": "c"} and not one.error())


def test_a_half_open_watch_is_found_out(seen: Callable[..., Seen]) -> None:
    """The server was asked for 1 s and says nothing for longer: the connection is dead."""
    one = seen(listing([thing("x", 1)], 5), events(then=stay(20)), default=stay(0.5))
    began = time.monotonic()
    one.until(one.failure)
    assert 1.0 < time.monotonic() - began < 4.0


def test_a_watch_that_only_claims_to_live_is_not_believed_for_ever() -> None:
    now = [0.0]
    with ApiServer(listing([thing("x", 1)], 5), default=events(then=stay())) as server:
        copy = Reflector(server.api(), THINGS, "ns", clock=lambda: now[0])
        copy.start()
        assert copy.wait(5)
        copy.check()
        now[0] = 36.0
        with pytest.raises(ClusterUnavailable, match="nothing was heard about things for 36 s"):
            copy.check()
        copy.stop()


def test_a_refused_connection_is_said_and_not_hammered() -> None:
    server = ApiServer()
    api = server.api()
    server.stop()
    copy = Reflector(api, THINGS, "ns")
    copy.start()
    assert copy.wait(5)
    with pytest.raises(ClusterUnavailable, match="things: "):
        copy.check()
    copy.stop()


def test_a_missing_right_names_verbs_and_resource(seen: Callable[..., Seen]) -> None:
    one = seen(default=refusal(403, "Forbidden", "things is forbidden"))
    one.until(one.failure)
    assert one.error().startswith("not allowed: needed are the verbs list, watch on things.example.dev in namespace ns")
    assert one.copy.forbidden


def test_a_right_that_is_given_later_is_noticed(seen: Callable[..., Seen]) -> None:
    one = seen(refusal(403, "Forbidden"), listing([thing("x", 1)], 5), hold())
    one.until(lambda: one.names == {"x": "a"} and not one.error())
    assert one.copy.forbidden is None


def test_a_kind_the_cluster_does_not_know_is_no_empty_list(seen: Callable[..., Seen]) -> None:
    one = seen(default=refusal(404, "NotFound", "the server could not find the requested resource"))
    one.until(one.failure)
    assert "does not know things.example.dev example.dev/v1" in one.error()


def test_a_list_in_pages(seen: Callable[..., Seen]) -> None:
    def page(exchange: Exchange) -> None:
        first = "continue" not in exchange.query
        metadata = {"resourceVersion": "5", **({"continue": "more"} if first else {})}
        exchange.answer(200, {"metadata": metadata, "items": [thing("x" if first else "y", 1)]})

    one = seen(page, page, hold())
    one.until(lambda: one.names == {"x": "a", "y": "a"})


def test_own_writes_are_known_at_once_and_old_news_do_not_undo_them(seen: Callable[..., Seen]) -> None:
    one = seen(listing([thing("x", 1)], 5), events(("MODIFIED", thing("x", 6, "old")), then=stay(0.3)), stay(0.3))
    assert one.copy.wait(5)
    one.copy.put(thing("x", 8, "mine"))
    one.copy.put(thing("new", 7))
    time.sleep(0.1)
    assert one.names == {"x": "mine", "new": "a"}
    one.copy.put(thing("x", 4, "older"))
    assert one.names["x"] == "mine"


def test_a_list_that_was_under_way_does_not_take_an_own_write_away(seen: Callable[..., Seen]) -> None:
    one = seen(listing([], 5), hold(), listing([], 6), hold(), listing([], 9), hold())
    assert one.copy.wait(5)
    one.copy.put(thing("new", 7))
    one.until(lambda: len(one.server.requests) >= 4)
    time.sleep(0.05)
    assert one.names == {"new": "a"}
    one.until(lambda: one.names == {})  # a list younger than it does not have it: it is gone


def test_another_object_of_the_same_name_is_another(seen: Callable[..., Seen]) -> None:
    one = seen(
        listing([thing("x", 1)], 5),
        events(("ADDED", thing("x", 7, "b", uid="second")), ("DELETED", thing("x", 6, uid="uid-x")), then=stay(0.5)),
    )
    one.until(lambda: one.names == {"x": "b"})
    time.sleep(0.1)
    assert one.names == {"x": "b"}
    assert one.changes[-2:] == [(thing("x", 1), None), (None, thing("x", 7, "b", uid="second"))]
    one.copy.drop("x", "ns", "uid-x")
    assert one.names == {"x": "b"}
    one.copy.drop("x", "ns", "second")
    assert one.names == {}


def test_a_deleted_objects_last_state_is_news_before_its_end(seen: Callable[..., Seen]) -> None:
    one = seen(listing([thing("x", 1)], 5), events(("DELETED", thing("x", 6, "last words")), then=stay(0.5)))
    one.until(lambda: one.changes and one.changes[-1][1] is None)
    assert one.changes[-2:] == [(thing("x", 1), thing("x", 6, "last words")), (thing("x", 6, "last words"), None)]


def test_what_only_changes_its_version_is_no_news(seen: Callable[..., Seen]) -> None:
    one = seen(
        listing([thing("x", 1)], 5), events(("MODIFIED", thing("x", 6)), ("ADDED", thing("y", 7)), then=stay(0.5))
    )
    one.until(lambda: len(one.names) == 2)
    assert [new["metadata"]["name"] for _, new in one.changes if new] == ["x", "y"]


def test_refresh_asks_at_once_and_drops_what_is_gone(seen: Callable[..., Seen]) -> None:
    one = seen(listing([thing("x", 1), thing("y", 2), thing("z", 3, "other")], 5), events(then=stay(3)))
    one.until(lambda: len(one.server.requests) == 2)
    one.server.plan = [listing([thing("x", 7, "a")], 9)]
    one.copy.refresh("label=a", ("ns", "a"))
    assert one.names == {"x": "a", "z": "other"}
    assert one.server.requests[-1].query == {"labelSelector": "label=a"}
    one.server.plan = [refusal(503)]
    with pytest.raises(ClusterUnavailable):
        one.copy.refresh("label=a", ("ns", "a"))


def test_a_handler_that_fails_does_not_end_the_watching() -> None:
    calls = []

    def handler(old: Object | None, new: Object | None) -> None:
        calls.append(new)
        if len(calls) == 1:
            raise KeyError("status")

    with ApiServer(
        listing([thing("x", 1)], 5), listing([thing("x", 1), thing("y", 6)], 9), default=events(then=stay())
    ) as server:
        copy = Reflector(server.api(), THINGS, "ns", handler)
        copy.start()
        deadline = time.monotonic() + 5
        while len(copy.objects()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        copy.stop()


# -- single calls


def test_401_makes_a_new_client_once() -> None:
    tokens = iter(["old", "new", "newer"])

    def only_new(exchange: Exchange) -> None:
        good = exchange.token == "Bearer new"
        exchange.answer(200 if good else 401, {"ok": True} if good else {"message": "Unauthorized"})

    with ApiServer(default=only_new) as server:
        api = server.api(lambda: next(tokens))
        assert api.request("GET", "/x") == {"ok": True}
        assert [r.token for r in server.requests] == ["Bearer old", "Bearer new"]
        assert api.request("GET", "/x") == {"ok": True}


def test_401_that_stays_is_unknown() -> None:
    with ApiServer(default=refusal(401, "Unauthorized", "Unauthorized")) as server:
        with pytest.raises(ClusterUnavailable, match="401"):
            server.api().request("GET", "/x")
        assert len(server.requests) == 2


def test_tokens_are_read_again_every_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(["first", "second"])
    with ApiServer(default=lambda e: e.answer(200, {})) as server:
        api = server.api(lambda: next(tokens))
        api.request("GET", "/x")
        later = time.monotonic() + 601
        monkeypatch.setattr(kubernetes_api.time, "monotonic", lambda: later)
        api.request("GET", "/x")
        assert [r.token for r in server.requests] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_answers_that_leave_the_outcome_open(status: int) -> None:
    with (
        ApiServer(default=refusal(status, message="later")) as server,
        pytest.raises(ClusterUnavailable, match="later"),
    ):
        server.api().request("POST", "/x", {})


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
def test_refusals(status: int) -> None:
    with ApiServer(default=refusal(status, "Why", "because", name="x")) as server, pytest.raises(ApiError) as caught:
        server.api().request("POST", "/x", {"a": 1})
    assert (caught.value.status, caught.value.reason, caught.value.message) == (status, "Why", "because")
    assert caught.value.details == {"name": "x"} and server.requests[0].body == {"a": 1}


def test_an_answer_that_is_no_json_or_does_not_come_is_unknown() -> None:
    def html(exchange: Exchange) -> None:
        exchange.begin()
        exchange.chunk(b"<html>")
        exchange.end()

    with ApiServer(html, default=stay(5)) as server:
        with pytest.raises(ClusterUnavailable, match="not JSON"):
            server.api().request("GET", "/x")
        with pytest.raises(ClusterUnavailable):
            server.api().request("GET", "/x", read_seconds=0.2)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_call_is_made_once_whatever_happens(method: str) -> None:
    def drop(exchange: Exchange) -> None:
        exchange.cut()

    with ApiServer(default=drop) as server:
        with pytest.raises(ClusterUnavailable):
            server.api().request(method, "/x", {})
        assert len(server.requests) == 1
