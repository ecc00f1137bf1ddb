"""Curves of a run: each committed step once whatever the run and the exporter went through, by OLMo-core's names."""

import csv
import io
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tensorboardX import SummaryWriter
from tensorboardX.crc32c import _crc32c
from tensorboardX.proto import event_pb2

from tests.support import synthetic_run
from tests.support.synthetic_run import DictStore, loss
from trainer.errors import ConfigurationError
from trainer.flops import COUNTINGS, flops_per_token
from trainer.metrics import event_files, names, tensorboard
from trainer.metrics.commands import metrics
from trainer.metrics.committed import Committed
from trainer.metrics.event_files import read_scalars
from trainer.metrics.tables import rows, write_csv, write_json_lines
from trainer.metrics.tensorboard import Export
from trainer.plan import Plan
from trainer.recipe import load
from trainer.rundir.alarms import Trend, TrendPoint
from trainer.rundir.records import CommitRef, Head, StepLine
from trainer.rundir.rundir import RunDirectory

GOLDEN = Path(__file__).parents[1] / "golden"
STEPS = 56
COMMITS = [8, 11, 16, 24, 32, 40, 41, 48, 49, 56]


@pytest.fixture
def store() -> DictStore:
    """Seven starts, four of which logged steps that they did not commit."""
    return synthetic_run.write()


def answers(name: str) -> dict[str, Any]:
    """What OLMo-core says (tests/golden/make_olmo_core.py)."""
    found: dict[str, Any] = json.loads((GOLDEN / f"olmo_core_{name}.json").read_text())
    return found


def committed(store: DictStore) -> Committed:
    return Committed(RunDirectory(store))


def evaluate(store: DictStore, commit: str, value: float) -> None:
    body = {"version": 1, "step": int(commit.split("/")[1]), "loss": value, "time": 5.0}
    body["metrics"] = {"eval/lm/c4_en-validation/CE loss": value + 0.5}
    store.put(f"eval/{commit}.json", json.dumps(body).encode())


def set_head(store: DictStore, commit: CommitRef) -> None:
    head = Head.read(store.objects["HEAD"], "HEAD")
    store.put("HEAD", head.model_copy(update={"commit": commit}).canonical())


def points(folder: Path, name: str = names.CE_LOSS) -> list[tuple[int, float]]:
    return [(step, value) for tag, step, value in read_scalars(folder) if tag == name]


def f32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


# -- what is there


def test_each_committed_step_once_and_none_that_was_rolled_back(store: DictStore) -> None:
    found = list(rows(committed(store)))
    assert [point.step for point in found] == list(range(1, STEPS + 1))
    # Steps 17 to 20 were done three times; those counted are of the start that committed them.
    assert [p.values[names.CE_LOSS] for p in found] == [loss(p.step, p.step > 41) for p in found]
    assert [p.time for p in found] == sorted(p.time for p in found)


def test_names_are_olmo_core_s() -> None:
    theirs = {name.replace("{}", "0") for name in answers("metrics")["names"]}
    assert set(names.OF_A_STEP) | {names.SAVE} <= theirs


def test_values_of_a_step() -> None:
    recipe = load("olmo3_7b_stage1")
    plan = Plan(
        device_type="v5p-4x4x8",
        processes=32,
        devices=128,
        global_batch=512,
        data_parallel=128,
        micro_batch=1,
        accumulation=4,
    )
    line = StepLine(
        step=3, loss=2.0, grad_norm=0.5, lr=4.5e-7, skipped=True, ids="", data="", seconds=6.65, loading=0.133
    )
    found = names.of_step(line, names.Throughput.of(recipe, plan))
    assert found[names.PPL] == pytest.approx(math.exp(2))
    assert found[names.SKIPPED] == 1.0
    assert found[names.TOTAL_TOKENS] == 3 * 512 * 8192
    assert found[names.TPS] == pytest.approx(4929, rel=1e-3)  # facts: v5p at half its peak
    assert found[names.MFU] == pytest.approx(50.0, rel=1e-3)
    assert found[names.LOADING_SHARE] == pytest.approx(2.0)
    assert set(found) == set(names.OF_A_STEP)
    shares = [names.of_step(line, names.Throughput.of(recipe, plan, counting))[names.MFU] for counting in COUNTINGS]
    assert shares == sorted(shares), "causal counts least, all pairs most"


def test_no_peak_no_mfu_and_an_old_line_has_no_loading(store: DictStore) -> None:
    first = next(iter(rows(committed(store))))
    assert not {names.MFU, names.LOADING, names.LOADING_SHARE} & set(first.values)
    assert StepLine.parse(
        b'{"step":1,"loss":1,"grad_norm":1,"lr":1,"skipped":false,"ids":"","data":"","seconds":1}', "x"
    )


