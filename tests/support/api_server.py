"""A small server that answers like a Kubernetes API server, or does not: each request takes the next planned answer."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes.client import Configuration

from orchestrator.clusters.kubernetes_api import KubernetesApi

Object = dict[str, Any]
Answer = Callable[["Exchange"], None]


class Exchange:
    """One request, and the ways to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self.method = handler.command
        parts = urlsplit(handler.path)
        self.path = parts.path
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.token = handler.headers.get("authorization", "")
        length = int(handler.headers.get("Content-Length") or 0)
        self.body: Object = json.loads(handler.rfile.read(length)) if length else {}

    @property
    def watching(self) -> bool:
        return self.query.get("watch") == "true"

    def answer(self, status: int, content: Object) -> None:
        body = json.dumps(content).encode()
        self._handler.send_response(status)
        self._handler.send_header("Content-Length", str(len(body)))
        self._handler.end_headers()
        self._handler.wfile.write(body)

    def begin(self) -> None:
        """A body in chunks follows."""
        self._handler.send_response(200)
        self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()

    def chunk(self, data: bytes) -> None:
        self._handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self._handler.wfile.flush()

    def event(self, kind: str, obj: Object) -> None:
        self.chunk(json.dumps({"type": kind, "object": obj}).encode() + b"\n")

    def end(self) -> None:
        self._handler.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """Close the connection without ending the body."""
        self._handler.close_connection = True


def listing(items: Iterable[Object], version: int) -> Answer:
    """A list."""
    content = {"metadata": {"resourceVersion": str(version)}, "items": list(items)}
    return lambda exchange: exchange.answer(200, content)


def refusal(status: int, reason: str = "", message: str = "", **details: Any) -> Answer:
    """A Status that is not success."""
    content = {"kind": "Status", "reason": reason, "message": message, "code": status, "details": details}
    return lambda exchange: exchange.answer(status, content)


def events(*pairs: tuple[str, Object], then: Answer = lambda exchange: exchange.end()) -> Answer:
    """A watch with these events, and its end."""

    def answer(exchange: Exchange) -> None:
        exchange.begin()
        for kind, obj in pairs:
            exchange.event(kind, obj)
        then(exchange)

    return answer


def stay(seconds: float = 30.0) -> Answer:
    """Say nothing for so long, then end in order."""

    def answer(exchange: Exchange) -> None:
        time.sleep(seconds)
        exchange.end()

    return answer


class ApiServer:
    """Answers by plan; when the plan is used up, with `default`. `requests` are those that came."""

    def __init__(self, *plan: Answer, default: Answer | None = None) -> None:
        self.plan = list(plan)
        self.default = default or refusal(503, message="nothing planned")
        self.requests: list[Exchange] = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                exchange = Exchange(self)
                with server._lock:
                    server.requests.append(exchange)
                    answer = server.plan.pop(0) if server.plan else server.default
                try:
                    answer(exchange)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            do_GET = do_POST = do_DELETE = do_PATCH = _serve

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> "ApiServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def configuration(self, token: str = "token") -> Configuration:
        configuration = Configuration(host=f"http://127.0.0.1:{self._http.server_address[1]}")
        configuration.api_key["BearerToken"] = f"Bearer {token}"
        return configuration

    def api(self, tokens: Callable[[], str] = lambda: "token") -> KubernetesApi:
        return KubernetesApi(lambda: self.configuration(tokens()))
