"""Log lines on standard error: coloured text on a terminal, JSON elsewhere, in structlog's form in both cases.

structlog itself is imported for the terminal only: it brings rich along, a third of a second for every start.
"""

import json
import sys
import time
from functools import cache
from typing import Any


class JsonLog:
    """`info(event, **fields)` and its kin write one JSON object per line."""

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"
        body = {**fields, "event": event, "level": level, "timestamp": stamp}
        # One write, so that the lines of several threads do not mix.
        sys.stderr.write(json.dumps(body, default=str, ensure_ascii=False) + "\n")
        sys.stderr.flush()


@cache
def log() -> Any:
    """The trainer's logger."""
    if not sys.stderr.isatty():
        return JsonLog()
    import structlog

    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(),
        ],
    )
