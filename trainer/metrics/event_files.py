"""TensorBoard's event files: TFRecords of Event messages. Written and read here; the messages are tensorboardX's.

A record is a length, its masked crc32c, the message, and its masked crc32c (TensorFlow, core/lib/io/record_writer.h). tensorboardX's
own writer computes the checksums in Python, 40 times slower, and gives its files no name of ours.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import google_crc32c

from trainer.errors import ConfigurationError
from trainer.metrics.committed import Point

VERSION = "brain.Event:2"


def event_messages() -> Any:
    """The module of Event. Raises ConfigurationError where tensorboardX is not installed."""
    try:
        from tensorboardX.proto import event_pb2
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] in ("tensorboardX", "google"):
            raise ConfigurationError(
                "TensorBoard files need tensorboardX; install it: pip install 'untildone[tensorboard]'"
            ) from None
        raise
    return event_pb2


class EventWriter:
    """Writes events to `file`; the first says the version, the second (with `from_step`) that later steps are replaced."""

    def __init__(self, file: IO[bytes], time: float, from_step: int | None = None) -> None:
        self._file, self._messages = file, event_messages()
        self._write(self._messages.Event(wall_time=time, file_version=VERSION))
        if from_step is not None:
            begin = self._messages.SessionLog(status=self._messages.SessionLog.START)
            self._write(self._messages.Event(wall_time=time, step=from_step, session_log=begin))

    def add(self, point: Point) -> None:
        event = self._messages.Event(wall_time=point.time, step=point.step)
        for name, value in point.values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._write(event)

    def _write(self, event: Any) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(b"".join((length, _masked(length), data, _masked(data))))


def read_scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """(name, step, value) of every scalar in the event files below `folder`, in the order of file names.

    Raises ConfigurationError for a file that is no event file. A record that ends too soon ends its file: it is being written.
    """
    messages = event_messages()
    for path in sorted(p for p in folder.rglob("*tfevents*") if p.is_file()):
        with path.open("rb") as file:
            for data in _records(file, path):
                event = messages.Event.FromString(data)
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        yield value.tag, event.step, value.simple_value
                    elif value.HasField("tensor") and len(value.tensor.float_val) == 1:
                        yield value.tag, event.step, value.tensor.float_val[0]


def _records(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while len(head := file.read(12)) == 12:
        if head[8:] != _masked(head[:8]):
            raise ConfigurationError(f"{path}: not a TensorBoard event file, or a damaged one")
        (size,) = struct.unpack("<Q", head[:8])
        body = file.read(size + 4)
        if len(body) < size + 4:
            return
        if body[size:] != _masked(body[:size]):
            raise ConfigurationError(f"{path}: a record of this event file is damaged")
        yield body[:size]


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
