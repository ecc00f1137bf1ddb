"""Work beside the main thread: begun at once, its result or its error given when it is asked for."""

import threading

import pytest

from trainer.alongside import Alongside


def test_work_goes_on_meanwhile_and_its_value_waits() -> None:
    asked = threading.Event()

    def work() -> int:
        assert asked.wait(10)
        return 7

    beside = Alongside("work", work)  # would never return if it were done here
    asked.set()
    assert beside.result() == beside.result() == 7


def test_errors_come_in_the_order_of_asking() -> None:
    def fails(text: str) -> None:
        raise ValueError(text)

    later = Alongside("later", lambda: fails("compilation"))
    later._thread.join()  # it failed first
    first = Alongside("first", lambda: fails("data"))
    with pytest.raises(ValueError, match="data"):
        first.result()
    with pytest.raises(ValueError, match="compilation"):
        later.result()
