"""What hosts do, on command. Each is a switch or a blow; the nodes' agent carries it out.

python -m tests.lab.faults [--folder DIR] kill_pod pod=default/demo-slice-0-0-abcde
python -m tests.lab.faults [--folder DIR] partition node=tpu7x-2x2x2-0-1
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import urllib3

from tests.lab.api import Object

if TYPE_CHECKING:
    from tests.lab.agent import Agent


def kill_pod(agent: "Agent", pod: str, number: int | str = signal.SIGKILL) -> int:
    """Signal all processes of a pod; how many containers that were."""
    return agent.find(pod).kill(int(number))


def stop_heartbeats(agent: "Agent", node: str) -> None:
    """The node becomes NotReady; its pods run on and are reported."""
    agent.node(node).beats.clear()


def start_heartbeats(agent: "Agent", node: str) -> None:
    """The node becomes Ready again."""
    agent.node(node).beats.set()
    agent.wake(agent.node(node))  # the node controller has called its pods unready


def partition(agent: "Agent", node: str) -> None:
    """The node neither sees nor reports anything; its pods' processes live on."""
    agent.node(node).reachable.clear()


def heal(agent: "Agent", node: str) -> None:
    """The end of a partition, when what was missed is made up for; or the return of a killed host, repaired."""
    agent.node(node).reachable.set()
    agent.wake(agent.node(node))


def kill_host(agent: "Agent", node: str) -> int:
    """The host is lost: its processes die, and nothing more is heard of it until `heal`."""
    agent.node(node).reachable.clear()
    runners = [r for r in list(agent.runners.values()) if r.node.name == node]
    return sum(r.kill(signal.SIGKILL) for r in runners)


def refuse_pods(agent: "Agent", node: str) -> None:
    """Pods bound to the node from now on stay Pending."""
    agent.node(node).accepts.clear()


def accept_pods(agent: "Agent", node: str) -> None:
    """Pods run on the node again, those that waited too."""
    agent.node(node).accepts.set()
    agent.wake(agent.node(node))


def hang_pod(agent: "Agent", pod: str, process: str = "alive") -> None:
    """Once deleted, the pod stays Terminating: with its process `alive`, or `dead` but never confirmed."""
    if process not in ("alive", "dead"):
        raise ValueError(f"process={process}: alive or dead")
    agent.find(pod).hang = process


def release_pod(agent: "Agent", pod: str) -> None:
    """The end of `hang_pod`."""
    runner = agent.find(pod)
    runner.hang = None
    runner.wake()


def warn_of_termination(agent: "Agent", node: str) -> None:
    """GKE's taint of a host that is about to be terminated."""
    path = agent.node(node).path
    taints = agent.api.get(path)["spec"].get("taints") or []
    taint = {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}
    agent.api.patch(path, {"spec": {"taints": [*taints, taint]}})


def begin_maintenance(agent: "Agent", node: str) -> None:
    """GKE's label of a host under maintenance."""
    labels = {"cloud.google.com/active-node-maintenance": "ONGOING"}
    agent.api.patch(agent.node(node).path, {"metadata": {"labels": labels}})


def end_warnings(agent: "Agent", node: str) -> None:
    """Take the termination taint and the maintenance label away."""
    path = agent.node(node).path
    taints = agent.api.get(path)["spec"].get("taints") or []
    kept = [t for t in taints if not t["key"].startswith("cloud.google.com/")]
    agent.api.patch(
        path, {"metadata": {"labels": {"cloud.google.com/active-node-maintenance": None}}, "spec": {"taints": kept}}
    )


def repair(agent: "Agent") -> None:
    """The end of all that was done to hosts and pods, but for taints and labels."""
    for node in agent.nodes.values():
        for switch in (node.beats, node.reachable, node.accepts):
            switch.set()
    for runner in list(agent.runners.values()):
        runner.hang = None
        runner.wake()


COMMANDS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        kill_pod,
        stop_heartbeats,
        start_heartbeats,
        partition,
        heal,
        kill_host,
        refuse_pods,
        accept_pods,
        hang_pod,
        release_pod,
        warn_of_termination,
        begin_maintenance,
        end_warnings,
        repair,
    )
}


def command(port: int, name: str, **arguments: str | int) -> Any:
    """Have the agent on this port carry out a command; its result. ValueError with what was wrong with it."""
    response = urllib3.request("POST", f"http://127.0.0.1:{port}/{name}", body=json.dumps(arguments), timeout=60.0)
    content: Object = response.json()
    if response.status != 200:
        raise ValueError(f"{name}: {content['error']}")
    return content["result"]


def main() -> int:
    from tests.lab.up import default_folder

    parser = argparse.ArgumentParser(prog="python -m tests.lab.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="the lab's own folder")
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("arguments", nargs="*", metavar="name=value")
    options = parser.parse_args()
    ports = json.loads((options.folder / "lab.json").read_text())["ports"]
    arguments = dict(a.partition("=")[::2] for a in options.arguments)
    try:
        result = command(ports["nodes"], options.command, **arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if result is not None:
        print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
