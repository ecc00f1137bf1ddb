"""The compiler accepts the options of every TPU generation, and leaves gathers and scatters to cores that compute nothing else."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.preflight.collectives import collectives
from trainer.preflight.executions import Executions
from trainer.preflight.hlo import parse
from trainer.preflight.preflight import ENVIRONMENT

installed = importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ
pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(not installed, reason="libtpu, the TPU compiler, is not installed: pip install 'jax[tpu]'"),
]

# A product of rows by a gathered weight, and the gradient of that weight, scattered.
PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from trainer import xla_flags
from trainer.sharding import AXIS, mesh_of
from trainer.torus import planes

mesh = mesh_of(topologies.get_topology_desc(sys.argv[1], "tpu").devices)
torus = planes(list(mesh.devices.flat), AXIS)

def step(rows, weight):
    product = rows @ torus.all_gather(weight, 0)
    gradient = jax.lax.dot_general(rows, product, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return product, torus.psum_scatter(gradient, 0)

spec, width = P(AXIS, None), 2048
mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False)
rows, weight = (
    jax.ShapeDtypeStruct((n, width), jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for n in (width * mesh.size, width)
)
compiled = jax.jit(mapped, compiler_options=xla_flags.options(mesh)).lower(rows, weight).compile()
print(compiled.as_text())
"""


SLICES = """
from jax.experimental import topologies
from trainer.sharding import mesh_of

devices = topologies.get_topology_desc("tpu7x:2x2x2", "tpu", num_slices=2).devices
print([sorted({d.slice_index for d in part.flat}) for part in mesh_of(devices, slices=2).devices])
"""


def output(program: str, *arguments: str) -> str:
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_replicas_of_a_mesh_are_the_slices() -> None:
    assert output(SLICES) == "[[0], [1]]\n"


@pytest.mark.parametrize("slice_", ["tpu7x:4x4x4", "v5p:4x4x4"])
def test_gathers_and_scatters_run_beside_the_tensorcore(slice_: str) -> None:
    found = collectives(Executions(parse(output(PROGRAM, slice_))), {})
    assert {c.kind for c in found} == {"all-gather", "reduce-scatter"}
    assert sum(c.bytes for c in found if c.kind == "all-gather") == 2 * 2048 * 2048 * (1 + 1 / 4)
    assert all(c.asynchronous for c in found)
