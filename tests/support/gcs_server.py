"""A server of the GCS API on a free port of this machine, for as long as a test needs it."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.lab.build_gcs import server_binary

READY_SECONDS = 20.0


class GcsServer:
    """Start with `with`. Objects are lost at the end. `environment` is what clients need.

    With log_level "info" each request is a line of `log`, with its time in milliseconds.
    """

    def __init__(self, log_level: str = "warn") -> None:
        self.url = ""
        self._log_level = log_level
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    @property
    def environment(self) -> dict[str, str]:
        """For google-cloud-storage and gcsfs, and for TensorStore (Orbax)."""
        return {"STORAGE_EMULATOR_HOST": self.url, "TENSORSTORE_GCS_HTTP_URL": self.url}

    @property
    def log(self) -> Path:
        return self._folder / "log"

    def __enter__(self) -> Self:
        binary = server_binary()
        self._folder = Path(tempfile.mkdtemp(prefix="gcs-"))
        for _ in range(3):  # the free port may be taken before the server has it
            if self._start(binary):
                return self
        raise RuntimeError(f"{binary} does not come up:\n{self.log.read_text(errors='replace')[-2000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def create_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        create_bucket(self.url, name)

    def _start(self, binary: Path) -> bool:
        address = f"127.0.0.1:{_free_port()}"
        self.url = f"http://{address}"
        host, port = address.split(":")
        command = [str(binary), "-scheme", "http", "-host", host, "-port", port, "-backend", "memory"]
        command += ["-public-host", address, "-external-url", self.url, "-log-level", self._log_level]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/storage/v1/b?project=test", timeout=1),
            ):
                return True
            time.sleep(0.05)
        self._stop()
        return False

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def create_bucket(url: str, name: str) -> None:
    """Make a bucket on the server at `url`, empty if it is new."""
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=test",
        data=f'{{"name": "{name}"}}'.encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10):
            pass
    except urllib.error.HTTPError as error:
        if error.code != 409:
            raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
