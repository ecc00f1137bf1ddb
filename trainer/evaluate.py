"""Evaluation of one commit, part by part, and its document in the run directory.

Parts are the recipe's own held-out text ("held_out", cut into windows like training data), the named sets and the
downstream tasks of the settings. Each is computed by all processes on the sharded weights; sums over rows are exact and
made on the host. What is finished is stored at once (PARTS), so that an evaluation that was killed goes on where it
was; when all is there, rank 0 writes the one document of the commit, `eval/<n>.<k>/<step>.json`, and takes the parts away.

The document: step, commit, by (the start that finished it), time, seconds; `metrics`, all values by the names OLMo-core logs
them under; `sets` and `tasks`, what each was computed from; and of the windows loss, instances, targets, ids.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from trainer.data.hashes import ids_hash
from trainer.data.loader import held_out_batches
from trainer.data.mix import Mix
from trainer.data_root import open_root
from trainer.distributed import Gang
from trainer.evaluation_settings import WINDOWS, expand
from trainer.log import log
from trainer.plan import Plan
from trainer.recipe import Recipe
from trainer.rundir.records import CommitRef
from trainer.rundir.store import AlreadyExists, NotFound, Store
from trainer.settings import Settings

PARTS = "evaluating"  # evaluating/<n>.<k>/<step>/<part>.json, until the document is there
TASK = "task "  # what the name of a task's part begins with; names of sets have no space

Part = dict[str, Any]
Told = Callable[[str, int, int], None]  # part, rows done, rows in all


@dataclass(frozen=True)
class HeldOut:
    """Loss of windows of text. `loss` is the mean cross entropy per target, in nats."""

    loss: float
    instances: int
    targets: int
    ids: str
    seconds: float


def due(recipe: Recipe, settings: Settings, step: int) -> list[str]:
    """The parts to evaluate in the state after `step` steps."""
    if step <= 0:
        return []
    parts: list[str] = []
    if settings.evaluate_every and step % settings.evaluate_every == 0:
        parts += [WINDOWS] * bool(recipe.data.held_out) + list(expand(settings.evaluation.sets))
    if settings.tasks_every and step % settings.tasks_every == 0:
        parts += task_parts(settings.evaluation.tasks)
    return parts


def task_parts(names: Sequence[str]) -> list[str]:
    """The parts that these tasks and groups of tasks are. Raises ConfigurationError for an unknown one."""
    from trainer.downstream.catalog import find_tasks

    return [TASK + task.name for task in find_tasks(names)] if names else []


def check_tasks(recipe: Recipe, settings: Settings) -> None:
    """Whether the tasks can be evaluated: names, package, tokenizer. Raises ConfigurationError; before anything starts."""
    if task_parts(settings.evaluation.tasks):
        from trainer.downstream.encoding import encoder_for

        encoder_for(recipe, settings.evaluation.tokenizer)


@dataclass
class Evaluator:
    """Computes parts on one mesh. `beat` and `patient` are the watchdog's, `told` hears of progress."""

    recipe: Recipe
    plan: Plan
    mesh: Any
    rank: int
    data_root: str
    windows: Mix | None
    sets: dict[str, tuple[str, ...]]
    tokenizer: str | None = None
    limit: int | None = None  # documents of each task and set, for a quick look
    beat: Callable[[str], None] = lambda what: None
    patient: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
    told: Told = lambda part, done, total: None
    _read: dict[str, Future[Any]] = field(default_factory=dict)
    _eval_step: Any = None
    _scorer: Any = None
    _encode: Any = None

    def evaluate(self, params: Any, part: str, after: str | None = None) -> Part:
        """`part` of the state with these parameters. All processes call it; all get the result.

        `after` is the part that comes next: it is read and tokenised while the devices compute.
        """
        began = time.monotonic()
        for coming in (part, after):
            if coming not in (None, WINDOWS) and coming not in self._read:
                self._read[coming] = self._reader.submit(self._read_part, coming)
        if part == WINDOWS:
            found = self._windows(params)
        elif part.startswith(TASK):
            found = self._task(params, part)
        else:
            found = self._set(params, part)
        return {**found, "seconds": round(time.monotonic() - began, 4)}

    def _windows(self, params: Any) -> Part:
        from trainer.step import make_eval_step

        assert self.windows is not None, "a recipe without data.held_out has no such part"
        first = self._eval_step is None
        if first:
            self._eval_step = make_eval_step(self.recipe, self.plan, self.mesh)

        def beat(done: int, total: int) -> None:
            self.beat("the next batch of the evaluation")
            self.told(WINDOWS, done, total)

        with self.patient("the first evaluation, which compiles") if first else nullcontext():
            result = evaluate(params, self.recipe, self.plan, self.mesh, self.windows, self._eval_step, self.rank, beat)
        return {
            "metrics": _lm(WINDOWS, result.loss),
            "loss": result.loss,
            "instances": result.instances,
            "targets": result.targets,
            "ids": result.ids,
        }

    def _set(self, params: Any, name: str) -> Part:
        from trainer.data.held_out_documents import mean_loss

        given = self._ready(name)
        loss = mean_loss(given, self._score(params, name, given.rows))
        counts = {"documents": given.documents, "tokens": given.tokens, "cut": given.cut, "bytes": given.bytes}
        return {"metrics": _lm(name, loss), "loss": loss, "files": list(self.sets[name]), **counts}

    def _task(self, params: Any, part: str) -> Part:
        from trainer.downstream.metrics import labelled, likelihoods, metrics

        name = part.removeprefix(TASK)
        task, given = self._ready(part)
        scores = self._score(params, part, given.rows)
        values = metrics(task.metric, given.choices, *likelihoods(given.choices, scores))
        named = {f"eval/downstream/{label}": value for label, value in labelled(name, values).items()}
        counts = {
            "documents": len({choice.document for choice in given.choices}),
            "choices": len(given.choices),
            "truncated": given.truncated,
            "cut": given.cut,
        }
        return {"metrics": named, "metric": task.metric, **counts}

    @cached_property
    def _reader(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="evaluation")

    def _ready(self, part: str) -> Any:
        """What was read of `part`, kept for the next commit."""
        with self.patient(f"reading {part}"):
            return self._read[part].result()

    def _read_part(self, part: str) -> Any:
        if part.startswith(TASK):
            return self._read_task(part.removeprefix(TASK))
        from trainer.data.held_out_documents import read_documents

        return read_documents(self.recipe, open_root(self.data_root), part, self.sets[part], self.limit)

    def _read_task(self, name: str) -> Any:
        from trainer.downstream.catalog import find_tasks
        from trainer.downstream.choices import tokenize
        from trainer.downstream.encoding import encoder_for
        from trainer.downstream.requests import read_requests

        (task,) = find_tasks([name])
        if self._encode is None:
            self._encode = encoder_for(self.recipe, self.tokenizer)
        found = tokenize(task, read_requests(task, self.limit), self._encode, self.recipe.sequence_length)
        if found.cut and self.rank == 0:
            log().warning(
                f"task {name}: {found.cut} of {len(found.choices)} continuations are longer than the recipe's "
                f"sequence_length {self.recipe.sequence_length}; the last so many tokens of them are scored"
            )
        return task, found

    def _score(self, params: Any, part: str, rows: Sequence[Any]) -> Any:
        from trainer.scoring import Scorer

        if self._scorer is None:
            self._scorer = Scorer(self.recipe, self.mesh)
        with ExitStack() as patience:

            def beat(done: int, compiles: bool) -> None:
                patience.close()
                self.told(part, done, len(rows))
                if compiles:
                    patience.enter_context(self.patient("an evaluation of another length, which compiles"))
                else:
                    self.beat(f"the next batch of {part}")

            return self._scorer.score(params, rows, beat)


