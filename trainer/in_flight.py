"""How much of a checkpoint may be on its way at once while it is restored.

Orbax reads all leaves of a state at once, each twice in memory until it has reached its device: as read and as decoded.
On a CPU, where that is the memory of the state itself, a restore so needed 1.4 times the state: part of the rest was
on its way, part had been and was kept by the allocator.
"""

import asyncio
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import jax
import orbax.checkpoint as ocp

CPU_PARTS = 40  # of this process's part of the state, one is on its way: two copies of it, 5 % of the state
ACCELERATOR_BYTES = 1 << 30  # in the host's memory, beside the devices': enough reads to keep a bucket busy

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_LARGE, _LARGEST = 128 << 10, 32 << 20  # where glibc's own threshold begins, and how far it rises by itself


class Allowance:
    """Bytes to be shared by reads. One that asks for more than there are goes alone."""

    def __init__(self, nbytes: int) -> None:
        self._most = self._left = nbytes
        self._changed = asyncio.Condition()

    async def wait_for_bytes(self, requested_bytes: int) -> None:
        needed = min(requested_bytes, self._most)
        async with self._changed:
            await self._changed.wait_for(lambda: self._left >= needed)
            self._left -= needed

    async def release_bytes(self, requested_bytes: int) -> None:
        async with self._changed:
            self._left += min(requested_bytes, self._most)
            self._changed.notify_all()


class ArrayHandler(ocp.type_handlers.ArrayHandler):
    """Orbax's own, with an allowance for reading."""

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        shares = [_share(arg) for arg in args or ()]
        allowance = Allowance(max(1, sum(shares) // CPU_PARTS if _on_cpu(args) else ACCELERATOR_BYTES))
        limited = [copy(info) for info in infos]
        for info in limited:
            info.byte_limiter = allowance
        return await super().deserialize(limited, args)


def _share(arg: Any) -> int:
    """Bytes of a leaf that this process's devices will hold."""
    shard = arg.sharding.shard_shape(arg.global_shape)
    size = jax.numpy.dtype(arg.dtype).itemsize
    for length in shard:
        size *= length
    return size * len(arg.sharding.addressable_devices)


def _on_cpu(args: Any) -> bool:
    return all(next(iter(arg.sharding.device_set)).platform == "cpu" for arg in args or ())


@contextmanager
def freed_at_once(devices: Sequence[Any]) -> Iterator[None]:
    """With CPUs for devices, large buffers go back to the system when they are freed, and are not kept for later.

    Afterwards they are kept again, as glibc has it in a process that has run for a while: steps live by that.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    if mallopt is None or any(device.platform != "cpu" for device in devices):
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
