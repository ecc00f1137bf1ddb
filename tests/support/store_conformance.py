"""What every store must do, as functions of a store: the same for a folder, a bucket, and either behind faults.

Each takes `open_store`, a function that opens the same, empty store anew: what one handle wrote, another must see.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import pytest

from tests.support.faulty_store import Fault, FaultyStore, at_write
from trainer.rundir.store import AlreadyExists, Conflict, NotFound, Stat, Store
from trainer.rundir.swap import Patient, certain_create, certain_swap, new_op_id

Open = Callable[[], Store]
WRITERS = 16


def patient() -> Patient:
    """Repeats for a second, without waiting."""
    return Patient(1.0, lambda seconds: None)


def body(**fields: Any) -> bytes:
    """A document with a fresh op_id."""
    return json.dumps({"op_id": new_op_id(), **fields}).encode()


def race(count: int, action: Callable[[int], bool]) -> list[int]:
    """Run action(0..count-1) at once, in threads; who returned True."""
    gate = threading.Barrier(count)

    def run(number: int) -> bool:
        gate.wait()
        return action(number)

    with ThreadPoolExecutor(count) as pool:
        return [number for number, won in enumerate(pool.map(run, range(count))) if won]


def check_get_and_missing(open_store: Open) -> None:
    store = open_store()
    for call in (lambda: store.get("HEAD"), lambda: store.get_range("a/b", 0, 1), lambda: store.stat("a/b")):
        with pytest.raises(NotFound):
            call()
    with pytest.raises(NotFound):
        store.get("a/b")
    assert store.list("a") == []
    assert store.folders("a") == []
    assert store.stat_tree("a") == []
    assert store.modified("a") is None
    store.delete_tree("a")
    store.create("a/b", b"0123456789")
    assert open_store().get("a/b").data == b"0123456789"
    assert store.get_range("a/b", 2, 3) == b"234"
    assert store.get_range("a/b", 8, 9) == b"89"
    assert store.get_range("a/b", 10, 4) == b""


def check_create_once(open_store: Open) -> None:
    store = open_store()
    store.create("a/once", b"1")
    with pytest.raises(AlreadyExists):
        open_store().create("a/once", b"2")
    assert store.get("a/once").data == b"1"


def check_create_race(open_store: Open, rounds: int = 10) -> None:
    stores = [open_store() for _ in range(WRITERS)]
    for turn in range(rounds):
        key = f"race/{turn}"

        def create(number: int, key: str = key) -> bool:
            try:
                stores[number].create(key, f"{number}".encode())
            except AlreadyExists:
                return False
            return True

        winners = race(WRITERS, create)
        assert len(winners) == 1
        assert stores[0].get(key).data == f"{winners[0]}".encode()


def check_create_from_file(open_store: Open, path: Any) -> None:
    store = open_store()
    content = bytes(range(256)) * 8192
    path.write_bytes(content)
    store.create_from_file("order/table", path)
    assert store.get("order/table").data == content
    with pytest.raises(AlreadyExists):
        store.create_from_file("order/table", path)


def check_put_overwrites(open_store: Open) -> None:
    store = open_store()
    for value in (b"1", b"22", b""):
        store.put("attempts/1/1/progress.json", value)
        assert open_store().get("attempts/1/1/progress.json").data == value


def check_swap(open_store: Open) -> None:
    store = open_store()
    first = store.swap("HEAD", b"a", 0)
    for stale in (0, first + 1):
        with pytest.raises(Conflict):
            store.swap("HEAD", b"x", stale)
    second = store.swap("HEAD", b"b", first)
    assert second != first
    with pytest.raises(Conflict):
        store.swap("HEAD", b"x", first)
    found = open_store().get("HEAD")
    assert (found.data, found.generation) == (b"b", second)
    assert store.list("") == ["HEAD"]


def check_swap_race(open_store: Open, rounds: int = 20) -> None:
    """Each round all writers swap from the same generation; exactly one wins, and all then read its bytes."""
    stores = [open_store() for _ in range(WRITERS)]
    generation = stores[0].swap("HEAD", b"start", 0)
    generations = {generation}
    for turn in range(rounds):
        won: dict[int, int] = {}

        def swap(number: int, turn: int = turn, before: int = generation, won: dict[int, int] = won) -> bool:
            try:
                won[number] = stores[number].swap("HEAD", f"{turn}/{number}".encode(), before)
            except Conflict:
                return False
            return True

        winners = race(WRITERS, swap)
        assert len(winners) == 1, f"round {turn}: {winners}"
        generation = won[winners[0]]
        assert generation not in generations, "a generation was used twice"
        generations.add(generation)
        for store in stores:
            found = store.get("HEAD")
            assert (found.data, found.generation) == (f"{turn}/{winners[0]}".encode(), generation)


def check_no_aba(open_store: Open) -> None:
    """A → B → A: whoever still holds the first A's generation loses."""
    store = open_store()
    first = store.swap("HEAD", b"A", 0)
    second = store.swap("HEAD", b"B", first)
    third = store.swap("HEAD", b"A", second)
    for stale in (0, first, second):
        with pytest.raises(Conflict):
            open_store().swap("HEAD", b"C", stale)
    assert store.get("HEAD").generation == third


