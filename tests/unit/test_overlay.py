"""A run laid over a reference, wherever the reference's numbers are; and the alarm on two foreign curves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tensorboardX import SummaryWriter

from trainer.errors import ConfigurationError
from trainer.metrics import draw
from trainer.metrics.commands import metrics
from trainer.metrics.curves import HELD_OUT, TRAINING, Curve, load
from trainer.metrics.overlay import overlay

LOSS = "train/CE loss"


def table(path: Path, header: str, *rows: str) -> str:
    path.write_text("\n".join((header, *rows)) + "\n")
    return str(path)


def curve(values: Any, first: int = 1, every: int = 1, source: str = "x") -> Curve:
    found = np.asarray(values, np.float64)
    return Curve(source, "", first + every * np.arange(found.size, dtype=np.float64), found)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(metrics, arguments, catch_exceptions=True)


# -- where curves come from


@pytest.mark.parametrize(
    ("header", "rows", "taken"),
    [
        ("step,train/CE loss", ("1,3.5", "2,3.25"), "'train/CE loss' over 'step'"),
        (
            '"Step","OLMo-3-7B - train/CE loss","OLMo-3-7B - train/CE loss__MIN","OLMo-3-7B - train/CE loss__MAX"',
            ('"1","3.5","3","4"', '"2","3.25","3","4"'),
            "'OLMo-3-7B - train/CE loss' over 'Step'",
        ),
        ("Wall time,Step,Value", ("1.7e9,1,3.5", "1.7e9,2,3.25"), "'Value' over 'Step'"),
        ("_step,train/CE_loss,lr", ("1,3.5,1", "2,3.25,1"), "'train/CE_loss' over '_step'"),
        ("global_step,loss", ("2,3.25", "1,3.5"), "'loss' over 'global_step'"),
        ("step,train/CE loss", ("1,3.5", "2,", ",9", "2,3.25", "3,NaN"), "'train/CE loss' over 'step'"),
    ],
    ids=["plain", "W&B", "TensorBoard", "signs", "out of order", "empty cells"],
)
def test_tables_as_people_export_them(tmp_path: Path, header: str, rows: tuple[str, ...], taken: str) -> None:
    found = load(table(tmp_path / "t.csv", header, *rows), TRAINING)
    assert taken in found.taken, "it is said which columns were taken"
    assert found.steps.tolist() == [1.0, 2.0]
    assert found.values.tolist() == [3.5, 3.25]


def test_values_that_are_no_finite_numbers_are_left_out_and_counted(tmp_path: Path) -> None:
    found = load(table(tmp_path / "t.csv", "step,loss", "1,3.5", "2,nan", "3,inf", "4,", "5,3"), TRAINING)
    assert found.steps.tolist() == [1.0, 5.0]
    assert found.taken.endswith("(2 that are no finite numbers left out)")


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for content, why in (
        (b"\xff\xfe\x00", "neither CSV nor JSON lines: .*can't decode"),
        (b"step,loss\n1,2\n" + b"2," + b"9" * 200_000, "neither CSV nor JSON lines: field larger"),
        (b'{"step": 1, "loss": 2}\n[1, 2]\n', "line 2: no JSON object"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=why):
            load(str(path), TRAINING)


def test_json_lines_and_tensorboard_folders(tmp_path: Path) -> None:
    lines = [json.dumps({"step": s, LOSS: 4.0 - s}) for s in (1, 2)] + [json.dumps({"step": 3})]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert load(str(tmp_path / "t.jsonl"), (LOSS,)).values.tolist() == [3.0, 2.0]
    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step, value in ((1, 3.0), (2, 9.0), (2, 2.0)):  # done again after a resume: the later one counts
            writer.add_scalar(LOSS, value, step)
    found = load(str(tmp_path / "tb"), (LOSS,))
    assert found.values.tolist() == [3.0, 2.0]
    assert "'train/CE_loss' of its event files" in found.taken


@pytest.mark.parametrize(
    ("header", "rows", "options", "message"),
    [
        ("step,a,b", ("1,2,3",), {}, "no 'train/CE loss' or .*; name one with --column: 'a', 'b'"),
        ("when,train/CE loss", ("1,2",), {}, "no column 'step'; name it with --step-column: 'when', 'train/CE loss'"),
        ("step,x - train/CE loss,y - train/CE loss", ("1,2,3",), {}, "say which one with --column"),
        ("step,train/CE loss", ("1,high",), {}, "line 2: '1', 'high' in 'step', 'train/CE loss' are no numbers"),
        ("step,train/CE loss", (), {}, "no rows"),
        ("step,train/CE loss", ("1,",), {}, "no numbers"),
        ("step,train/CE loss", ("1,2",), {"column": "c"}, "no 'c'; name one with --column"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_the_fix(
    tmp_path: Path, header: str, rows: tuple[str, ...], options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(table(tmp_path / "t.csv", header, *rows), TRAINING, **options)


def test_there_is_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file or folder"):
        load(str(tmp_path / "none.csv"), TRAINING)
    with pytest.raises(ConfigurationError, match="neither a run directory nor TensorBoard's event files"):
        load(str(tmp_path), TRAINING)


# -- the comparison


def test_means_over_a_window_of_steps_and_where_they_leave_the_tolerance() -> None:
    rng = np.random.default_rng(0)
    base = np.linspace(5, 2, 1000)
    shift = np.where(np.arange(1000) >= 600, 0.1, 0.0)
    noise = rng.normal(size=1000) * 0.05
    found = overlay(curve(base + shift + noise), curve(base), window=100)
    assert found.leaves(0.05) is not None
    assert 640 <= found.leaves(0.05) <= 660, "half of the window has to be over the line"
    assert found.leaves(0.2) is None
    assert found.mean == pytest.approx(0.04, abs=0.01)
    size, at = found.largest
    assert size == pytest.approx(0.1, abs=0.02) and at > 690
    parts = found.parts()
    assert len(parts) == 10
    assert (parts[0].first, parts[-1].last) == (1, 1000)
    assert parts[9].difference == pytest.approx(0.1, abs=0.02)
    assert (parts[0].largest is None) == (parts[0].last < 100)


def test_each_window_is_the_mean_of_its_own_steps() -> None:
    ours, reference = np.arange(30.0), np.zeros(30)
    found = overlay(curve(ours), curve(reference), window=5)
    assert np.isnan(found.smooth[:4]).all()
    assert found.smooth[4:].tolist() == [float(np.mean(ours[i - 4 : i + 1])) for i in range(4, 30)]


def test_a_reference_that_was_sampled() -> None:
    """W&B exports every so-manyth step; the window counts steps, not rows."""
    found = overlay(curve(np.full(1000, 2.0)), curve(np.full(20, 2.5), first=50, every=50), window=100)
    assert found.steps.tolist() == list(range(50, 1001, 50))
    assert found.mean == -0.5
    assert found.leaves(0.4) == 150


def test_fewer_common_steps_than_a_window_are_one_window() -> None:
    found = overlay(curve([1.0, 2.0, 3.0]), curve([1.0, 1.0, 1.0]), window=100)
    assert found.largest == (1.0, 3)


def test_no_common_steps() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no step from 0 on is in both curves: x has 2 steps, 1\.\.2; y has 1"
    ):
        overlay(curve([1.0, 2.0]), curve([1.0], first=7, source="y"), window=10)


# -- the commands


def test_exit_codes_text_and_picture(tmp_path: Path) -> None:
    steps = range(1, 301)
    ours = table(tmp_path / "ours.csv", f"step,{LOSS}", *(f"{s},{4 - s / 300}" for s in steps))
    theirs = table(tmp_path / "theirs.csv", f"Step,run - {LOSS}", *(f"{s},{4 - s / 300 + 0.01}" for s in steps))
    picture = tmp_path / "o.png"
    within = run("overlay", ours, theirs, "--tolerance", "0.02", "--plot", str(picture))
    assert within.exit_code == 0, within.output
    assert "column 'run - train/CE loss' over 'Step'" in within.output
    assert "300 common steps, 1 to 300" in within.output
    assert "within 0.02 everywhere" in within.output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    beyond = run("overlay", ours, theirs, "--tolerance", "0.005", "--json")
    assert beyond.exit_code == 1
    body = json.loads(beyond.output)
    assert (body["leaves_at_step"], body["common_steps"]) == (100, 300)
    assert body["mean_difference"] == pytest.approx(-0.01)
    assert run("overlay", ours, theirs).exit_code == 0, "without a tolerance nothing is judged"


def test_a_picture_of_an_unknown_form_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--plot o\.gif: name a file that ends in \.png, \.svg, \.pdf"):
        draw.check(Path("o.gif"))


def test_the_alarm_on_the_curves_of_a_foreign_run(tmp_path: Path) -> None:
    """Two files of somebody else's run: their training loss falls after step 6000, the held-out loss does not."""
    rng = np.random.default_rng(1)
    steps, at = np.arange(10, 10_001, 10), np.arange(200, 10_001, 200)
    fair = 2 + 3 * steps**-0.3
    held = table(tmp_path / "held.csv", "Step,val_loss", *(f"{s},{2.1 + 3 * s**-0.3}" for s in at))
    for name, drop, code in (("fair", 0.0, 0), ("repeats", 0.15, 1)):
        loss = fair + rng.normal(size=steps.size) * 0.02 - drop * (steps > 6000)
        train = table(
            tmp_path / f"{name}.csv", "Step,train/loss", *(f"{s},{v}" for s, v in zip(steps, loss, strict=True))
        )
        result = run("alarm", train, "--held-out", held)
        assert result.exit_code == code, result.output
        assert "column 'train/loss' over 'Step'" in result.output and "column 'val_loss'" in result.output
        assert ("ALARM at step" in result.output) == bool(code)
    body = json.loads(run("alarm", str(tmp_path / "repeats.csv"), "--held-out", held, "--json").output)
    assert 6000 < body["alarm_step"] < 8500
    until = run("alarm", str(tmp_path / "repeats.csv"), "--held-out", held, "--until", "6000")
    assert until.exit_code == 0
    few = run("alarm", str(tmp_path / "repeats.csv"), "--held-out", held, "--until", "1500")
    assert few.exit_code == 0 and "nothing to judge" in few.output
    assert HELD_OUT[0].startswith("eval/lm/")
