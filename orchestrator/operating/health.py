"""/healthz and /readyz for the probes of the operator's pod."""

import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Check = Callable[[], str | None]  # what is wrong, or None


def serve_health(port: int, checks: dict[str, Check]) -> tuple[ThreadingHTTPServer, int]:
    """Answer `checks` by path, such as {"/healthz": …}: 200 "ok", or 503 and what is wrong. On POD_IP, when set.

    Returns the server (its `shutdown` ends it) and its port.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_GET(self) -> None:
            check = checks.get(self.path.partition("?")[0])
            wrong = check() if check is not None else "no such path"
            status = 404 if check is None else 503 if wrong else 200
            body = f"{wrong or 'ok'}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Probes are no news."""

    server = ThreadingHTTPServer((os.environ.get("POD_IP", ""), port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server, server.server_address[1]
