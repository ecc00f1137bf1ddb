"""A restore holds the state and little more: measured in a process of its own, on CPUs, where all of it is one memory."""

import subprocess
import sys
from pathlib import Path

from tests.support.gang import ROOT

MEASURE = """
import os, sys
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from trainer.checkpoint import Checkpoints
from trainer.sharding import mesh_of

LEAVES, SHAPE = 32, (3072, 1024)
folder = Path(sys.argv[1])
at = NamedSharding(mesh_of(jax.devices()), PartitionSpec("fsdp"))
checkpoints = Checkpoints()

def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

def abstract(leaves):
    return {f"leaf{i}": jax.ShapeDtypeStruct(SHAPE, "float32", sharding=at) for i in range(leaves)}

if sys.argv[2] == "save":
    random = np.random.default_rng(0)
    for name, leaves in (("one", 1), ("all", LEAVES)):
        state = {f"leaf{i}": jax.device_put(random.random(SHAPE, np.float32), at) for i in range(leaves)}
        checkpoints.begin_save(str(folder / name), state)
        checkpoints.wait(name)
else:
    checkpoints.restore(str(folder / "one"), abstract(1))  # whatever is loaded once
    before = kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    state = checkpoints.restore(str(folder / "all"), abstract(LEAVES))
    print((kib("VmHWM") - before) * 1024 / sum(leaf.nbytes for leaf in state.values()))
"""


def test_a_restore_needs_at_most_a_tenth_more_than_the_state(tmp_path: Path) -> None:
    def call(what: str) -> str:
        command = [sys.executable, "-c", MEASURE, str(tmp_path), what]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=140).stdout

    call("save")
    times = float(call("restore"))
    assert 0.9 < times <= 1.1
