"""/healthz and /readyz for the probes of the operator's pod, and /metrics."""

import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from orchestrator.operating.metrics import CONTENT_TYPE

Check = Callable[[], str | None]  # what is wrong, or None


def serve_health(
    port: int, checks: dict[str, Check], pages: dict[str, Callable[[], str]]
) -> tuple[ThreadingHTTPServer, int]:
    """Answer `checks` by path, such as {"/healthz": …}: 200 "ok", or 503 and what is wrong; and `pages` by path: 200.

    On POD_IP, when that is set. Returns the server (its `shutdown` ends it) and its port.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path in pages:
                self._answer(200, pages[path](), CONTENT_TYPE)
                return
            check = checks.get(path)
            wrong = check() if check is not None else "no such path"
            status = 404 if check is None else 503 if wrong else 200
            self._answer(status, f"{wrong or 'ok'}\n", "text/plain; charset=utf-8")

        def _answer(self, status: int, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Probes are no news."""

    server = ThreadingHTTPServer((os.environ.get("POD_IP", ""), port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server, server.server_address[1]
