"""Batches for one process, read ahead by Grain. The position is the step: nothing is saved, nothing is restored.

Grain sees a random-access source whose element i is this process's share of batch first + i, and reads it with a few
threads. It is told of no shards, no shuffle, no epochs and no workers: which rows belong to which process is decided
here once (`process_rows`), from the plan. (Slicing by process and giving Grain shard options too makes every process
read each P-th element of its own share; a third of a corpus is then never seen.)

The ids travel with the tokens from the one array that the reader followed, and are compared with the order again
when a batch is handed out; the devices hash them once more into the step log.
"""

import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from trainer.data.hashes import U32, U64, join_ids, split_ids
from trainer.data.mix import I32, Mix
from trainer.data.order import BatchOrder
from trainer.errors import ConfigurationError, TrainerError
from trainer.plan import Plan
from trainer.recipe import Recipe

READ_THREADS = 4
PREFETCHED_BATCHES = 8
PADDING_ID = 0xFFFFFFFF_FFFFFFFF  # the id of a row that holds no instance


class Element(NamedTuple):
    """What the source reads for one batch number: the share of one process."""

    t: int
    tokens: I32  # int32[accumulation, R / P, S]; eos_id in rows that hold no instance
    ids: U64  # uint64[accumulation, R / P], as they were read; PADDING_ID in rows that hold no instance


class WrongInstances(TrainerError):
    """The reader returned other instances than the order gives this process. A bug here, never a user's mistake."""


def process_rows(plan: Plan, process_index: int) -> npt.NDArray[np.int64]:
    """int64[accumulation, R / P]: rows of the global batch that a process holds, R = data_parallel · micro_batch.

    The global batch's rows, and after them those that hold no instance, reshape to [accumulation, R]; each process owns
    a contiguous, equal part of axis 1, or the processes whose devices share sequences own one together: each reads all
    of it. Raises ConfigurationError where that part is not whole.
    """
    rows, together = plan.rows_per_pass, _readers(plan)
    parts = plan.processes // together
    if rows % parts:
        raise ConfigurationError(
            f"plan {plan.device_type} × {plan.slices}: {rows} rows per forward pass do not divide among "
            f"{plan.processes} processes; choose a device type with fewer hosts or a larger global_batch"
        )
    share, number = rows // parts, process_index // together
    whole = np.arange(plan.rows).reshape(plan.accumulation, rows)
    return whole[:, number * share : (number + 1) * share]


def _readers(plan: Plan) -> int:
    """How many processes, neighbours in their order, read the same rows."""
    return max(1, plan.together // plan.devices_per_process)


def ids_of_rows(order: BatchOrder, t: int, rows: npt.NDArray[np.int64]) -> U64:
    """uint64 of the shape of `rows`: their instances in batch `t`, PADDING_ID where a row holds none."""
    batch = order.batch_ids(t)
    ids = np.full(rows.shape, PADDING_ID, np.uint64)
    real = rows < len(batch)
    ids[real] = batch[rows[real]]
    return ids


def tokens_of(mix: Mix, ids: U64) -> I32:
    """int32[*ids.shape, S]: the instances' tokens, eos_id throughout where there is none. For those nothing is read."""
    real = ids != PADDING_ID
    if real.all():
        return mix.instances(ids.reshape(-1)).reshape(*ids.shape, -1)
    tokens = np.full((*ids.shape, mix.recipe.sequence_length), mix.recipe.data.eos_id, np.int32)
    if real.any():
        tokens[real] = mix.instances(ids[real])
    return tokens


class BatchSource:
    """Random access to one process's share of every batch from `first_batch` on; the source that Grain reads."""

    def __init__(self, mix: Mix, order: BatchOrder, rows: npt.NDArray[np.int64], first_batch: int) -> None:
        self._mix, self._order, self._rows, self._first = mix, order, rows, first_batch

    def __len__(self) -> int:
        """Epochs follow one another without end. A length is given, or Grain would search for it."""
        return sys.maxsize

    def __getitem__(self, index: int) -> Element:
        return self.read(self._first + index)

    def read(self, t: int) -> Element:
        """This process's share of batch `t`."""
        ids = ids_of_rows(self._order, t, self._rows)
        return Element(t, tokens_of(self._mix, ids), ids)


class Loader:
    """Iterates (t, {"tokens": int32[a, R/P, S], "ids": uint32[a, R/P, 2]}) from `first_batch` on, without end.

    Close it, or use it as a context manager: reading threads end with it.
    """

    def __init__(
        self,
        mix: Mix,
        order: BatchOrder,
        recipe: Recipe,
        plan: Plan,
        process_index: int,
        first_batch: int = 0,
        *,
        source: BatchSource | None = None,
        threads: int = READ_THREADS,
        prefetch: int = PREFETCHED_BATCHES,
    ) -> None:
        """`source` replaces the reader in tests. Reading ahead begins at the first `next`.

        Raises ConfigurationError for a plan of another global batch or with unequal shares.
        """
        # Late, because Grain imports JAX and Orbax: 0.2 s beside them, 2.4 s where they are not loaded yet.
        import grain

        if plan.global_batch != recipe.global_batch:
            raise ConfigurationError(f"plan has global_batch {plan.global_batch}, the recipe {recipe.global_batch}")
        self._order = order
        self._rows = process_rows(plan, process_index)
        self._next = first_batch
        source = source or BatchSource(mix, order, self._rows, first_batch)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
        self._elements: Any = iter(grain.MapDataset.source(source).to_iter_dataset(options))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, dict[str, npt.NDArray[Any]]]:
        """The next batch. Raises WrongInstances, ConfigurationError (a file changed), StorageUnavailable."""
        element = next(self._elements)
        due = ids_of_rows(self._order, self._next, self._rows)
        if element.t != self._next or not np.array_equal(element.ids, due):
            raise WrongInstances(
                f"batch {self._next}: the reader returned batch {element.t} with ids {_some(element.ids)}, "
                f"the order says {_some(due)}; nothing was trained on them"
            )
        self._next += 1
        return element.t, {"tokens": element.tokens, "ids": split_ids(element.ids)}

    def close(self) -> None:
        """End the reading threads; batches read ahead are dropped."""
        self._elements.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def held_out_batches(mix: Mix, plan: Plan, process_index: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The held-out set for one process: every instance of `mix` once, in file order, the same each time.

    Yields {"tokens": int32[1, R/P, S], "ids": uint32[1, R/P, 2], "weights": float32[1, R/P]}, laid out like a
    training batch with one forward pass. The last batch is padded: weight 0, token eos_id, all bits of the id set;
    so every instance counts once whatever R is, and sums of weight × loss do not depend on the plan.
    """
    rows = process_rows(plan, process_index)[:1]
    for first in range(0, len(mix), plan.rows_per_pass):
        ids = (rows + first).astype(np.uint64)
        real = ids < len(mix)
        ids[~real] = PADDING_ID
        yield {"tokens": tokens_of(mix, ids), "ids": split_ids(ids), "weights": real.astype(np.float32)}


def _some(ids: U64) -> str:
    """The first few ids, for a message."""
    flat = ids.reshape(-1)
    return ", ".join(map(str, flat[:4].tolist())) + (", …" if flat.size > 4 else "")


def global_ids(shares: list[U32], plan: Plan) -> U64:
    """uint64[B]: the ids of a global batch in row order, from the "ids" of all processes in process order."""
    return join_ids(np.concatenate(shares[:: _readers(plan)], axis=1)).reshape(plan.rows)[: plan.global_batch]
