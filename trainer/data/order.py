"""Which instances make up batch t: a function of (recipe, t) and of nothing else.

Batch t of epoch e = t // (N // B) is order_e[k·B : (k+1)·B] with k = t mod (N // B); the N mod B instances left at
the end of an epoch's order are dropped, others in each epoch. No hosts, processes, devices or earlier steps enter, so
there is nothing to save and nothing to restore: the position is the step.

- `olmo_core`: AI2's own order. OLMo-core counts epochs from 1 and shuffles arange(N) with PCG64(seed + epoch); our
  epochs count from 0, so ours is PCG64(seed + e + 1): the recipe's seed 34521 gives PCG64(34522) in the first epoch.
  The permutation has to exist as a whole. Up to 2^24 instances it is computed in memory, once per epoch; larger
  ones are read by range from a table in the run directory, made once by `python -m trainer data order`.
- `feistel`: a keyed bijection computed per index (feistel.py). No table and no memory at any size.

Both are version 1 of themselves (`recipe.data.order.version`): what the same seed gives never changes within one.
"""

from collections import OrderedDict
from functools import lru_cache
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.feistel import Feistel
from trainer.data.hashes import U64
from trainer.errors import ConfigurationError
from trainer.recipe import Recipe
from trainer.rundir.store import NotFound, Store

IN_MEMORY_INSTANCES = 1 << 24  # 64 MiB of uint32, well under a second to shuffle


class Permutation(Protocol):
    """The order of one epoch."""

    def __call__(self, first: int, count: int) -> U64:
        """uint64[count]: instances at positions first .. first + count - 1."""


class BatchOrder:
    """The order of a recipe: batches by number, epochs by batch number. Thread-safe; `open_order` makes one."""

    def __init__(self, recipe: Recipe, store: Store | None = None, in_memory: int = IN_MEMORY_INSTANCES) -> None:
        """Raises ConfigurationError for a corpus smaller than one batch, or too large for `olmo_core`'s uint32."""
        self.batch = recipe.global_batch
        self.instances = recipe.instances
        self.batches_per_epoch = self.instances // self.batch
        self._order = recipe.data.order
        self._store = store
        self._in_memory = in_memory
        self._lock = Lock()
        self._epochs: OrderedDict[int, Permutation] = OrderedDict()
        if not self.batches_per_epoch:
            raise ConfigurationError(
                f"global_batch {self.batch} is larger than the corpus of {self.instances} instances; "
                "lower global_batch or add data files"
            )
        if self._order.kind == "olmo_core" and self.instances > 1 << 32:
            raise ConfigurationError(
                f"data.order.kind olmo_core counts instances in uint32, but the corpus has {self.instances}; "
                "use kind feistel"
            )
        if self._order.kind == "olmo_core" and self._order.seed < -1:
            raise ConfigurationError(f"data.order.seed {self._order.seed}: olmo_core needs a seed that is not negative")

    def epoch_of(self, t: int) -> int:
        """The epoch that batch `t` belongs to, from 0."""
        return t // self.batches_per_epoch

    def batch_ids(self, t: int) -> U64:
        """uint64[B]: the instances of batch `t`, row by row."""
        return self.block(t, t + 1)[0]

    def block(self, first: int, end: int) -> U64:
        """uint64[end - first, B]: batches first .. end-1, which may span epochs."""
        if not 0 <= first < end:
            raise IndexError(f"batches {first}..{end} are no range of batch numbers")
        parts = []
        while first < end:
            epoch, k = divmod(first, self.batches_per_epoch)
            count = min(end - first, self.batches_per_epoch - k)
            parts.append(self._epoch(epoch)(k * self.batch, count * self.batch).reshape(count, self.batch))
            first += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def require(self, first: int, end: int) -> None:
        """Open every epoch of batches first .. end-1 now, so that a missing table stops the start and not step 1.4 M.

        Raises ConfigurationError. For an order without tables nothing is to be opened, and nothing is done.
        """
        if self._order.kind == "olmo_core" and self.instances > self._in_memory and first < end:
            for epoch in range(self.epoch_of(first), self.epoch_of(end - 1) + 1):
                self._epoch(epoch)

    def tail(self, epoch: int) -> U64:
        """uint64[N mod B]: the instances that `epoch` drops."""
        used = self.batches_per_epoch * self.batch
        if used == self.instances:
            return np.empty(0, np.uint64)
        return self._epoch(epoch)(used, self.instances - used)

    def _epoch(self, epoch: int) -> Permutation:
        """The permutation of `epoch`; the last two are kept, because prefetching reads across the border."""
        with self._lock:
            if epoch not in self._epochs:
                self._epochs[epoch] = self._open(epoch)
                if len(self._epochs) > 2:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(epoch)
            return self._epochs[epoch]

    def _open(self, epoch: int) -> Permutation:
        seed = self._order.seed
        if self._order.kind == "feistel":
            return _Computed(Feistel(self.instances, f"seed {seed}, epoch {epoch}"))
        if self.instances <= self._in_memory:
            return _InMemory(olmo_core_permutation(self.instances, seed, epoch))
        if self._store is None:
            raise ConfigurationError(
                f"data.order olmo_core over {self.instances} instances needs its table, "
                "which lies in the run directory; name one"
            )
        return _Table(self._store, table_key(self.instances, seed, epoch), self.instances)


