"""Which held-out sets and downstream tasks an attempt looks at: part of its settings, not of the recipe.

What is measured decides nothing about training, so a set or a task may be added to a run at any time: its fingerprint
stays. (The recipe's own `data.held_out`, cut into windows like training data, is the run's for good; the memorisation alarm
goes by it.) Importable without JAX.
"""

import difflib
from collections.abc import Sequence

from pydantic import Field, model_validator

from trainer.errors import ConfigurationError
from trainer.frozen import Frozen

# OLMo-core's mix v3-small-ppl-validation, what AI2 looks at every 10,000 steps: one file per set, by the names in its logs.
V3_SMALL = "v3_small_ppl_validation"
V3_SMALL_FOLDERS = (
    "c4_en",
    "dolma_books",
    "dolma_common-crawl",
    "dolma_pes2o",
    "dolma_reddit",
    "dolma_stack",
    "dolma_wiki",
    "ice",
    "m2d2_s2orc",
    "pile",
    "wikitext_103",
)
KNOWN_SETS: dict[str, tuple[str, ...]] = {
    f"{folder}-validation": (f"eval-data/perplexity/v3_small_dolma2-tokenizer/{folder}/val/part-0-00000.npy",)
    for folder in V3_SMALL_FOLDERS
}
SET_GROUPS = {V3_SMALL: tuple(KNOWN_SETS)}
WINDOWS = "held_out"  # the name of the recipe's own held-out text in results


class HeldOutSet(Frozen):
    """A named set of token files, or the name of a known set or group of sets."""

    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    files: tuple[str, ...] = Field(
        default=(), description="relative to the data root, in the recipe's dtype; none: a known set of this name"
    )

    @model_validator(mode="after")
    def _known(self) -> "HeldOutSet":
        for path in self.files:
            if any(folder in ("", ".", "..") for folder in path.split("/")):
                raise ValueError(f"file {path!r}: name it relative to the data root, without '.' or '..'")
        if self.files and self.name in (*SET_GROUPS, WINDOWS):
            raise ValueError(f"{self.name} is the name of something else; choose another one for these files")
        if not self.files and self.name not in (*KNOWN_SETS, *SET_GROUPS):
            known = [*KNOWN_SETS, *SET_GROUPS]
            near = [name for name in known if name.startswith(self.name)]
            near = near or difflib.get_close_matches(self.name, known, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join([*SET_GROUPS, *KNOWN_SETS])}"
            raise ValueError(f"set {self.name!r} has no files and is not known; {hint}")
        return self


class Evaluation(Frozen):
    """What is evaluated besides the recipe's own held-out text."""

    sets: tuple[HeldOutSet, ...] = Field(default=(), description="evaluated every evaluate_every steps")
    tasks: tuple[str, ...] = Field(default=(), description="downstream tasks and groups of them, by AI2's names")
    tasks_every: int | None = Field(
        default=None, gt=0, description="steps between downstream evaluations; default: evaluate_every"
    )
    tokenizer: str | None = Field(
        default=None,
        description="of the tasks: dolma2, bytes or a tokenizer.json; default: the one that the recipe's eos_id belongs to",
    )

    @model_validator(mode="after")
    def _once(self) -> "Evaluation":
        expand(self.sets)
        return self


def expand(sets: Sequence[HeldOutSet]) -> dict[str, tuple[str, ...]]:
    """Files by name of set, groups taken apart. Raises ValueError when a name stands for two lists of files."""
    found: dict[str, tuple[str, ...]] = {}
    for one in sets:
        names = SET_GROUPS.get(one.name, (one.name,))
        for name in names:
            files = one.files or KNOWN_SETS[name]
            if found.setdefault(name, files) != files:
                raise ValueError(f"set {name} is given twice, with different files")
    return found


def parse_sets(given: Sequence[str]) -> tuple[HeldOutSet, ...]:
    """Sets as a command line has them: NAME or NAME=FILE,FILE. Raises ConfigurationError."""
    sets = []
    for text in given:
        name, sign, files = text.partition("=")
        body = {"name": name, "files": [file for file in files.split(",") if file]}
        if sign and not body["files"]:
            raise ConfigurationError(f"--sets {text!r}: write NAME=FILE or NAME=FILE,FILE")
        sets.append(HeldOutSet.parse(body, f"--sets {text!r}"))
    return tuple(sets)
