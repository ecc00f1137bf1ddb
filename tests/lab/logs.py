"""`kubectl logs`: the one part of a kubelet's own API that the nodes serve, for all of them on one port."""

import re
import ssl
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from tests.lab.agent import Agent

POLL_SECONDS = 0.2


def serve_logs(agent: "Agent", port: int) -> None:
    """Answer GET /containerLogs/<namespace>/<pod>/<container> with tailLines, limitBytes and follow. Never returns."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # the end of the connection is the end of the log

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            match = re.fullmatch(r"/containerLogs/([^/]+)/([^/]+)/([^/]+)", url.path)
            file = _log_file(agent.folder, *match.groups()) if match else None
            if file is None:
                self.send_error(404, "no such log")
                return
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            with file.open("rb") as log:
                tail = query.get("tailLines")
                content = b"".join(deque(log, int(tail))) if tail else log.read()
                self.wfile.write(content[: int(query["limitBytes"])] if "limitBytes" in query else content)
                while query.get("follow") == "true" and self._runs(url.path):
                    self.wfile.write(log.read())
                    self.wfile.flush()
                    time.sleep(POLL_SECONDS)
                if query.get("follow") == "true":
                    self.wfile.write(log.read())

        def _runs(self, path: str) -> bool:
            namespace, pod = path.split("/")[2:4]
            try:
                return agent.find(f"{namespace}/{pod}").running
            except ValueError:
                return False

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(agent.folder / "pki" / "tls.crt", agent.folder / "pki" / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


def _log_file(lab: Path, namespace: str, pod: str, container: str) -> Path | None:
    """The newest log of a container of that name."""
    files = list((lab / "pods").glob(f"{namespace}_{pod}_*/{container}.log"))
    return max(files, key=lambda f: f.stat().st_mtime, default=None)
