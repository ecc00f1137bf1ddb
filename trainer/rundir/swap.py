"""From calls that may go unanswered to answers that are certain.

A timeout says nothing: the write may have landed, may land later, or never. A conflict says nothing either while an
earlier try of ours may have caused it. So a swap carries a fresh `op_id`, and the same body is sent with the same
generation until the answer is certain: success, or another generation whose body carries our op_id (won) or another's
(lost). The generation we named can be used up only once, so an earlier try that lands afterwards does no harm.
"""

import json
import uuid
from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from trainer.errors import StorageUnavailable
from trainer.rundir.store import AlreadyExists, Blob, Conflict, NotFound, StorageFull, Store

T = TypeVar("T")
PATIENCE_SECONDS = 30.0


def new_op_id() -> str:
    """A name for one swap that nobody else uses."""
    return uuid.uuid4().hex


class Patient:
    """Repeats a single store call while its outcome is unknown, for at most `seconds`.

    A full disk is not waited for: it needs a person. After `seconds` the last StorageUnavailable is raised.
    """

    def __init__(self, seconds: float, sleep: Callable[[float], None]) -> None:
        self._retrying = Retrying(
            retry=retry_if_exception(_worth_repeating),
            stop=stop_after_delay(seconds),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            sleep=sleep,
            reraise=True,
        )

    def __call__(self, call: Callable[[], T]) -> T:
        return self._retrying.copy()(call)


def _worth_repeating(error: BaseException) -> bool:
    return isinstance(error, StorageUnavailable) and not isinstance(error, StorageFull)


def certain_create(store: Store, patient: Patient, key: str, data: bytes) -> None:
    """Create `key` once. An object that already holds exactly `data` counts as created.

    Raises AlreadyExists when it holds something else, StorageUnavailable when the outcome stays unknown.
    """

    def attempt() -> None:
        try:
            store.create(key, data)
        except AlreadyExists:
            if store.get(key).data != data:
                raise

    patient(attempt)


def certain_swap(store: Store, patient: Patient, key: str, data: bytes, expected: int) -> int | None:
    """Replace generation `expected` of `key` by `data`, a JSON document with a fresh `op_id`.

    Returns the new generation, or None when another write took the place: read again and decide again.
    Raises StorageUnavailable when the outcome stays unknown; the write may then still land.
    """
    op_id = op_id_of(data)
    if op_id is None:
        raise ValueError(f"swap of {key}: the body carries no op_id")

    def attempt() -> int | None:
        try:
            return store.swap(key, data, expected)
        except Conflict:
            found = _get(store, key)
            if found is not None and op_id_of(found.data) == op_id:
                return found.generation
            return None

    return patient(attempt)


def op_id_of(data: bytes) -> str | None:
    """The op_id in a document; None when it has none or is no document."""
    try:
        value = json.loads(data).get("op_id")
    except (ValueError, AttributeError):
        return None
    return value if isinstance(value, str) else None


def _get(store: Store, key: str) -> Blob | None:
    try:
        return store.get(key)
    except NotFound:
        return None
