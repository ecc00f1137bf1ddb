"""The store in a bucket keeps the promises of store.py, against a local server of the GCS API."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.gcs_server import GcsServer
from tests.support.store_conformance import CHECKS, Open, check_create_from_file
from trainer.errors import StorageUnavailable
from trainer.rundir.gcs import GcsStore
from trainer.rundir.opening import open_store
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import StoreRefused

_numbers = count()


@pytest.fixture(scope="session")
def server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture
def uri(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"gs://bucket/runs/{next(_numbers)}"


@pytest.fixture
def open_bucket(uri: str) -> Open:
    return lambda: GcsStore(uri)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Open], None], open_bucket: Open) -> None:
    check(open_bucket)


def test_create_from_file(open_bucket: Open, tmp_path: Path) -> None:
    check_create_from_file(open_bucket, tmp_path / "table")


def test_a_run_in_a_bucket(uri: str) -> None:
    with pytest.raises(StoreRefused, match="no object below this prefix"):
        open_store(uri)
    directory = RunDirectory.open(uri, create=True)
    runs.submit(directory, 1)
    claim = runs.claim(directory)
    runs.commit(claim, 2)
    runs.commit(claim, 5)
    again = RunDirectory.open(uri)
    assert [ref.step for ref in runs.committed(again)] == [2, 5]
    assert [line.step for line in again.logged_steps(1, 1)] == [1, 2, 3, 4, 5]
    assert again.last_start(1) == 1


def test_head_is_never_cached(server: GcsServer, uri: str) -> None:
    import json
    import urllib.request

    GcsStore(uri).swap("HEAD", b"{}", 0)
    name = f"{uri.removeprefix('gs://bucket/')}/HEAD".replace("/", "%2F")
    with urllib.request.urlopen(f"{server.url}/storage/v1/b/bucket/o/{name}", timeout=5) as answer:
        assert json.load(answer)["cacheControl"] == "no-store"


def test_missing_bucket(uri: str) -> None:
    with pytest.raises(StoreRefused, match="no such bucket"):
        RunDirectory.open("gs://no-such-bucket/run")
    with pytest.raises(StoreRefused, match="no such bucket"):
        GcsStore("gs://no-such-bucket/run").create("a", b"x")


@pytest.mark.parametrize("status", [401, 408, 429, 500, 503])
def test_an_error_of_the_server_means_unknown(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with _answering(status) as (url, asked):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        store = GcsStore("gs://bucket/run")
        store._probed = True
        with pytest.raises(StorageUnavailable):
            store.get("HEAD")
        with pytest.raises(StorageUnavailable):
            store.swap("HEAD", b"{}", 0)
        assert len(asked) == 2, "the library sent a request again by itself"


def test_forbidden_names_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    with _answering(403) as (url, _):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        with pytest.raises(StoreRefused, match=r"roles/storage\.objectUser"):
            GcsStore("gs://bucket/run").get("HEAD")


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with pytest.raises(StorageUnavailable):
        GcsStore("gs://bucket/run").get("HEAD")


def test_a_server_that_ignores_preconditions_is_refused(
    uri: str, server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = GcsStore(uri)
    monkeypatch.setattr(store, "_create", lambda key, data: store._blob(key).upload_from_string(data))
    with pytest.raises(StoreRefused, match="second create"):
        store.put("a", b"x")


class _answering:
    """A server that gives every request the same status; `asked` collects the request lines."""

    def __init__(self, status: int) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked.append(self.requestline)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST = do_PUT = do_DELETE = _answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> tuple[str, list[str]]:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}", self.asked

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
