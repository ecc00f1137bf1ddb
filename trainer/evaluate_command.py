"""`python -m trainer evaluate`: held-out losses and downstream tasks of a commit, or of weights of Hugging Face."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from trainer.errors import ConfigurationError
from trainer.evaluation_settings import WINDOWS, expand, parse_sets
from trainer.places import check_writable, written
from trainer.recipe import Recipe


@click.command()
@click.option("--run-directory", metavar="URI", help="a run: folder or gs:// prefix")
@click.option("--step", type=int, help="a committed step of it [the newest]")
@click.option("--hf", metavar="FOLDER", help="instead of a run: an Olmo3ForCausalLM in safetensors")
@click.option(
    "--sets",
    multiple=True,
    metavar="all|NAME,…|NAME=FILE,…",
    help="held-out sets: all of the run's; held_out, the recipe's own; known ones; or files below the data root. "
    "[all, without --tasks]",
)
@click.option("--tasks", multiple=True, metavar="NAME,…", help="downstream tasks and groups, e.g. eight or fast")
@click.option(
    "--limit", type=click.IntRange(1), metavar="N", help="only the first N documents of each named set and task"
)
@click.option("--data-root", metavar="URI", help="of token files [that of the newest attempt]")
@click.option(
    "--tokenizer", metavar="NAME", help="of the tasks: dolma2, bytes or a tokenizer.json [by the recipe's eos_id]"
)
@click.option("--device", default="cpu-1", show_default=True)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), help="to compute in [the recipe's; bfloat16 with --hf]"
)
@click.option(
    "--out", metavar="FILE", help="keep results here, part by part; what is in it already is not computed again"
)
@click.option("--list-tasks", is_flag=True, help="show groups and tasks, and end")
@click.option("--json", "as_json", is_flag=True, help="one JSON object on standard output")
def evaluate(list_tasks: bool, as_json: bool, **given: Any) -> None:
    """Evaluate a commit of a run, or weights of Hugging Face. The run is only read."""
    if list_tasks:
        click.echo("\n".join(task_lines()))
        return
    body = run(Given(**given))
    click.echo(json.dumps(body, sort_keys=True) if as_json else table(body))


@dataclass(frozen=True)
class Given:
    """The options."""

    run_directory: str | None = None
    step: int | None = None
    hf: str | None = None
    sets: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    limit: int | None = None
    data_root: str | None = None
    tokenizer: str | None = None
    device: str = "cpu-1"
    dtype: str | None = None
    out: str | None = None


@dataclass(frozen=True)
class Subject:
    """What is evaluated: of a run, or of weights."""

    recipe: Recipe
    name: str
    data_root: str | None
    sets: dict[str, tuple[str, ...]]  # those of the run's settings
    tokenizer: str | None
    source: Any  # (run directory, commit record), or weights
    step: int = 0


def run(given: Given) -> dict[str, Any]:
    """The document of the results. Everything that can be wrong with the options is looked at before weights are read."""
    if (given.run_directory is None) == (given.hf is None):
        raise ConfigurationError("give --run-directory, or --hf FOLDER")
    subject = _weights(given) if given.hf is not None else _commit(given)
    parts, sets = _parts(given, subject)

    from trainer.environment import prepare_jax
    from trainer.evaluate import TASK, Evaluator, document
    from trainer.hardware import device_type
    from trainer.standalone import plan_here

    recipe = subject.recipe
    tokenizer = given.tokenizer or subject.tokenizer
    if any(part.startswith(TASK) for part in parts):
        from trainer.downstream.encoding import encoder_for

        encoder_for(recipe, tokenizer)
    windows = None
    if sets or WINDOWS in parts:
        from trainer.data.held_out import with_sets

        held_out = with_sets(recipe, _needed_root(subject), sets)  # every file is there
        if WINDOWS in parts:
            from trainer.data.mix import Mix

            windows = Mix(recipe, held_out.root, "held_out")
            windows.check()
    commit = subject.source[1].ref.key if given.run_directory is not None else None
    about = {"of": subject.name, "commit": commit, "limit": given.limit, "dtype": recipe.compute_dtype}
    kept = Kept.open(given.out, {**about, "tokenizer": tokenizer})
    plan = plan_here(recipe, given.device)
    missing = [part for part in parts if part not in kept.parts or kept.parts[part].get("files") != _files(part, sets)]
    if missing:
        prepare_jax(plan, None, device_type(given.device).family)

        from trainer.sharding import make_mesh

        mesh = make_mesh(plan, recipe)
        params = _params(subject, mesh)
        bars = _Bars(missing)
        evaluator = Evaluator(
            recipe=recipe,
            plan=plan,
            mesh=mesh,
            rank=0,
            data_root=subject.data_root or "",
            windows=windows,
            sets=sets,
            tokenizer=tokenizer,
            limit=given.limit,
            told=bars.told,
        )
        for number, part in enumerate(missing, 1):
            kept.add(part, evaluator.evaluate(params, part, next(iter(missing[number:]), None)))
            bars.done(part, kept.parts[part])
    found = document(subject.step, {part: kept.parts[part] for part in parts})
    return found | about | {"recipe": recipe.name, "device": given.device}


def _files(part: str, sets: dict[str, tuple[str, ...]]) -> list[str] | None:
    return list(sets[part]) if part in sets else None


# --- what is evaluated


def _commit(given: Given) -> Subject:
    from trainer.rundir.rundir import RunDirectory

    assert given.run_directory is not None
    rundir = RunDirectory.open(given.run_directory)
    found, stored = rundir.head(), rundir.read_recipe()
    if found is None or stored is None or found[0].commit is None:
        raise ConfigurationError(f"{rundir.uri} has no commit yet")
    record = next((r for r in rundir.lineage(found[0].commit) if given.step in (None, r.ref.step)), None)
    if record is None:
        raise ConfigurationError(
            f"step {given.step} is not committed in {rundir.uri}; the newest commit is {found[0].commit}"
        )
    spec = rundir.read_spec(found[0].attempt)
    assert spec is not None
    changes = {"compute_dtype": given.dtype} if given.dtype else {}
    settings = spec.settings
    return Subject(
        recipe=stored.recipe.model_copy(update=changes),
        name=f"{rundir.uri}@{record.ref.step}",
        data_root=given.data_root or settings.data_root,
        sets=expand(settings.evaluation.sets),
        tokenizer=settings.evaluation.tokenizer,
        source=(rundir, record),
        step=record.ref.step,
    )


def _weights(given: Given) -> Subject:
    """Weights as they are: the vocabulary is not padded, since rows that nobody trained would count in each softmax."""
    from trainer.recipe import Data, DataFile, Order, SchedulePiece
    from trainer.weights.sources import open_hugging_face

    assert given.hf is not None
    if given.step is not None:
        raise ConfigurationError("--step goes with --run-directory")
    source = open_hugging_face(given.hf).unpadded()
    description = source.description
    if description.eos_id is None:
        raise ConfigurationError(f"{given.hf}/config.json: eos_token_id is missing; it says where documents end")
    recipe = Recipe(
        name=Path(given.hf).name or given.hf,
        model=description.model,
        data=Data(
            files=(DataFile(path="none"),), eos_id=description.eos_id, order=Order(kind="feistel", seed=0)
        ),  # neither is used: nothing is trained
        schedule=(SchedulePiece(shape="constant", peak=1e-3, warmup_steps=0, total_steps=1, alpha_f=1),),
        sequence_length=description.max_positions,
        compute_dtype=given.dtype or "bfloat16",
    )
    name = given.hf if "://" in given.hf else os.path.abspath(given.hf)
    return Subject(recipe, name, given.data_root, {}, None, source)


def _params(subject: Subject, mesh: Any) -> Any:
    """The parameters on the mesh. Raises ConfigurationError for a damaged checkpoint."""
    from trainer.sharding import param_shardings

    if not isinstance(subject.source, tuple):
        from trainer.weights.on_mesh import load_params

        return load_params(subject.source, param_shardings(subject.recipe.model, mesh))
    from trainer.checkpoint import Checkpoints, compare_digest, compare_files
    from trainer.digest import state_digest
    from trainer.step import abstract_state

    rundir, record = subject.source
    damage = compare_files(rundir.store, record, 0, 1)
    if not damage:
        state = Checkpoints().restore(rundir.path(record.checkpoint), abstract_state(subject.recipe, mesh))
        damage = compare_digest(state_digest(state), record.digest)
    if damage:
        raise ConfigurationError(f"{record.ref} of {rundir.uri} is damaged: {damage}; give an older --step")
    return state.params


def _parts(given: Given, subject: Subject) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """(the parts in their order, files of the named sets among them)."""
    from trainer.evaluate import task_parts

    names = [name for text in given.sets for name in ([text] if "=" in text else text.split(",")) if name]
    own = [WINDOWS] * bool(subject.recipe.data.held_out)
    sets: dict[str, tuple[str, ...]] = {}
    parts: list[str] = []
    if "all" in names or not (names or given.tasks):
        parts, sets = list(own), dict(subject.sets)
        if not parts and not sets:
            raise ConfigurationError(
                f"{subject.name} has no held-out text of its own; name some: --sets v3_small_ppl_validation, "
                "--sets NAME=FILE, --tasks eight"
            )
    if WINDOWS in names:
        if not own:
            raise ConfigurationError(f"the recipe of {subject.name} has no data.held_out; leave --sets held_out out")
        parts = own
    wanted = [name for name in names if name not in ("all", WINDOWS)]
    sets |= {name: subject.sets[name] for name in wanted if name in subject.sets}
    sets |= expand(parse_sets([name for name in wanted if name not in subject.sets]))
    tasks = task_parts([name for text in given.tasks for name in text.split(",") if name])
    return [*parts, *sets, *tasks], sets


def _needed_root(subject: Subject) -> str:
    if subject.data_root is None:
        raise ConfigurationError("--sets with --hf: give --data-root, the folder or gs:// prefix of the token files")
    return subject.data_root


# --- results


@dataclass
class Kept:
    """Parts that are there, in memory and in the file --out."""

    path: Path | None
    about: dict[str, Any]
    parts: dict[str, Any]

    @classmethod
    def open(cls, path: str | None, about: dict[str, Any]) -> "Kept":
        """Raises ConfigurationError when the file holds results of something else, or none can be written."""
        if path is not None:
            check_writable("--out", Path(path))
        if path is None or not Path(path).exists():
            return cls(Path(path) if path else None, about, {})
        try:
            body = json.loads(Path(path).read_text(encoding="utf-8"))
            there = {key: body[key] for key in about}
            parts = dict(body["parts"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigurationError(f"--out {path}: not a file of results; choose another one") from None
        if there != about:
            raise ConfigurationError(f"--out {path}: holds results of {there}, not of {about}; choose another file")
        return cls(Path(path), about, parts)

    def add(self, part: str, found: dict[str, Any]) -> None:
        self.parts[part] = found
        if self.path is None:
            return
        text = json.dumps({**self.about, "parts": self.parts}, sort_keys=True, indent=1)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with written(f"--out {self.path}"):
            try:
                beside.write_text(text + "\n", encoding="utf-8")
                os.replace(beside, self.path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise


class _Bars:
    """On standard error: a line per finished part; on a terminal also a line that counts its rows."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = list(parts)
        self._told_at = 0.0
        self._terminal = sys.stderr.isatty()

    def told(self, part: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._terminal and now - self._told_at > 0.2:
            self._told_at = now
            print(
                f"\r\x1b[K{self._number(part)} {part}: {done:,} of {total:,} rows", end="", file=sys.stderr, flush=True
            )

    def done(self, part: str, found: dict[str, Any]) -> None:
        begin = "\r\x1b[K" if self._terminal else ""
        print(f"{begin}{self._number(part)} {part}: {found['seconds']:.1f} s", file=sys.stderr, flush=True)

    def _number(self, part: str) -> str:
        return f"[{self._parts.index(part) + 1}/{len(self._parts)}]"


def table(body: dict[str, Any]) -> str:
    """The results for people: a line per set and per task."""
    lines = [body["of"] + (f", first {body['limit']} documents" if body["limit"] else "")]
    if "loss" in body:
        counted = f"{body['instances']:,} instances (ids {body['ids']})"
        lines.append(f"held-out loss {body['loss']:.6f} over {counted}")
    rows = [("set", "CE loss", "PPL", "documents")]
    rows += [
        (name, f"{one['loss']:.4f}", f"{body['metrics'][f'eval/lm/{name}/PPL']:.3f}", f"{one['documents']:,}")
        for name, one in body["sets"].items()
    ]
    lines += _aligned(rows) if body["sets"] else []
    rows = [("task", "metric", "value", "documents")]
    for name, one in body["tasks"].items():
        label = _primary(one["metric"])
        value = body["metrics"][f"eval/downstream/{name} ({label})"]
        rows.append((name, label, f"{value:.4f}", f"{one['documents']:,}"))
    return "\n".join([*lines, *(_aligned(rows) if body["tasks"] else [])])


def _primary(metric: str) -> str:
    from trainer.downstream.metrics import LABELS

    return LABELS[metric]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < 1 or rows[0][i] == "metric" else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def task_lines() -> list[str]:
    """Groups and tasks, a line each."""
    from trainer.downstream.catalog import GROUPS, catalog

    lines = [f"group {name}: {len(tasks)} tasks" for name, tasks in GROUPS.items()]
    return lines + [f"{task.name}  {task.metric}  {task.source}" for task in catalog().values()]