def check_lost_answer_own(open_store: Open) -> None:
    """Our swap landed, its answer was lost: we learn that we won, and with which generation."""
    for fault in (Fault.BEFORE, Fault.AFTER):
        store = FaultyStore(open_store())
        before = _generation(store)
        store.plan = at_write(store._writes, fault)
        data = body()
        won = certain_swap(store, patient(), "HEAD", data, before)
        found = open_store().get("HEAD")
        assert (found.data, found.generation) == (data, won)


def check_lost_answer_other(open_store: Open) -> None:
    """Our swap never landed and another's did: we learn that we lost, and nothing of ours is there."""
    store = FaultyStore(open_store(), at_write(0, Fault.BEFORE))
    rival = open_store()
    theirs = body(rival=True)

    class Rival(FaultyStore):
        def swap(self, key: str, data: bytes, expected: int) -> int:
            try:
                return super().swap(key, data, expected)
            finally:
                if len(self.calls) == 1:
                    rival.swap(key, theirs, expected)

    assert certain_swap(Rival(store.inner, store.plan), patient(), "HEAD", body(), 0) is None
    assert open_store().get("HEAD").data == theirs


def check_late_write(open_store: Open) -> None:
    """A request that lands after it was sent again, and after another's write, changes nothing."""
    store = FaultyStore(open_store(), at_write(0, Fault.LATE), due=1)
    mine = body()
    won = certain_swap(store, patient(), "HEAD", mine, 0)  # lands just before the second try, which then conflicts
    assert won is not None
    assert open_store().get("HEAD").data == mine
    store = FaultyStore(open_store(), at_write(0, Fault.LATE), due=100)
    again = certain_swap(store, patient(), "HEAD", body(), won)  # the second try wins, the first is still under way
    assert again is not None
    newest = body()
    open_store().swap("HEAD", newest, again)
    store.land()
    assert open_store().get("HEAD").data == newest


def check_create_answers(open_store: Open) -> None:
    """Creating with lost answers: ours counts as created, another's does not."""
    for number, fault in enumerate((Fault.BEFORE, Fault.AFTER, Fault.LATE)):
        store = FaultyStore(open_store(), at_write(0, fault), due=1)
        certain_create(store, patient(), f"c/{number}", b"mine")
        assert open_store().get(f"c/{number}").data == b"mine"
        with pytest.raises(AlreadyExists):
            certain_create(store, patient(), f"c/{number}", b"other")


def check_list_and_folders(open_store: Open) -> None:
    store = open_store()
    keys = ["c/1.1/10.json", "c/1.1/2.json", "c/1.10/1.json", "c/top.json", "d", "é/x"]
    for key in reversed(keys):
        store.create(key, b"x")
    store.swap("HEAD", b"h", 0)
    assert store.list("") == sorted([*keys, "HEAD"])
    assert store.list("c") == store.list("c/") == sorted(keys[:4])
    assert store.list("c/1.1") == ["c/1.1/10.json", "c/1.1/2.json"]
    assert store.folders("c") == ["1.1", "1.10"]
    assert store.folders("c/1.1") == []
    assert {"c", "é"} <= set(store.folders(""))


def check_stat_tree(open_store: Open) -> None:
    store = open_store()
    contents = {"k/a": b"", "k/b/c": b"123456789", "k/z": bytes(3_000_000)}
    for key, data in contents.items():
        store.create(key, data)
    store.create("k2", b"not below k")
    assert store.stat_tree("k") == [
        Stat(key, len(data), google_crc32c.value(data)) for key, data in sorted(contents.items())
    ]
    assert store.stat_tree("k")[1].crc32c == 0xE3069283  # the check value of CRC-32C
    assert [store.stat(found.key) for found in store.stat_tree("k")] == store.stat_tree("k")


def check_delete_tree(open_store: Open) -> None:
    store = open_store()
    for key in ("checkpoints/1.1/2/a", "checkpoints/1.1/2/b/c", "checkpoints/1.1/20/a"):
        store.create(key, b"x")
    store.delete_tree("checkpoints/1.1/2")
    store.delete_tree("checkpoints/1.1/2")
    assert open_store().list("") == ["checkpoints/1.1/20/a"]
    store.create("checkpoints/1.1/2/a", b"again")
    assert store.get("checkpoints/1.1/2/a").data == b"again"
    with pytest.raises(ValueError, match="empty prefix"):
        store.delete_tree("/")


def check_modified(open_store: Open) -> None:
    import time

    store = open_store()
    store.create("m/a", b"x")
    first = store.modified("m")
    assert first is not None
    assert abs(first - time.time()) < 60
    time.sleep(0.02)
    store.create("m/b/c", b"x")
    later = store.modified("m")
    assert later is not None
    assert later > first


CHECKS: tuple[Callable[[Open], None], ...] = (
    check_get_and_missing,
    check_create_once,
    check_create_race,
    check_put_overwrites,
    check_swap,
    check_swap_race,
    check_no_aba,
    check_lost_answer_own,
    check_lost_answer_other,
    check_late_write,
    check_create_answers,
    check_list_and_folders,
    check_stat_tree,
    check_delete_tree,
    check_modified,
)


def _generation(store: Store) -> int:
    try:
        return store.get("HEAD").generation
    except NotFound:
        return 0
