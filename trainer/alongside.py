"""Work that goes on beside the main thread while a process comes up: compiling, opening data, importing.

Only work that needs no other process may go here. What a gang does together (claims, restores, collectives) stays on
the main thread, where its order is the same everywhere.
"""

import threading
from collections.abc import Callable


class Alongside[T]:
    """Runs `work` at once in a thread that does not keep the process alive."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """What `work` returned, once it has; raises what it raised. Which error a start reports is thereby decided by
        the order in which it asks for results, and not by which came first.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
