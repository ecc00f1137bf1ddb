"""Over which links of the torus `reduction: invariant` sends a gradient: the load of the busiest one, per chip topology.

Counted, not measured: recursive halving by the bits of the device's number (trainer.reduction), each message on a shortest
path, one dimension after the other, split both ways where both are equally short. Against the least that a reduce-scatter
can load it with: the devices of a chip add theirs, every chip sends 1 - 1/chips of that, evenly over its six links.
Needs libtpu, no TPU. Prints one JSON line.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax.experimental import topologies

from trainer.sharding import mesh_of

SLICES = ("tpu7x:4x4x4", "tpu7x:4x8x8", "v5p:4x4x4", "v5p:4x4x8")
Chip = tuple[int, ...]


def shares(source: Chip, target: Chip, extent: Chip) -> dict[tuple[Chip, int, int], float]:
    """How much of a message goes over each link (chip, dimension, direction) on its way."""
    loads: dict[tuple[Chip, int, int], float] = defaultdict(float)
    at = list(source)
    for dim, size in enumerate(extent):
        ahead = (target[dim] - at[dim]) % size
        ways = {1: ahead, -1: size - ahead} if ahead else {}
        short = {way: n for way, n in ways.items() if n == min(ways.values())}
        for way, hops in short.items():
            chip = list(at)
            for _ in range(hops):
                loads[tuple(chip), dim, way] += 1 / len(short)
                chip[dim] = (chip[dim] + way) % size
        at[dim] = target[dim]
    return loads


def count(name: str) -> dict[str, Any]:
    """Loads of the busiest link, one way, in gradients of one device: 1 is all of its bytes."""
    devices = list(mesh_of(topologies.get_topology_desc(name, "tpu").devices).devices.flat)
    extent = tuple(1 + max(d.coords[dim] for d in devices) for dim in range(3))
    rounds, total = [], 0.0
    for bit in range(len(devices).bit_length() - 1):
        loads: dict[tuple[Chip, int, int], float] = defaultdict(float)
        for number, device in enumerate(devices):
            partner = devices[number ^ (1 << bit)]
            for link, share in shares(tuple(device.coords), tuple(partner.coords), extent).items():
                loads[link] += share / 2 ** (bit + 1)
        busiest = max(loads.values(), default=0.0)
        rounds.append(round(busiest, 4))
        total += busiest
    least = (1 - 1 / (extent[0] * extent[1] * extent[2])) / 6
    return {
        "rounds": rounds,
        "busiest_link": round(total, 3),
        "least": round(least, 3),
        "ratio": round(total / least, 2),
    }


if __name__ == "__main__":
    print(json.dumps({name: count(name) for name in SLICES}))
