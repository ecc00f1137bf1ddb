"""JAX's persistent compile cache, made to hit in every process of a gang.

JAX writes entries from process 0 only, and makes the topology's fingerprint part of the key. On the CPU that one
differs between the processes of one gang, so that all but the first would compile everything anew at every start.
"""

import hashlib
from typing import Any

import numpy as np


def share_between_processes() -> None:
    """On the CPU: key entries by what all processes of a gang have in common, and by this kind of processor.

    Programs are the same in every process (SPMD); which of their devices are here is decided when one is loaded.
    """
    from jax._src import cache_key

    original = cache_key._hash_accelerator_config

    def hash_accelerators(hash_obj: Any, accelerators: np.ndarray) -> None:
        devices = list(accelerators.flat)
        if devices[0].platform != "cpu":
            original(hash_obj, accelerators)
            return
        layout = [(device.device_kind, device.process_index) for device in devices]
        hash_obj.update(repr((layout, _processor())).encode())

    cache_key._hash_accelerator_config = hash_accelerators


def _processor() -> str:
    """Digest of the instruction sets of this machine's processor: compiled programs may use any of them."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = {line for line in file if line.startswith(("flags", "Features", "model name"))}
    except OSError:
        return ""
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