def test_flop_per_token_is_olmo_core_s() -> None:
    golden = answers("flops")
    for theirs, ours in (("olmo3_190M", "olmo3_190m"), ("olmo3_7B", "olmo3_7b_stage1")):
        for length, flops in golden[theirs].items():
            assert flops_per_token(load(ours).model, int(length)) == pytest.approx(flops, rel=1e-8)
    model = load("olmo3_7b_stage1").model
    giga = [round(flops_per_token(model, 8192, counting) / 1e9, 1) for counting in COUNTINGS]
    assert giga == [46.6, 49.4, 54.2]


def test_seconds_of_phases_are_since_the_commit_before(store: DictStore) -> None:
    run = committed(store)
    one, two, other = run.since(None)[:3]
    one = one.model_copy(update={"phase_seconds": {"Starting": 4.0, "Training": 10.0}})
    two = two.model_copy(update={"phase_seconds": {"Starting": 4.0, "Training": 25.0, "Saving": 1.0}})
    other = other.model_copy(update={"phase_seconds": {"Training": 3.0}})
    assert names.of_commit(two, one) == {names.SAVE: 0.3, "phases/Training (s)": 15.0, "phases/Saving (s)": 1.0}
    assert names.of_commit(other, two)["phases/Training (s)"] == 3.0, "another start counts from 0"


# -- TensorBoard


def test_event_files_are_tensorboard_s(store: DictStore, tmp_path: Path) -> None:
    """Read with tensorboardX's own checksum and messages, not ours."""
    Export(committed(store), tmp_path).update()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    data, at, events = path.read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        for start, length in ((at, 8), (at + 12, size)):
            crc = _crc32c(data[start : start + length])
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack_from("<I", data, start + length) == (masked,)
        events.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
        at += size + 16
    assert events[0].file_version == "brain.Event:2"
    assert (events[1].session_log.status, events[1].step) == (event_pb2.SessionLog.START, 1)
    assert [e.step for e in events[2:]] == list(range(1, STEPS + 1))
    assert {v.tag for v in events[-1].summary.value} >= {names.CE_LOSS, names.GRAD_NORM, names.LR, names.SAVE}


def test_files_of_others_are_read(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(5):
            writer.add_scalar("train/CE loss", step / 2, step)
    tag = "train/CE_loss"  # their writer takes no blanks
    assert points(tmp_path, tag) == [(step, step / 2) for step in range(5)]
    (path,) = tmp_path.glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-3])  # still being written
    assert len(points(tmp_path, tag)) == 4
    path.write_bytes(b"x" * 100)
    with pytest.raises(ConfigurationError, match="not a TensorBoard event file"):
        points(tmp_path)


def test_followed_and_started_again_nothing_is_there_twice(store: DictStore, tmp_path: Path) -> None:
    """The run grows between the looks; each look is another process."""
    lineage = [record.ref for record in committed(store).since(None)]
    total = 0
    for ref in lineage:
        set_head(store, ref)
        total += Export(committed(store), tmp_path).update()
        assert Export(committed(store), tmp_path).update() == 0
    assert total == STEPS
    assert points(tmp_path) == [(s, f32(loss(s, s > 41))) for s in range(1, STEPS + 1)]


