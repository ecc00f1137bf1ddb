"""The nodes of a lab: registers them, keeps their heartbeats, runs the pods bound to them, takes fault commands.

python -m tests.lab.agent LAB-FOLDER
"""

import json
import logging
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import urllib3

from tests.lab.api import Api, ApiError, Object, is_true
from tests.lab.containers import Sandbox
from tests.lab.faults import COMMANDS
from tests.lab.logs import serve_logs
from tests.lab.nodes import Node, heartbeat, nodes_of, register, report_ready
from tests.lab.pods import PodRunner

HEARTBEAT_SECONDS = 2.0
RELIST_SECONDS = 0.3
ADDRESSES = range(2, 255)

log = logging.getLogger("agent")


class Agent:
    """All nodes of one lab. Its pods' addresses are in a loopback network of this lab's own."""

    def __init__(self, folder: Path) -> None:
        state = json.loads((folder / "lab.json").read_text())
        self.folder = folder
        self.ports: dict[str, int] = state["ports"]
        self.api = Api.from_kubeconfig(folder / "kubeconfig")
        self.nodes = {n.name: n for n in nodes_of(json.loads((folder / "pools.json").read_text()))}
        self.runners: dict[str, PodRunner] = {}  # by pod uid
        gcs, server = f"http://127.0.0.1:{self.ports['gcs']}", self.ports["kube-apiserver"]
        self._environment = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(server),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(server),
            "STORAGE_EMULATOR_HOST": gcs,
            "TENSORSTORE_GCS_HTTP_URL": gcs,
        }
        # A port is this lab's alone on this machine, so a network made of its number is too.
        self._network = f"127.{server >> 8}.{server & 255}"
        self._sandboxes: dict[str, Sandbox] = {}  # by pod uid
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until killed."""
        for node in self.nodes.values():
            register(self.api, node, self.ports["kubelet"])
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=_serve, args=(self,), daemon=True).start()
        threading.Thread(target=serve_logs, args=(self, self.ports["kubelet"]), daemon=True).start()
        while True:
            try:
                self._follow()
            except (ApiError, urllib3.exceptions.HTTPError) as error:
                log.warning("pods: %s", error)
            time.sleep(RELIST_SECONDS)

    def sandbox(self, pod: Object) -> Sandbox:
        """An address, a folder and a hosts file for this pod; its peers learn its name."""
        metadata = pod["metadata"]
        folder = self.folder / "pods" / f"{metadata['namespace']}_{metadata['name']}_{metadata['uid'][:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            used = {s.address for s in self._sandboxes.values()}
            address = next(a for a in (f"{self._network}.{n}" for n in ADDRESSES) if a not in used)
            device = self.nodes[pod["spec"]["nodeName"]].device
            sandbox = Sandbox(self.api, self.folder, pod, folder, address, device, self._environment)
            self._sandboxes[metadata["uid"]] = sandbox
            self._write_hosts()
        return sandbox

    def release(self, pod: Object) -> None:
        """The pod is over: its address and name are free again."""
        with self._lock:
            if self._sandboxes.pop(pod["metadata"]["uid"], None) is not None:
                self._write_hosts()

    def forget(self, pod: Object) -> None:
        """The pod's object is gone, or nothing is left to be done about it."""
        self.runners.pop(pod["metadata"]["uid"], None)

    def find(self, name: str) -> PodRunner:
        """The running pod called `name` or `namespace/name`. ValueError when there is none."""
        for runner in list(self.runners.values()):
            if name in (runner.key, runner.key.partition("/")[2]):
                return runner
        raise ValueError(f"no pod {name} on these nodes")

    def node(self, name: str) -> Node:
        """The node of this name. ValueError when there is none."""
        if name not in self.nodes:
            raise ValueError(f"no node {name}; there are {', '.join(self.nodes)}")
        return self.nodes[name]

    def wake(self, node: Node) -> None:
        """A switch of this node was turned: its pods look again."""
        for runner in list(self.runners.values()):
            if runner.node is node:
                runner.wake()

    def _follow(self) -> None:
        """List the bound pods, then follow their changes until the watch ends."""
        selector = "spec.nodeName!="
        listed = self.api.request("GET", "/api/v1/pods", fieldSelector=selector)
        present = {pod["metadata"]["uid"]: pod for pod in listed.get("items") or []}
        for uid, runner in list(self.runners.items()):
            if uid not in present:
                runner.gone()
        for pod in present.values():
            self._see(pod)
        version = listed["metadata"]["resourceVersion"]
        for kind, pod in self.api.watch("/api/v1/pods", version, fieldSelector=selector):
            if kind == "ERROR":
                return
            if kind == "DELETED":
                if (known := self.runners.get(pod["metadata"]["uid"])) is not None:
                    known.gone()
            elif kind != "BOOKMARK":
                self._see(pod)

    def _see(self, pod: Object) -> None:
        uid, node = pod["metadata"]["uid"], self.nodes.get(pod["spec"].get("nodeName", ""))
        if uid in self.runners:
            self.runners[uid].changed(pod)
        elif node is not None and not self._over(pod):
            self.runners[uid] = PodRunner(self, node, pod)
            self.runners[uid].start()

    def _over(self, pod: Object) -> bool:
        """Ended pods nobody deletes, and deleted ones that only wait for a finalizer, need no runner."""
        deleted = pod["metadata"].get("deletionTimestamp") is not None
        ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        return ended and (not deleted or pod["metadata"].get("deletionGracePeriodSeconds") == 0)

    def _beat(self) -> None:
        """Heartbeats of the nodes that have them; who is called not ready all the same says that it is, as a kubelet does.

        The node controller calls nodes not ready that it did not hear, be it that it could not hear, as for a while after
        an outage of the API server. Only the nodes take that back.
        """
        while True:
            beating = [n for n in self.nodes.values() if n.beats.is_set() and n.reachable.is_set()]
            for node in beating:
                try:
                    heartbeat(self.api, node)
                except (ApiError, urllib3.exceptions.HTTPError) as error:
                    log.warning("%s: %s", node.name, error)
            try:
                called = {n["metadata"]["name"]: n for n in self.api.items("/api/v1/nodes")}
                for node in beating:
                    if node.name in called and not is_true(called[node.name], "Ready"):
                        report_ready(self.api, node, self.ports["kubelet"])
                        self.wake(node)  # its pods were called unready with it
            except (ApiError, urllib3.exceptions.HTTPError) as error:
                log.warning("nodes: %s", error)
            time.sleep(HEARTBEAT_SECONDS)

    def _write_hosts(self) -> None:
        """Every pod's hosts file: all names behind headless services, and its own. In place, since they are mounted."""
        lines = ["127.0.0.1 localhost"]
        for sandbox in self._sandboxes.values():
            subdomain = sandbox.pod["spec"].get("subdomain")
            if subdomain and sandbox.pod["spec"].get("hostname"):
                short, namespace = f"{sandbox.hostname}.{subdomain}", sandbox.pod["metadata"]["namespace"]
                service = f"{short}.{namespace}.svc"
                lines.append(f"{sandbox.address} {service}.cluster.local {service} {short}")
        for sandbox in self._sandboxes.values():
            content = "\n".join([*lines, f"{sandbox.address} {sandbox.hostname}", ""]).encode()
            sandbox.hosts_file.touch()
            with sandbox.hosts_file.open("r+b") as file:
                file.write(content)
                file.truncate()


def _serve(agent: Agent) -> None:
    """Commands by HTTP on 127.0.0.1: GET /ready, POST /<command> with a JSON object of arguments."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200 if self.path == "/ready" else 404, {})

        def do_POST(self) -> None:
            arguments = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            try:
                self._answer(200, {"result": COMMANDS[self.path[1:]](agent, **arguments)})
            except (KeyError, TypeError, ValueError) as error:
                self._answer(400, {"error": str(error)})

        def _answer(self, status: int, content: Object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            if self.path != "/ready":
                log.info("%s", format % arguments)

    ThreadingHTTPServer(("127.0.0.1", agent.ports["nodes"]), Handler).serve_forever()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    Agent(Path(sys.argv[1])).run()
