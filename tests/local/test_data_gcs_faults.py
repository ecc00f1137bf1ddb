"""Range reads through the real client from a server that answers badly: what may pass is asked for again, nothing wrong is kept."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trainer.data_root import GcsRoot, KeptFiles, read_whole
from trainer.errors import ConfigurationError, StorageUnavailable

CONTENT = bytes(range(256)) * 512


class Bucket:
    """One object of a bucket; the next answers with content are spoilt as `faults` says."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.content = CONTENT
        self.reads = 0
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                if "alt=media" in self.path:
                    bucket.answer(self)
                else:
                    body = {"name": "mix/f0.bin", "bucket": "b", "size": str(len(bucket.content)), "generation": "1"}
                    bucket.send(self, 200, json.dumps(body).encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.reads += 1
        first, _, last = handler.headers["Range"].removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(self.content))
        if start >= len(self.content):
            self.send(handler, 416, b"")
            return
        data, fault = self.content[start:end], self.faults.pop(0) if self.faults else ""
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(self.content)}"}
        if fault.isdigit():
            self.send(handler, int(fault), b'{"error": {"message": "later"}}')
        elif fault == "cut":  # the connection ends inside the body
            self.send(handler, 206, data[: len(data) // 2], headers, length=len(data))
            handler.close_connection = True
        elif fault == "short":  # a whole answer, with less than was asked for
            self.send(handler, 206, data[:-7], headers)
        elif fault == "all":  # the range was overlooked
            self.send(handler, 200, self.content)
        else:
            self.send(handler, 206, data, headers)

    @staticmethod
    def send(
        handler: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    bucket = Bucket()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.url)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    yield bucket
    bucket.close()


@pytest.mark.parametrize("fault", ["429", "500", "502", "503", "504", "408", "cut", "short", "all"])
def test_what_may_pass_is_asked_for_again(bucket: Bucket, fault: str) -> None:
    root, buffer = GcsRoot("gs://b/mix"), bytearray(1000)
    bucket.faults = [fault, fault]
    root.read_into("f0.bin", 5000, memoryview(buffer))
    assert bytes(buffer) == CONTENT[5000:6000]
    assert bucket.reads == 3


def test_many_threads_over_a_bad_line(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data_root.READ_PIECE", 1000)
    bucket.faults = ["503", "cut", "short", "", "429", "all", "", "short"] * 8
    buffer = bytearray(len(CONTENT))
    read_whole(GcsRoot("gs://b/mix"), "f0.bin", memoryview(buffer))
    assert bytes(buffer) == CONTENT
    assert not bucket.faults


def test_a_kept_file_is_read_once_by_however_many_threads(bucket: Bucket) -> None:
    root = KeptFiles(GcsRoot("gs://b/mix"), {"f0.bin": len(CONTENT)})
    bucket.faults = ["503", "short"]

    def read(offset: int) -> bytes:
        root.read_into("f0.bin", offset, memoryview(buffer := bytearray(1000)))
        return bytes(buffer)

    offsets = range(0, len(CONTENT) - 1000, 997)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, offsets)) == [CONTENT[offset : offset + 1000] for offset in offsets]
    assert bucket.reads == 3


def test_a_kept_file_that_has_become_shorter_is_named(bucket: Bucket) -> None:
    root = KeptFiles(GcsRoot("gs://b/mix"), {"f0.bin": len(CONTENT) + 1})
    with pytest.raises(ConfigurationError, match=r"f0\.bin below gs://b/mix ends before byte \d+: it was changed"):
        root.read_into("f0.bin", 0, memoryview(bytearray(1000)))


def test_what_could_not_be_read_is_not_kept(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data_root.GCS_RETRY_SECONDS", 0)
    root, buffer = KeptFiles(GcsRoot("gs://b/mix"), {"f0.bin": len(CONTENT)}), bytearray(1000)
    bucket.faults = ["503"]
    with pytest.raises(StorageUnavailable):
        root.read_into("f0.bin", 0, memoryview(buffer))
    root.read_into("f0.bin", 0, memoryview(buffer))
    assert bytes(buffer) == CONTENT[:1000]


def test_a_file_that_really_ends_is_no_fault_to_wait_for(bucket: Bucket) -> None:
    root = GcsRoot("gs://b/mix")
    for offset in (len(CONTENT) - 500, len(CONTENT) + 500):
        with pytest.raises(ConfigurationError, match=r"f0\.bin below gs://b/mix ends before byte \d+: it was changed"):
            root.read_into("f0.bin", offset, memoryview(bytearray(1000)))
    assert bucket.reads == 2


def test_a_server_that_stays_bad_is_unavailable_and_not_a_changed_file(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data_root.GCS_RETRY_SECONDS", 0)
    bucket.faults = ["short"] * 3
    with pytest.raises(StorageUnavailable, match="993 bytes came instead of 1000"):
        GcsRoot("gs://b/mix").read_into("f0.bin", 0, memoryview(bytearray(1000)))
