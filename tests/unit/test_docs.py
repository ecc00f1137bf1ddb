"""What the documents name exists: the tests that hold the rules, and the commands of the README."""

import ast
import re
from pathlib import Path

import pytest

from orchestrator.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
RULES = (ROOT / "docs" / "rules.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", RULES)))
RULE = re.compile(r"^\| (\d+)\. \*\*(.+?)\*\*.*", re.MULTILINE)


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_each_test_that_a_rule_names_exists(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {name for named, name in NAMED if named == file} <= there


def test_each_rule_has_its_tests() -> None:
    rows = RULE.finditer(RULES)
    counts = {int(row[1]): len(re.findall(r"`tests/[^`]+::[^`]+`", row[0])) for row in rows}
    assert sorted(counts) == list(range(1, 11))
    assert min(counts.values()) >= 2, counts


def test_the_commands_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    block = readme.split("## Use it", 1)[1].split("\n## ", 1)[0]
    commands = re.findall(r"^    untildone (\S+)", block, re.MULTILINE)
    assert len(commands) >= 4
    assert set(commands) <= set(COMMANDS), f"of {commands} not all are among {sorted(COMMANDS)}"
    targets = re.findall(r"^    make ([\w-]+)", readme, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("document", ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / link).exists(), f"{document} links to {link}"
