"""Which store a URI means."""

import time
from collections.abc import Callable
from pathlib import Path

from trainer.rundir.store import Store, StoreMissing, StoreRefused
from trainer.rundir.swap import PATIENCE_SECONDS, Patient


def open_store(
    uri: str,
    create: bool = False,
    patience_seconds: float = PATIENCE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Store:
    """The store at `uri`: gs://bucket/prefix, or a folder (a path or file:// URI).

    `create` makes a missing folder. Raises ConfigurationError when nothing is there and `create` is false,
    StorageUnavailable when a bucket has not answered for so long: that alone must not end a start.
    """
    if uri.startswith("gs://"):
        from trainer.rundir.gcs import GcsStore  # imports google-cloud-storage, 0.6 s: only for buckets

        bucket = GcsStore(uri)
        if not create and not Patient(patience_seconds, sleep)(bucket.present):
            raise StoreMissing(f"run directory {uri}: no object below this prefix; check the bucket and the path")
        return bucket
    if "://" in uri and not uri.startswith("file://"):
        raise StoreRefused(f"run directory {uri}: unknown scheme; use gs://bucket/path or a folder on disk")
    from trainer.rundir.disk import DiskStore

    root = Path(uri.removeprefix("file://"))
    if create:
        DiskStore.make(root)
    return DiskStore(root)
