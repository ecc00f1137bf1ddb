"""A recipe's file is a user's code: whatever is wrong in it is one ConfigurationError that names the file and the line."""

from pathlib import Path

import pytest

from tests.support.corpus import recipe
from trainer.errors import ConfigurationError
from trainer.recipe import load, override


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x = 1\ndef recipe(:\n", r"line 2: SyntaxError: "),
        ("\nfrom trainer.recipe import Recip\n", r"line 2: ImportError: cannot import name 'Recip'"),
        ("def recipe():\n    return {}['model']\n", r"line 2: KeyError: 'model'"),
        ("import sys\nsys.exit(0)\n", r"line 2: SystemExit: 0"),
        (
            "from trainer.recipe import Order\n\norder = Order(kind='other', seed=0)\n",
            r"line 3: kind: Input should be ",
        ),
        (
            "from trainer.recipe import Recipe\ndef recipe():\n    return Recipe(name='a')\n",
            r"line 3: model: required, but not there; data: required",
        ),
        ("from trainer.recipe import load\nother = load('none')\n", r"recipe 'none' not found; known recipes: "),
        (  # pydantic's own copy leaves it out without a word
            "from trainer.recipes import tiny\ndef recipe():\n    return tiny.recipe().model_copy(update={'global_bach': 8})\n",
            r"Recipe has no field 'global_bach'; did you mean 'global_batch'\?",
        ),
        ("a = 1\n", r"defines no function recipe\(\)"),
        ("def recipe():\n    pass\n", r"returned NoneType, not trainer\.recipe\.Recipe"),
        ("x = '\xff'\n", r"SyntaxError: "),  # not UTF-8, as it is written below
    ],
)
def test_whatever_is_wrong_in_it_is_named_with_its_line(tmp_path: Path, code: str, why: str) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(code.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=rf"recipe '.*mine\.py'.*{why}"):
        load(str(path))


@pytest.mark.parametrize(("dtype", "fits", "does_not"), [("uint8", 255, 256), ("uint16", 65_535, 65_536)])
def test_files_of_a_dtype_must_be_able_to_hold_the_eos_id(dtype: str, fits: int, does_not: int) -> None:
    """Read as the dtype below, each token is two, and all of them pass for tokens."""
    base = recipe()
    wide = {"data.dtype": dtype, "model.vocab_size": 100_278, "model.padded_vocab_size": 100_352}
    assert override(base, {**wide, "data.eos_id": fits}).data.dtype == dtype
    with pytest.raises(ConfigurationError, match=rf"data\.eos_id {does_not} does not fit in data\.dtype {dtype}"):
        override(base, {**wide, "data.eos_id": does_not})
