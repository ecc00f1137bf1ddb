"""A training run is preempted, killed, torn, stopped and shrunk, and ends as if nothing had happened. Three minutes.

Two runs of one recipe, each looked after by its own `untildone run`: a reference that nobody disturbs, and one to which
this script does everything that happens to runs on a large cluster. Then the records of both are checked, and a report
is written: demo-out/report.html.

    python examples/demo.py [--out demo-out]
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from demo_watch import Fancy, Plain, Sight, Watched, display  # noqa: E402

from orchestrator.clusters.local import LocalCluster  # noqa: E402

PATIENCE = 240.0  # seconds until something that must happen counts as broken
LOOK_EVERY = 0.1  # seconds
CHECK_EVERY = 0.01  # seconds; a checkpoint save is over within a few of these


class Broken(Exception):
    """Something that must happen did not."""


@dataclass(frozen=True)
class Interruption:
    """One thing that is done to the run: when, what, and how it shows that it had its effect."""

    name: str
    words: str
    when: Callable[[Sight], bool]
    act: Callable[[], None]
    over: Callable[[Sight, Sight], bool]  # (the run when it was interrupted, the run now)
    then: Callable[[], None] | None = None


def story(run: Watched) -> Iterator[Interruption]:
    """The interruptions, in order. Each waits for a step or phase that it sees; none for a time that it guesses."""
    cluster = run.cluster

    def capacity(devices: int) -> Callable[[], None]:
        return lambda: cluster.set_capacity({"cpu": devices})

    def send(number: signal.Signals, ranks: tuple[int, ...]) -> Callable[[], None]:
        def act() -> None:
            for rank, pid in run.pids().items():
                if rank in ranks:
                    os.kill(pid, number)

        return act

    last = [(0, 0)]  # the start that was interrupted last; only a later one is interrupted next
    lost = [0]  # the highest step that an interrupted start had reached

    def training(steps: int) -> Callable[[Sight], bool]:
        """A new start is training, and this many steps beyond the last commit."""
        return lambda s: s.key > last[0] and s.phase == "Training" and s.step >= s.committed + steps

    def ended(seen: Sight) -> bool:
        """The start that was interrupted stands in the ledger."""
        last[0] = seen.key
        lost[0] = max(lost[0], seen.step)
        return run.cause(seen) is not None

    yield Interruption(
        "preemption",
        "all devices are taken away: SIGTERM, then a grace period",
        training(4),
        capacity(0),
        lambda seen, _: ended(seen),
        capacity(8),  # they come back
    )
    yield Interruption(
        "host failure",
        "SIGKILL of one of the two host processes",
        training(3),
        send(signal.SIGKILL, (1,)),
        lambda seen, _: ended(seen),
    )
    yield Interruption(
        "torn save",
        "SIGKILL of every process in the middle of a checkpoint save",
        lambda s: s.key > last[0] and run.torn_save(s) is not None,
        send(signal.SIGKILL, (0, 1)),
        lambda seen, _: ended(seen),
    )
    yield Interruption(
        "hang",
        "SIGSTOP of one host process: alive, but no step any more",
        training(2),
        send(signal.SIGSTOP, (1,)),
        lambda seen, _: ended(seen),
    )
    yield Interruption(
        "shrink",
        "capacity falls to 2 devices: another plan, more accumulation, the same batch",
        # Every lost step has been done again by now, on the same devices: all of them must be bit-equal.
        lambda s: s.key > last[0] and s.phase == "Training" and s.step > max(lost[0], s.committed) + 1,
        capacity(2),
        lambda seen, now: ended(seen) and now.plan == "cpu-2" and now.phase == "Training" and now.step > now.committed,
    )
    yield Interruption(
        "growth",
        "capacity returns: back to 8 devices at the next commit",
        lambda s: s.plan == "cpu-2" and s.step >= s.committed + 1,
        capacity(8),
        lambda seen, now: ended(seen) and now.plan == "cpu-8" and now.phase in ("Training", "Done"),
    )


class Demo:
    """The two runs, their orchestrators, and the screen."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.runs: dict[str, Watched] = {}
        self.orchestrators: dict[str, subprocess.Popen[bytes]] = {}
        document = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
        self.target = int(document["spec"]["targetStep"])
        self.document = document
        self.screen: Plain | Fancy = display(self.target)

    def prepare(self) -> None:
        """Token files, and a folder without the traces of an earlier demo. The compile cache is kept."""
        for name in ("run", "reference", "local", "report.html", "summary.json"):
            path = self.out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.call("trainer", "data", "bytes", "--source", "stdlib", "--out", str(self.out / "data"))

    def begin(self, name: str, **changes: object) -> Watched:
        """Start `untildone run` for one run, on a local cluster of its own."""
        document = {**self.document, "metadata": {"name": name}}
        folder = self.out / ("run" if name == "demo" else name)
        document["spec"] = {
            **self.document["spec"],
            "data": {"root": str(self.out / "data")},
            "runDirectory": str(folder),
            "compileCache": str(self.out / "cache"),
            **changes,
        }
        file = self.out / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        local = self.out / "local" / name
        cluster = LocalCluster(local)
        cluster.set_capacity({"cpu": 8})
        with open(self.out / f"{name}.log", "wb") as log:
            self.orchestrators[name] = subprocess.Popen(
                [*UNTILDONE, "run", "-f", str(file), "--local", str(local)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
        self.runs[name] = Watched(name, folder, cluster)
        return self.runs[name]

    def interrupt(self, run: Watched) -> None:
        """The story, one interruption after the other."""
        for number, step in enumerate(story(run), 1):
            title = f"{number}/6 {step.name}"
            self.screen.doing(f"{title}: waiting for its moment")
            seen = self.wait_for(title, step.when)
            step.act()
            torn = run.torn_save(seen) if step.name == "torn save" else None
            self.screen.say(f"{title}: start {seen.name}, step {torn or seen.step}: {step.words}")
            self.screen.doing(f"{title}: {step.words}")
            over = step.over
            after = self.wait_for(title, lambda now, seen=seen, over=over: over(seen, now))
            if step.then:
                step.then()
            self.screen.say(f"     start {seen.name} ended: {run.cause(seen)}; step {after.committed} is committed")
        self.screen.doing("nothing more is done to it; both runs finish")

    def wait_for(self, what: str, condition: Callable[[Sight], bool]) -> Sight:
        """Look until `condition` holds. Raises Broken when it takes too long, or an orchestrator gave up."""
        run = self.runs["demo"]
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            sight = run.look()
            for name, other in self.runs.items():
                self.screen.show(name, sight if other is run else other.look())
            soon = time.monotonic() + LOOK_EVERY
            while time.monotonic() < soon:
                if condition(sight):
                    return sight
                time.sleep(CHECK_EVERY)
            for name, process in self.orchestrators.items():
                if process.poll() not in (None, 0):
                    raise Broken(f"untildone run of {name} ended with {process.returncode}; see {self.out}/{name}.log")
        seen = f"the run shows {run.look()}"
        raise Broken(f"{what}: nothing happened for {PATIENCE:.0f} s; {seen}; see {self.out}/demo.log")

    def finish(self) -> None:
        """Wait for both orchestrators to say that their run is done."""
        both = list(self.orchestrators.values())
        self.wait_for("the end", lambda _: all(p.poll() == 0 for p in both))

    def call(self, module: str, *arguments: str) -> None:
        """Run a Python module to its end. Raises Broken with its last line when it fails."""
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise Broken(f"python -m {module} {' '.join(arguments[:2])}: exit code {done.returncode}: {' '.join(last)}")

    def stop_everything(self) -> None:
        """Leave no process behind, however it ended."""
        for name, process in self.orchestrators.items():
            if process.poll() is None:
                process.kill()
                process.wait()
            cluster = LocalCluster(self.out / "local" / name)
            for gang in cluster.observe(name).gangs:
                cluster.delete(gang.name, gang.uid, 0)


UNTILDONE = [sys.executable, "-m", "orchestrator"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for everything that is written")
    out = parser.parse_args().out.resolve()
    began = time.monotonic()
    demo = Demo(out)
    try:
        with demo.screen:
            demo.screen.doing("tokenising the Python standard library's sources")
            demo.prepare()
            demo.screen.say("the run begins; what it compiles is kept for every later start")
            demo.screen.doing("compiling the training step")
            run = demo.begin("demo")
            demo.wait_for("the first step", lambda s: s.phase == "Training")
            demo.screen.say("beside it begins the reference, which nobody disturbs")
            reference = demo.begin("reference", evaluation={})
            demo.interrupt(run)
            demo.finish()
            demo.screen.doing("")
    except Broken as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        demo.stop_everything()
    return conclude(demo, run, reference, began)


def conclude(demo: Demo, run: Watched, reference: Watched, began: float) -> int:
    """verify, report, and a short verdict. The exit code is 1 when any proof fails."""
    print(f"\nuntildone verify {run.folder} --against {reference.folder}", flush=True)
    checked = subprocess.run(
        [*UNTILDONE, "verify", str(run.folder), "--against", str(reference.folder)], cwd=ROOT, check=False
    )
    print(flush=True)
    reported = subprocess.run(
        [*UNTILDONE, "report", str(run.folder), "--reference", str(reference.folder), "-o", str(demo.out)],
        cwd=ROOT,
        check=False,
    )
    print(f"{time.monotonic() - began:.0f} s in all")
    return 1 if checked.returncode or reported.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