def test_one_exporter_that_follows(store: DictStore, tmp_path: Path) -> None:
    lineage = [record.ref for record in committed(store).since(None)]
    set_head(store, lineage[0])
    export = Export(committed(store), tmp_path)
    for ref in lineage:
        set_head(store, ref)
        export.update()
        assert export.committed == ref.step
    assert [step for step, _ in points(tmp_path)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("again", [False, True], ids=["same process", "started again"])
def test_a_commit_that_was_set_aside_is_taken_back(store: DictStore, tmp_path: Path, again: bool) -> None:
    lineage = [record.ref for record in committed(store).since(None)]
    export = Export(committed(store), tmp_path)
    for ref in lineage[:6]:
        set_head(store, ref)
        evaluate(store, f"{ref.attempt}.{ref.start}/{ref.step}", 3.0)
        export.update()
    assert points(tmp_path)[-1][0] == 40
    set_head(store, lineage[3])  # those of steps 32 and 40 are damaged
    export = Export(committed(store), tmp_path) if again else export
    export.update()
    assert [step for step, _ in points(tmp_path)] == list(range(1, 25))
    assert [step for step, _ in points(tmp_path, names.HELD_OUT)] == [8, 11, 16, 24]
    set_head(store, lineage[-1])
    export.update()
    assert [step for step, _ in points(tmp_path)] == list(range(1, STEPS + 1))


def test_evaluations_may_come_late(store: DictStore, tmp_path: Path) -> None:
    export = Export(committed(store), tmp_path)
    evaluate(store, "1.1/8", 4.0)
    evaluate(store, "1.3/24", 1.0)  # of a commit that never was: start 1.3 died before it
    export.update()
    evaluate(store, "1.1/11", 3.5)
    export.update()
    assert points(tmp_path, names.HELD_OUT) == [(8, 4.0), (11, 3.5)]
    assert points(tmp_path, "eval/lm/c4_en-validation/CE loss") == [(8, 4.5), (11, 4.0)]
    numbers = [p.name for p in sorted(tmp_path.glob("*tfevents*"))]
    assert "eval.11" in numbers[-1], "TensorBoard reads no file whose name comes before one it has finished"


def test_killed_while_it_writes(store: DictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    add = event_files.EventWriter.add

    def dying(self: event_files.EventWriter, point: object) -> None:
        if getattr(point, "step", 0) == 30:
            raise Killed
        add(self, point)  # type: ignore[arg-type]

    monkeypatch.setattr(event_files.EventWriter, "add", dying)
    with pytest.raises(Killed):
        Export(committed(store), tmp_path).update()
    monkeypatch.undo()
    assert points(tmp_path) == []
    Export(committed(store), tmp_path).update()
    assert [step for step, _ in points(tmp_path)] == list(range(1, STEPS + 1))
    assert not list(tmp_path.glob(".untildone-*"))


def test_a_folder_is_one_run_s(store: DictStore, tmp_path: Path) -> None:
    Export(committed(store), tmp_path)
    with pytest.raises(ConfigurationError, match="it holds the curves of memory://demo; give another folder"):
        Export(committed(synthetic_run.write(uri="memory://other")), tmp_path)
    with SummaryWriter(str(tmp_path / "theirs")) as writer:
        writer.add_scalar("a", 1, 1)
    with pytest.raises(ConfigurationError, match="was not written by this command"):
        Export(committed(store), tmp_path / "theirs")


def test_without_tensorboardx_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def missing(name: str, *rest: object, **more: object) -> object:
        if name.startswith("tensorboardX"):
            raise ModuleNotFoundError("No module named 'tensorboardX'", name="tensorboardX")
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigurationError, match=r"pip install 'untildone\[tensorboard\]'"):
        event_files.event_messages()


# -- tables


def test_json_lines_and_csv_give_the_same_floats_back(store: DictStore) -> None:
    evaluate(store, "1.1/8", 4.0)
    lines, table = io.StringIO(), io.StringIO()
    assert write_json_lines(rows(committed(store)), lines) == write_csv(rows(committed(store)), table) == STEPS
    parsed = [json.loads(line) for line in lines.getvalue().splitlines()]
    read = list(csv.DictReader(io.StringIO(table.getvalue())))
    for one, other, step in zip(parsed, read, range(1, STEPS + 1), strict=True):
        assert one["step"] == int(other["step"]) == step
        assert one[names.CE_LOSS] == float(other[names.CE_LOSS]) == loss(step, step > 41)
        assert (names.HELD_OUT in one) == (other[names.HELD_OUT] != "") == (step == 8)
    assert list(read[0])[:3] == ["step", "time", names.CE_LOSS]


def test_a_run_without_a_commit_and_no_run_at_all(tmp_path: Path) -> None:
    store = synthetic_run.write(story=synthetic_run.STORY[:1])
    head = Head.read(store.objects["HEAD"], "HEAD")
    store.put("HEAD", head.model_copy(update={"commit": None}).canonical())
    assert list(rows(committed(store))) == []
    assert Export(committed(store), tmp_path).update() == 0
    with pytest.raises(ConfigurationError, match="no run here"):
        committed(DictStore())


def test_the_commands_of_the_group() -> None:
    assert list(metrics.commands) == ["tensorboard", "export", "overlay", "alarm", "acknowledge"]
    for name in metrics.commands:
        result = CliRunner().invoke(metrics, [name, "--help"])
        assert result.exit_code == 0, result.output
    assert tensorboard.NAME.fullmatch("events.out.tfevents.0000000001.untildone.steps.56-3.1")


def test_the_score_of_the_alarm_is_a_curve_too(store: DictStore, tmp_path: Path) -> None:
    """It is written beside the evaluation, a little later, and belongs to the same commit."""
    rng, points_ = random.Random(0), []
    for step in range(1, 57):
        points_.append(TrendPoint(step=step, held_out=3.0, first=step, train=3.0 + rng.gauss(0, 0.01)))
    evaluate(store, "3.1/56", 3.0)
    export = Export(committed(store), tmp_path)
    export.update()
    assert points(tmp_path, names.SCORE) == []
    store.put("trend/3.1/56.json", Trend(points=tuple(points_)).canonical())
    export.update()
    ((step, score),) = points(tmp_path, names.SCORE)
    assert step == 56 and -3 < score <= 0
    assert list(rows(committed(store)))[-1].values[names.SCORE] == pytest.approx(score)
    store.put("trend/1.1/8.json", Trend(points=tuple(points_[:3])).canonical())
    assert committed(store).score(CommitRef(attempt=1, start=1, step=8)) is None, "nothing to judge yet"