def open_order(recipe: Recipe, store: Store | None = None) -> BatchOrder:
    """The order of a frozen recipe. `store` is the run directory's, needed for `olmo_core` beyond 2^24 instances."""
    return BatchOrder(recipe, store)


def table_key(instances: int, seed: int, epoch: int) -> str:
    """Key of the table of one epoch: little-endian uint32[N], the instances in their order."""
    return f"order/olmo_core-v1-{instances}-{seed}-e{epoch}.u32"


def olmo_core_permutation(instances: int, seed: int, epoch: int) -> npt.NDArray[np.uint32]:
    """uint32[N], as OLMo-core's data loader builds it; `epoch` counts from 0, theirs from 1 (hence the + 1).

    Source: OLMo-core, src/olmo_core/data/data_loader.py, NumpyDataLoaderBase._build_global_indices.
    """
    return _shuffled(instances, seed + epoch + 1)


@lru_cache(maxsize=2)
def _shuffled(instances: int, seed: int) -> npt.NDArray[np.uint32]:
    indices = np.arange(instances, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed)).shuffle(indices)
    indices.flags.writeable = False
    return indices


class _Computed:
    def __init__(self, permutation: Feistel) -> None:
        self._permutation = permutation

    def __call__(self, first: int, count: int) -> U64:
        return self._permutation(np.arange(first, first + count, dtype=np.uint64))


class _InMemory:
    def __init__(self, indices: npt.NDArray[np.uint32]) -> None:
        self._indices = indices

    def __call__(self, first: int, count: int) -> U64:
        return self._indices[first : first + count].astype(np.uint64)


class _Table:
    """Ranges of a table in the run directory. Its length is checked when it is opened, each id when it is read."""

    def __init__(self, store: Store, key: str, instances: int) -> None:
        self._store, self._key, self._instances = store, key, instances
        try:
            whole = len(store.get_range(key, 4 * instances - 4, 8)) == 4
        except NotFound:
            raise ConfigurationError(
                f"{store.uri}: the order's table {key} is missing; make it with: "
                f"python -m trainer data order --run-directory {store.uri}"
            ) from None
        if not whole:
            raise ConfigurationError(
                f"{store.uri}: the order's table {key} is not {4 * instances} bytes long; remove it and make it again "
                f"with: python -m trainer data order --run-directory {store.uri}"
            )

    def __call__(self, first: int, count: int) -> U64:
        ids = np.frombuffer(self._store.get_range(self._key, 4 * first, 4 * count), "<u4")
        if ids.size != count or int(ids.max()) >= self._instances:
            raise ConfigurationError(
                f"{self._store.uri}: the order's table {self._key} is damaged at position {first}; "
                "remove it and make it again"
            )
        return ids.astype(np.uint64)
