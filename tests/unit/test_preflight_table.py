"""Rows of the committed table, made of reports."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support.preflight import recipe
from trainer.preflight.accounting import Report, report_of
from trainer.preflight.table import Row, read, row_of, write

GOLDEN = Path(__file__).parent.parent / "golden" / "preflight.json"


@pytest.fixture(scope="module")
def report() -> Report:
    body = json.loads(GOLDEN.read_text())
    return report_of(body | {"plan": {"sequence": 1} | body["plan"]})  # it is from before sequences could be shared


def test_a_row_says_what_share_of_the_communication_is_hidden(report: Report, tmp_path: Path) -> None:
    gather, scatter = (report.communication[i] | {"seconds": s} for i, s in ((0, 1.5), (1, 0.5)))
    row = row_of(recipe(), replace(report, communication=[gather, scatter], waiting_seconds=0.5))
    assert (row.communication_seconds, row.waiting_seconds, row.hidden) == (2.0, 0.5, 0.75)
    write(tmp_path / "plans.json", [row])
    assert read(tmp_path / "plans.json") == (row,)


def test_rows_without_communication_or_from_before_it_was_reckoned_say_nothing(report: Report) -> None:
    assert row_of(recipe(), replace(report, communication=[], waiting_seconds=None)).hidden is None
    old = asdict(row_of(recipe(), report)) | {"communication_seconds": None, "waiting_seconds": None}
    assert Row(**old).hidden is None
