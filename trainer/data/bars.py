"""A progress bar on a terminal, on standard error; nothing where output is piped."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A function to call with (done) or (done, total); it draws a bar on a terminal and does nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total=None: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done, total=total: bars.update(task, completed=done, total=total)
