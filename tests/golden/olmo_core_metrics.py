"""Writes olmo_core_metrics.json: the names under which OLMo-core records metrics, from its source. For make_olmo_core.py.

/tmp/golden/bin/python -m tests.golden.olmo_core_metrics
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import olmo_core
from olmo_core.train.common import TRAIN_CE_LOSS_METRIC, TRAIN_PPL_METRIC

from tests.golden.answers import write_json


def recorded(source: str) -> Iterator[str]:
    """The names in the calls of record_metric; {} stands for what is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "record_metric" and node.args:
            name = _text(node.args[0])
            spaces = [_text(k.value) for k in node.keywords if k.arg == "namespace"]
            if name is not None:
                yield "/".join([*(space for space in spaces if space), name])


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def write_metrics() -> None:
    root = Path(olmo_core.__file__).parent / "train"
    names = {name for path in root.rglob("*.py") for name in recorded(path.read_text())}
    write_json("metrics", {"names": sorted(names | {TRAIN_CE_LOSS_METRIC, TRAIN_PPL_METRIC})})


if __name__ == "__main__":
    write_metrics()