def evaluate(
    params: Any,
    recipe: Recipe,
    plan: Plan,
    mesh: Any,
    mix: Mix,
    step_fn: Callable[..., Any],
    rank: int,
    beat: Callable[[int, int], None] = lambda done, total: None,
) -> HeldOut:
    """Mean loss of `params` on the windows of `mix`, each once. All processes call it; all get the result.

    `step_fn` is make_eval_step's; `beat(windows done, all)` is called after each batch.
    """
    from trainer.sharding import put_batch

    began = time.monotonic()
    rows = plan.rows_per_pass
    sums: list[float] = []
    targets = 0
    for batch in held_out_batches(mix, plan, rank):
        found = step_fn(params, put_batch(batch, mesh))
        real = min(rows, len(mix) - len(sums))
        sums.extend(np.asarray(found["ce_sum"], np.float64).reshape(-1)[:real].tolist())
        targets += int(np.asarray(found["count"]).reshape(-1)[:real].sum())
        beat(len(sums), len(mix))
    ids = ids_hash(np.arange(len(mix), dtype=np.uint64))
    return HeldOut(math.fsum(sums) / max(targets, 1), len(sums), targets, ids, round(time.monotonic() - began, 4))


def _lm(name: str, loss: float) -> dict[str, float]:
    """As OLMo-core's LMEvaluator names them."""
    return {f"eval/lm/{name}/CE loss": loss, f"eval/lm/{name}/PPL": math.exp(loss) if loss < 700 else math.inf}


