"""Logging of the orchestrator: events with fields, coloured on a terminal, one JSON object per line anywhere else."""

import logging
import sys
from typing import TextIO

import structlog


def configure(*, as_json: bool | None = None, level: str = "info", stream: TextIO | None = None) -> None:
    """Set up structlog once per process. `as_json` None: JSON unless `stream` (default: stderr) is a terminal."""
    out = stream if stream is not None else sys.stderr
    if as_json is None:
        as_json = not out.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=as_json),
    ]
    if as_json:
        shared += [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer(default=str)]
    else:
        shared += [structlog.dev.ConsoleRenderer(colors=out.isatty())]
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
