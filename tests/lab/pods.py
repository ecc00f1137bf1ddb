"""One pod on its node, from bound to gone: what a kubelet does, in one thread per pod.

Statuses are true: a phase, exit code or time is reported when it has happened, never before. A pod whose node is
partitioned keeps running and reports nothing; what was missed is reported when the node is back.
"""

import contextlib
import logging
import queue
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import urllib3

from tests.lab.api import STRATEGIC, Api, ApiError, Object
from tests.lab.containers import CannotStart, Sandbox, signal_group
from tests.lab.nodes import Node, now

RETRY_SECONDS = 0.5
RESTART_SECONDS = 1.0  # of a container that is to be restarted; doubled each time
RESTART_MAX_SECONDS = 10.0
CONFIRM_SECONDS = 2.0  # until it is said again that a deleted pod has ended

log = logging.getLogger("pods")


class Host(Protocol):
    """What a pod needs from the agent it runs under."""

    api: Api

    def sandbox(self, pod: Object) -> Sandbox: ...
    def release(self, pod: Object) -> None: ...
    def forget(self, pod: Object) -> None: ...


@dataclass
class Container:
    """A container of a running pod: its process, or how the last one ended."""

    spec: Object
    process: subprocess.Popen[bytes] | None = None
    started: str = ""
    ended: Object | None = None  # state.terminated of the last process
    waiting: Object | None = None  # state.waiting: why there is no process yet
    restarts: int = 0

    def status(self) -> Object:
        """Its containerStatus."""
        name = self.spec["name"]
        base: Object = {"name": name, "image": self.spec.get("image", ""), "imageID": "", "restartCount": self.restarts}
        if self.process is not None:
            state: Object = {"running": {"startedAt": self.started}}
            last = {"lastState": {"terminated": self.ended}} if self.ended else {}
            return {**base, **last, "ready": True, "started": True, "containerID": self.identifier, "state": state}
        if self.waiting is not None:
            return {**base, "ready": False, "started": False, "state": {"waiting": self.waiting}}
        if self.ended is not None:
            return {**base, "ready": False, "started": False, "state": {"terminated": self.ended}}
        return {**base, "ready": False, "started": False, "state": {"waiting": {"reason": "PodInitializing"}}}

    @property
    def identifier(self) -> str:
        return f"process://{self.process.pid}" if self.process else ""