# --- a commit's document


def key(ref: CommitRef) -> str:
    """Where the result of a commit lies: it belongs to the commit, whichever start computed it."""
    return f"eval/{ref.attempt}.{ref.start}/{ref.step}.json"


def part_key(ref: CommitRef, part: str) -> str:
    return f"{_parts_of(ref)}/{part.replace(' ', '-')}.json"


def _parts_of(ref: CommitRef) -> str:
    return f"{PARTS}/{ref.attempt}.{ref.start}/{ref.step}"


def has_result(store: Store, ref: CommitRef) -> bool:
    return _read(store, key(ref)) is not None


def evaluate_commit(
    evaluator: Evaluator, params: Any, parts: Sequence[str], ref: CommitRef, gang: Gang, store: Store, by: str
) -> dict[str, Any] | None:
    """Compute what is missing of `parts` and write the document of `ref`. Rank 0 returns it, the others None."""
    found: dict[str, Part] = {}
    if gang.rank == 0:
        found = {part: there for part in parts if (there := _read(store, part_key(ref, part))) is not None}
    missing = json.loads(gang.decide(f"evaluate/{ref.step}", json.dumps([p for p in parts if p not in found])))
    for number, part in enumerate(missing, 1):
        found[part] = evaluator.evaluate(params, part, next(iter(missing[number:]), None))
        if gang.rank == 0:
            _create(store, part_key(ref, part), found[part])
            value = found[part].get("loss", next(iter(found[part]["metrics"].values())))
            log().info("evaluated", step=ref.step, part=part, value=round(value, 6), number=f"{number}/{len(missing)}")
    if gang.rank:
        return None
    body = document(ref.step, {part: found[part] for part in parts})
    body |= {"commit": ref.model_dump(mode="json"), "by": by, "time": time.time()}
    _create(store, key(ref), body)  # a second one for the same commit is the same numbers and is dropped
    store.delete_tree(_parts_of(ref))
    return body


def document(step: int, parts: dict[str, Part]) -> dict[str, Any]:
    """The results of `parts` in one."""
    windows = parts.get(WINDOWS, {})
    body: dict[str, Any] = {"version": 1, "step": step, "metrics": {}, "sets": {}, "tasks": {}}
    body |= {name: windows[name] for name in ("loss", "instances", "targets", "ids") if name in windows}
    body["seconds"] = round(sum(found["seconds"] for found in parts.values()), 4)
    for part, found in parts.items():
        body["metrics"] |= found["metrics"]
        about = {name: value for name, value in found.items() if name != "metrics"}
        if part.startswith(TASK):
            body["tasks"][part.removeprefix(TASK)] = about
        elif part != WINDOWS:
            body["sets"][part] = about
    return body


def _read(store: Store, key: str) -> Any:
    try:
        return json.loads(store.get(key).data)
    except NotFound:
        return None


def _create(store: Store, key: str, body: dict[str, Any]) -> None:
    with suppress(AlreadyExists):
        store.create(key, json.dumps(body, sort_keys=True).encode())
