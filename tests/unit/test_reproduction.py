"""docs/reproduction.md: every fact has a row, and every row a check that exists or the word that it cannot be done here."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reproduction.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in TEXT.splitlines()
    if re.match(r"\| \d+\.\d+ ", line)
]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
# Facts per section: raise a number with a row, never lower it.
FACTS = {1: 13, 2: 9, 3: 4, 4: 9, 5: 9, 6: 10, 7: 6, 8: 9, 9: 9}
UNDONE = "needs weights or TPU"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_is_checked_or_says_what_it_needs(row: list[str]) -> None:
    assert len(row) == 5, "five cells: number, claim, independent source, command, result"
    _, claim, source, command, result = row
    assert min(map(len, (claim, source, result))) > 3
    if result.startswith(UNDONE):
        assert re.search(r"`[^`]+`", command), "the command to run then"
        assert not TEST.search(command)
        return
    named = TEST.fullmatch(command)
    assert named, f"{command} is no test, and the result does not begin with {UNDONE!r}"
    tree = ast.parse((ROOT / named[1]).read_text())
    assert named[2] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_rows_are_numbered_through_and_none_is_missing() -> None:
    numbers = [tuple(map(int, row[0].split("."))) for row in ROWS]
    assert len(set(numbers)) == len(numbers)
    for section, count in FACTS.items():
        assert [b for a, b in numbers if a == section][:count] == list(range(1, count + 1)), section


def test_a_row_without_source_or_check_would_be_noticed() -> None:
    for bad in (["9.9", "claim", "source", "by eye", "equal"], ["9.9", "claim", "", f"{ROWS[0][3]}", "equal"]):
        with pytest.raises(AssertionError):
            test_each_row_is_checked_or_says_what_it_needs(bad)
