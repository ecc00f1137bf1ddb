"""Log lines: coloured text on a terminal, JSON elsewhere. structlog is loaded at first use."""

import sys
from functools import cache
from typing import Any


@cache
def log() -> Any:
    """The trainer's logger; it writes to standard error."""
    import structlog

    renderer: Any = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
    )