class PodRunner(threading.Thread):
    """Runs a pod. `changed`, `gone` and `wake` are called by others; the rest is its own thread's."""

    def __init__(self, host: Host, node: Node, pod: Object) -> None:
        super().__init__(daemon=True, name=pod["metadata"]["name"])
        self.node = node
        self.pod = pod
        self.hang: str | None = None  # None, "alive" (nothing is done on deletion) or "dead" (killed, never confirmed)
        self._host = host
        self._events: queue.SimpleQueue[tuple[str, Container | None]] = queue.SimpleQueue()
        self._sandbox: Sandbox | None = None
        self._containers = [Container(c) for c in pod["spec"]["containers"]]
        self._init = [Container(c) for c in pod["spec"].get("initContainers") or []]
        self._deleting = pod["metadata"].get("deletionTimestamp") is not None
        self._gone = False
        self._phase = "Pending"
        self._start_time = now()

    @property
    def key(self) -> str:
        return f"{self.pod['metadata']['namespace']}/{self.pod['metadata']['name']}"

    @property
    def path(self) -> str:
        return "/api/v1/namespaces/{namespace}/pods/{name}".format(**self.pod["metadata"])

    def changed(self, pod: Object) -> None:
        """The pod's object changed."""
        self.pod = pod
        if pod["metadata"].get("deletionTimestamp") is not None and not self._deleting:
            self._deleting = True
            self.wake()

    def gone(self) -> None:
        """The pod's object is no more."""
        self._gone = True
        self.wake()

    def wake(self) -> None:
        """Look again: a switch was turned."""
        self._events.put(("wake", None))

    def kill(self, number: int) -> int:
        """Signal every process of the pod; how many containers that were."""
        running = [c.process for c in (*self._init, *self._containers) if c.process is not None]
        for process in running:
            signal_group(process, number)
        return len(running)

    def run(self) -> None:
        try:
            self._live()
        except Exception:
            log.exception("%s: the agent failed", self.key)
            self.kill(signal.SIGKILL)
        finally:
            if self._sandbox is not None:
                self._sandbox.remove_volumes()
            self._host.release(self.pod)
            self._host.forget(self.pod)

    def _live(self) -> None:
        while not (self.node.accepts.is_set() and self.node.reachable.is_set()):
            if self._stopping():
                self._finish()
                return
            self._events.get()
        if not self._stopping():
            self._sandbox = self._host.sandbox(self.pod)
            if self._run_init():
                self._run_containers()
        self._finish()

    def _stopping(self) -> bool:
        """Whether the pod is to end, as far as its node can know."""
        return (self._deleting or self._gone) and self.node.reachable.is_set() and self.hang != "alive"

    def _run_init(self) -> bool:
        """Init containers one after another; False when the pod ends there."""
        for container in self._init:
            while not self._start(container):
                if self._wait(RESTART_SECONDS):
                    return False
            self._report()
            while container.process is not None:
                if self._next(None):
                    return False
            assert container.ended is not None
            if container.ended["exitCode"]:
                self._phase = "Failed"
                self._report()
                return False
        return True

    def _run_containers(self) -> None:
        """Start them all and stay until the pod has ended, or is to end."""
        restart: dict[str, float] = {c.spec["name"]: 0.0 for c in self._containers}
        policy = self.pod["spec"].get("restartPolicy", "Always")
        while True:
            for container in self._containers:
                name = container.spec["name"]
                if name in restart and time.monotonic() >= restart[name]:
                    if self._start(container):
                        del restart[name]
                    else:
                        restart[name] = time.monotonic() + RESTART_SECONDS
            if any(c.process for c in self._containers):
                self._phase = "Running"
            self._report()
            if self._next(min(restart.values()) - time.monotonic() if restart else None):
                return
            for container in self._containers:
                if container.process is not None or container.ended is None or container.spec["name"] in restart:
                    continue
                if policy == "Always" or (policy == "OnFailure" and container.ended["exitCode"]):
                    delay = min(RESTART_SECONDS * 2**container.restarts, RESTART_MAX_SECONDS)
                    restart[container.spec["name"]] = time.monotonic() + delay
                    container.restarts += 1
                    container.waiting = {"reason": "CrashLoopBackOff", "message": f"back-off {delay:.0f}s"}
            if not restart and all(c.process is None for c in self._containers):
                self._phase = self._final_phase()
                self._report()
                return

    def _start(self, container: Container) -> bool:
        """Start its process; when that cannot be, its status says why."""
        assert self._sandbox is not None
        try:
            process = self._sandbox.start(container.spec)
        except (CannotStart, OSError) as error:
            container.waiting = {"reason": "CreateContainerConfigError", "message": str(error)}
            return False
        container.process, container.started, container.waiting = process, now(), None
        threading.Thread(target=self._await_exit, args=(container, process), daemon=True).start()
        return True

    def _await_exit(self, container: Container, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            signal_group(process, signal.SIGKILL)  # what it left behind ends with the container
        container.ended = {
            "exitCode": 128 - code if code < 0 else code,
            "reason": "Error" if code else "Completed",
            "startedAt": container.started,
            "finishedAt": now(),
            "containerID": f"process://{process.pid}",
        }
        container.process = None
        self._events.put(("exit", container))

    def _next(self, seconds: float | None) -> bool:
        """Wait for the next event or so long; True when the pod is to end."""
        with contextlib.suppress(queue.Empty):
            self._events.get(timeout=None if seconds is None else max(seconds, 0.0))
        return self._stopping()

    def _wait(self, seconds: float) -> bool:
        """Report, and wait so long; True when the pod is to end."""
        self._report()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._next(deadline - time.monotonic()):
                return True
        return False

    def _finish(self) -> None:
        """End what runs, within the grace period; then, once the pod is being deleted, confirm that it is gone."""
        while not self._stopping():  # it ended by itself; its object stays until somebody deletes it
            self._events.get()
        grace = self.pod["metadata"].get("deletionGracePeriodSeconds")
        if grace is None:
            grace = self.pod["spec"].get("terminationGracePeriodSeconds", 30)
        self.kill(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.running and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=max(deadline - time.monotonic(), 0.01))
        while self.running:
            self.kill(signal.SIGKILL)
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=0.2)
        if self._phase not in ("Succeeded", "Failed"):
            self._phase = self._final_phase()
        while self.hang is not None and not self._gone:
            self._events.get()
        self._host.release(self.pod)  # its successor of the same name may start before its object is gone
        while not self._gone:
            self._report()
            self._until_answered(lambda: self._host.api.delete(self.path, uid=self.pod["metadata"]["uid"], grace=0))
            with contextlib.suppress(queue.Empty):  # finalizers, such as a Job's, are somebody else's to remove
                self._events.get(timeout=CONFIRM_SECONDS)

    @property
    def running(self) -> bool:
        """Whether any process of the pod runs."""
        return any(c.process is not None for c in (*self._init, *self._containers))

    def _final_phase(self) -> str:
        ended = [c.ended for c in self._containers]
        return "Succeeded" if all(e is not None and e["exitCode"] == 0 for e in ended) else "Failed"

    def _report(self) -> None:
        """Write the pod's status, however long that takes."""
        assert self._phase
        ready = self._phase == "Running" and all(c.process is not None for c in self._containers)
        over = self._phase in ("Succeeded", "Failed")
        reason = {"reason": "PodCompleted" if self._phase == "Succeeded" else "PodFailed"} if over else {}
        initialized = all(c.ended is not None and c.ended["exitCode"] == 0 for c in self._init)
        known = {c["type"]: c for c in self.pod.get("status", {}).get("conditions") or []}

        def condition(kind: str, value: bool, extra: Object) -> Object:
            text = "True" if value else "False"
            old = known.get(kind, {})
            since = old.get("lastTransitionTime") if old.get("status") == text else None
            return {"type": kind, "status": text, "lastTransitionTime": since or now(), **extra}

        status: Object = {
            "phase": self._phase,
            "startTime": self._start_time,
            "hostIP": "127.0.0.1",
            "conditions": [
                condition("Initialized", initialized, {}),
                condition("Ready", ready, reason),
                condition("ContainersReady", ready, reason),
            ],
            "containerStatuses": [c.status() for c in self._containers],
        }
        if self._init:
            status["initContainerStatuses"] = [c.status() for c in self._init]
        if self._sandbox is not None:
            status |= {"podIP": self._sandbox.address, "podIPs": [{"ip": self._sandbox.address}]}
        change = {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": status}
        self._until_answered(lambda: self._host.api.patch(f"{self.path}/status", change, STRATEGIC))

    def _there(self) -> bool:
        """False when the pod is known to be gone, also if another has its name; a conflict may be with another writer."""
        try:
            found = self._host.api.find(self.path)
        except (ApiError, urllib3.exceptions.HTTPError):
            return True
        return found is not None and found["metadata"]["uid"] == self.pod["metadata"]["uid"]

    def _until_answered(self, call: object) -> None:
        """Try until the API server has answered; it may be away, or this node cut off."""
        assert callable(call)
        while not self._gone:
            if self.node.reachable.wait(RETRY_SECONDS):
                try:
                    call()
                    return
                except ApiError as error:
                    log.warning("%s: %s", self.key, error)
                    if error.status in (404, 422) or (error.status == 409 and not self._there()):
                        return  # gone, refused for good, or another pod of that name
                except urllib3.exceptions.HTTPError as error:
                    log.warning("%s: %s", self.key, error)
                time.sleep(RETRY_SECONDS)
