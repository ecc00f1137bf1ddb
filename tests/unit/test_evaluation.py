"""Named held-out sets, what is due when, the document of a commit, and the command on weights of Hugging Face."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from tests.support import corpus
from tests.support.goldens import TRANSFORMERS, reference
from trainer import evaluate as evaluation
from trainer.data.held_out import check_corpus
from trainer.data.held_out_documents import mean_loss, read_documents
from trainer.data_root import open_root
from trainer.downstream.encoding import encoder_for
from trainer.errors import ConfigurationError
from trainer.evaluate import TASK, document, due, evaluate_commit
from trainer.evaluate_command import Given, run
from trainer.evaluate_command import evaluate as command
from trainer.evaluation_settings import KNOWN_SETS, V3_SMALL, WINDOWS, HeldOutSet, expand, parse_sets
from trainer.recipe import Recipe, load
from trainer.rundir.disk import DiskStore
from trainer.rundir.records import CommitRef
from trainer.settings import Settings
from trainer.sharding import mesh_of

LM = json.loads((Path(__file__).parents[1] / "golden" / "olmo_eval_lm.json").read_text())


# --- documents


def with_eos_1(length: int, **data: Any) -> Recipe:
    recipe = corpus.recipe(length=length)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"eos_id": 1, **data})})


def test_documents_and_their_mean_loss_are_those_of_olmo_core_s_evaluator(tmp_path: Path) -> None:
    recipe = with_eos_1(LM["length"])
    row, scores_of = 0, {}
    for name, tokens in zip(("one-validation", "two-validation"), LM["files"], strict=True):
        np.asarray(tokens, "<u2").tofile(tmp_path / name)
        found = read_documents(recipe, open_root(str(tmp_path)), name, [name])
        scores = []
        for given in found.rows:
            while len(LM["documents"][row]) == 1:  # nothing is predicted of it, and no row is needed
                row += 1
            expected = LM["documents"][row]
            assert [*given.tokens.tolist(), int(given.targets[-1])] == expected
            assert given.targets.tolist() == expected[1:]
            # The golden's loss: number of the row from 1, and a sixteenth per position.
            scores.append((-(row + 1) - given.positions / LM["length"]).astype(np.float32))
            row += 1
        scores_of[name] = mean_loss(found, scores)
        assert scores_of[name] == pytest.approx(LM["metrics"][f"{name}/CE loss"], rel=1e-6)
    metrics = evaluation._lm("one-validation", scores_of["one-validation"])
    assert metrics["eval/lm/one-validation/PPL"] == pytest.approx(LM["metrics"]["one-validation/PPL"], rel=1e-6)


def test_long_documents_are_counted_and_prompts_are_no_targets(tmp_path: Path) -> None:
    recipe = with_eos_1(8, dtype="uint32", untrained_bit=True)
    prompt = 1 << 31
    tokens = [5 | prompt, 6 | prompt, 7, 8, 1, *range(2, 14), 1]
    np.asarray(tokens, "<u4").tofile(tmp_path / "a")
    found = read_documents(recipe, open_root(str(tmp_path)), "a", ["a"])
    assert (found.documents, found.tokens, found.cut) == (2, 3 + 8, 1)
    assert found.rows[0].tokens.tolist() == [5, 6, 7, 8]
    assert found.rows[0].targets.tolist() == [7, 8, 1]
    assert found.rows[1].targets.tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_a_file_that_is_no_set_is_refused_by_name(tmp_path: Path) -> None:
    recipe = with_eos_1(8)
    root = open_root(str(tmp_path))
    np.asarray([2, 3, 4], "<u2").tofile(tmp_path / "endless")
    np.asarray([2, 60_000, 1], "<u2").tofile(tmp_path / "foreign")
    (tmp_path / "odd").write_bytes(b"abc")
    for name, words in (("endless", "ends with eos_id 1"), ("foreign", "token 60000"), ("odd", "3 bytes")):
        with pytest.raises(ConfigurationError, match=words):
            read_documents(recipe, root, name, [name])
    with pytest.raises(ConfigurationError, match="missing"):
        read_documents(recipe, root, "none", ["none"])


def test_no_set_may_hold_training_text(tmp_path: Path) -> None:
    frozen = corpus.frozen(tmp_path)
    root = str(tmp_path)
    held_out, whole = check_corpus(frozen, root)
    raw = (tmp_path / frozen.data.files[2].path).read_bytes()
    size = 2 * frozen.sequence_length
    (tmp_path / "copy").write_bytes(raw[3 * size : 6 * size])
    np.full(frozen.sequence_length, 3, "<u2").tofile(tmp_path / "own")
    assert check_corpus(frozen, root, {"mine": ["own"]}) == (held_out + 1, whole)
    with pytest.raises(ConfigurationError, match=r"equals window 0 of copy \(held out\)"):
        check_corpus(frozen, root, {"mine": ["own"], "stolen": ["copy"]})
    with pytest.raises(ConfigurationError, match=r"set stolen: .* is also in data\.files"):
        check_corpus(frozen, root, {"stolen": [frozen.data.files[0].path]})


# --- settings


def settings(**given: Any) -> Settings:
    return Settings.parse({"target_step": 100, "data_root": "/data", "commit_every": 5, **given}, "test")


def test_the_known_sets_are_the_eleven_of_v3_small() -> None:
    found = expand(parse_sets([V3_SMALL, "c4_en-validation"]))
    assert {name: [path] for name, path in LM["mix"]} == {name: list(files) for name, files in found.items()}
    assert len(found) == len(KNOWN_SETS) == 11
    stage_1 = load("olmo3_7b_stage1")
    assert found["c4_en-validation"] == tuple(file.path for file in stage_1.data.held_out)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"evaluation": {"sets": [{"name": "pile"}]}, "evaluate_every": 5}, "did you mean pile-validation"),
        ({"evaluation": {"sets": [{"name": "held_out", "files": ["a"]}]}, "evaluate_every": 5}, "something else"),
        ({"evaluation": {"sets": [{"name": "a", "files": ["/a"]}]}, "evaluate_every": 5}, "relative to the data root"),
        ({"evaluation": {"sets": [{"name": "a", "files": ["b"]}]}}, "evaluate_every is not set"),
        ({"evaluation": {"tasks": ["fast"]}}, "neither tasks_every nor evaluate_every"),
        ({"evaluation": {"tasks": ["fast"], "tasks_every": 7}}, "tasks_every 7 must be a multiple of commit_every 5"),
        ({"evaluation": {"tasks_every": 5}, "evaluate_every": 5}, "tasks is empty"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        settings(**given)


def test_a_set_under_two_names_of_files_is_refused() -> None:
    sets = [HeldOutSet(name="a", files=("b",)), HeldOutSet(name="a", files=("c",))]
    with pytest.raises(ValueError, match="given twice"):
        expand(sets)
    with pytest.raises(ConfigurationError, match="NAME=FILE"):
        parse_sets(["a="])


def test_what_is_due_at_which_step() -> None:
    recipe = corpus.recipe(held_out=("h",))
    given = settings(
        evaluate_every=10,
        evaluation={"sets": [{"name": "a", "files": ["b"]}], "tasks": ["piqa_val_rc_5shot"], "tasks_every": 15},
    )
    assert due(recipe, given, 0) == due(recipe, given, 5) == []
    assert due(recipe, given, 10) == [WINDOWS, "a"]
    assert due(recipe, given, 15) == [TASK + "piqa_val_rc_5shot"]
    assert due(recipe, given, 30) == [WINDOWS, "a", TASK + "piqa_val_rc_5shot"]
    with_tasks = settings(evaluate_every=10, evaluation={"tasks": ["piqa_val_rc_5shot"]})
    assert due(corpus.recipe(), with_tasks, 10) == [TASK + "piqa_val_rc_5shot"]


# --- a commit's document


class Alone:
    """A gang of one."""

    rank, processes = 0, 1

    def decide(self, key: str, value: str | None) -> str:
        assert value is not None
        return value


class Killed(Exception):
    pass


class Counting:
    """Evaluates anything; dies at `fatal`."""

    def __init__(self, fatal: str | None = None) -> None:
        self.asked: list[str] = []
        self.fatal = fatal

    def evaluate(self, params: Any, part: str, after: str | None) -> dict[str, Any]:
        if part == self.fatal:
            raise Killed
        self.asked.append(part)
        body: dict[str, Any] = {"metrics": {f"eval/{part}": float(len(part))}, "seconds": 1.0}
        return body | ({"loss": 2.0, "instances": 3, "targets": 9, "ids": "x"} if part == WINDOWS else {})


def evaluated(evaluator: Counting, parts: Sequence[str], store: DiskStore, by: str = "1.1") -> Any:
    return evaluate_commit(evaluator, None, parts, REF, Alone(), store, by)  # type: ignore[arg-type]


REF = CommitRef(attempt=1, start=1, step=10)
PARTS = [WINDOWS, "a", TASK + "b", TASK + "c"]


def test_an_evaluation_that_was_killed_goes_on_with_the_part_it_was_at(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    first = Counting(fatal=TASK + "b")
    with pytest.raises(Killed):
        evaluated(first, PARTS, store)
    assert first.asked == [WINDOWS, "a"]
    assert not evaluation.has_result(store, REF)
    second = Counting()
    body = evaluated(second, PARTS, store, "2.1")
    assert second.asked == [TASK + "b", TASK + "c"]
    stored = json.loads((tmp_path / "eval/1.1/10.json").read_text())
    assert stored == json.loads(json.dumps(body))
    assert (stored["loss"], stored["targets"], stored["step"], stored["by"]) == (2.0, 9, 10, "2.1")
    assert set(stored["metrics"]) == {f"eval/{part}" for part in PARTS}
    assert (set(stored["sets"]), set(stored["tasks"])) == ({"a"}, {"b", "c"})
    assert not list(tmp_path.glob("evaluating/**/*.json"))


def test_tasks_alone_make_a_document_without_a_loss() -> None:
    body = document(10, {TASK + "b": {"metrics": {"m": 1.0}, "seconds": 2.0}})
    assert "loss" not in body
    assert body["tasks"] == {"b": {"seconds": 2.0}}


# --- tokenizers


def test_the_tokenizer_is_the_one_of_the_recipe_s_eos_id() -> None:
    assert encoder_for(load("tiny"))(["aé"]) == [[97, 195, 169]]
    assert encoder_for(load("olmo3_7b_stage1"))(["Hello world"]) == [[9906, 1917]]
    with pytest.raises(ConfigurationError, match=r"eos_id 1; set evaluation\.tokenizer"):
        encoder_for(with_eos_1(8))
    with pytest.raises(ConfigurationError, match="not the one that the recipe"):
        encoder_for(load("tiny").model_copy(), "dolma2")


# --- the command


def test_weights_of_hugging_face_have_the_loss_that_transformers_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.environment.prepare_jax", lambda *arguments: None)  # the tests' own devices
    monkeypatch.setattr("trainer.sharding.make_mesh", lambda plan, recipe: mesh_of(jax.devices()[:2]))
    golden = reference("mha")
    tokens = [[t if t != 1 else 2 for t in row] for row in golden["tokens"].tolist()]
    assert tokens == golden["tokens"].tolist()  # none is the eos_id, or the golden logits were of other tokens
    np.asarray([[*row, 1] for row in tokens], "<u4").tofile(tmp_path / "set.bin")
    hf = str(TRANSFORMERS / "mha")
    given = Given(
        hf=hf,
        sets=("mine=set.bin",),
        data_root=str(tmp_path),
        device="cpu-1",
        dtype="float32",
        out=str(tmp_path / "out"),
    )
    body = run(given)
    logits = golden["logits"].astype(np.float64)
    likelihoods = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -sum(
        likelihoods[row, i, [*tokens[row], 1][i + 1]] for row in range(len(tokens)) for i in range(len(tokens[row]))
    ) / (2 * 25)
    assert body["metrics"]["eval/lm/mine/CE loss"] == pytest.approx(expected, rel=2e-6)
    assert json.loads((tmp_path / "out").read_text())["parts"]["mine"]["documents"] == 2
    assert run(given)["metrics"] == body["metrics"]
    with pytest.raises(ConfigurationError, match="choose another file"):
        run(Given(hf=hf, sets=("mine=set.bin",), data_root=str(tmp_path), dtype="bfloat16", out=str(tmp_path / "out")))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --run-directory, or --hf"),
        (["--hf", str(TRANSFORMERS / "mha")], "no held-out text of its own"),
        (["--hf", str(TRANSFORMERS / "mha"), "--tasks", "hellaswag_rc_5"], "did you mean hellaswag_rc_5shot"),
        (["--hf", str(TRANSFORMERS / "mha"), "--tasks", "eight"], "no tokenizer is known"),
        (["--hf", str(TRANSFORMERS / "mha"), "--sets", "a=b"], "give --data-root"),
        (["--hf", str(TRANSFORMERS / "mha"), "--sets", "held_out"], "has no data.held_out"),
        (["--hf", str(TRANSFORMERS / "mha"), "--step", "1"], "--step goes with --run-directory"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, ConfigurationError)
    assert words in str(result.exception)


def test_tasks_are_listed_by_name() -> None:
    shown = CliRunner().invoke(command, ["--list-tasks"]).output.splitlines()
    assert "group fast: 26 tasks" in shown
    assert "hellaswag_rc_5shot  len_norm  hellaswag/rc_5shot" in shown
