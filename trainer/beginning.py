"""Where step 0 comes from: the initialiser, a commit of another run, a checkpoint folder, or Hugging Face's weights.

Decided once, by the first start that gets here, and kept in init.json: later starts without a commit to resume from
(also after damaged ones were set aside) begin from the same bits, whatever their settings say.
"""

from typing import Any

from trainer.checkpoint import Checkpoints, compare_digest
from trainer.errors import ConfigurationError, StorageUnavailable
from trainer.log import log
from trainer.recipe import Recipe
from trainer.rundir.records import InitRecord
from trainer.rundir.rundir import RunDirectory
from trainer.settings import InitFrom

# From one start of a run to its next, however long it queues between them; each start that reads extends it.
PIN_SECONDS = 7 * 24 * 3600.0


def resolve(source: InitFrom | None) -> tuple[InitRecord, dict[str, int] | None]:
    """Fix `source`: which commit, which folder; and the digest of that commit. Rank 0 only.

    The record's own digest, that of the initial state, is added once the state was built. Raises ConfigurationError
    naming initFrom when the other run has no such commit.
    """
    if source is None:
        return InitRecord(source=None), None
    if source.checkpoint is not None:
        return InitRecord(source=source, checkpoint_uri=source.checkpoint), None
    if source.hf is not None:
        return InitRecord(source=source, checkpoint_uri=source.hf), None
    assert source.run is not None
    uri, _, step = source.run.partition("@")
    if step and not step.isdigit():
        raise ConfigurationError(f"initFrom.run {source.run!r}: after @ comes a step number")
    other = RunDirectory.open(uri)
    found = other.head()
    commit = found[0].commit if found else None
    if commit is None:
        raise ConfigurationError(f"initFrom.run {uri}: that run has no commit yet; wait for one, or name another run")
    lineage = list(other.lineage(commit))
    record = next((r for r in lineage if not step or r.ref.step == int(step)), None)
    if record is None:
        steps = ", ".join(str(r.ref.step) for r in lineage[:10])
        raise ConfigurationError(f"initFrom.run {source.run}: no commit at step {step}; newest commits: {steps}")
    init = InitRecord(source=source, commit=record.ref, checkpoint_uri=other.path(record.checkpoint))
    return init, record.digest


def pin(init: InitRecord, reader: str, seconds: float = PIN_SECONDS) -> None:
    """Have the other run keep the commit that `init` names, until the run `reader` has one of its own; 0 lets it go.

    Where that run may only be read, or is gone, a warning: reading will say whether the commit is.
    """
    if init.commit is None:
        return
    assert init.source is not None and init.source.run is not None
    uri = init.source.run.partition("@")[0]
    try:
        RunDirectory.open(uri).pin(reader, init.commit, seconds)
    except (ConfigurationError, StorageUnavailable) as error:
        if seconds:
            log().warning(
                f"initFrom: {init.commit} of {uri} could not be pinned and may be collected", error=str(error)
            )


def build(init: InitRecord, recipe: Recipe, mesh: Any, checkpoints: Checkpoints) -> Any:
    """The initial TrainState on `mesh`, as `init` says. All processes call it.

    Raises ConfigurationError when the source is missing or does not fit the recipe's model.
    """
    import jax
    import jax.numpy as jnp

    from trainer.optimizer import empty_window
    from trainer.step import abstract_state, init_state, state_with

    source = init.source
    if source is None:
        return init_state(recipe, mesh)
    assert init.checkpoint_uri is not None
    want = abstract_state(recipe, mesh)
    if source.hf is not None:
        return state_with(_hugging_face(source.hf, recipe, want.params), recipe, mesh)
    target: Any = want if source.optimizer_state else {"params": want.params}
    try:
        loaded = checkpoints.restore(init.checkpoint_uri, target, partial=not source.optimizer_state)
    except Exception as error:
        from trainer.departure import is_peer_loss

        if is_peer_loss(error):
            raise
        alone = "; if it holds weights alone, set initFrom.optimizerState: false" if source.optimizer_state else ""
        raise ConfigurationError(
            f"initFrom: {init.checkpoint_uri} cannot be read into this recipe's model{alone}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not source.optimizer_state:
        return state_with(loaded["params"], recipe, mesh)
    if source.step:
        return loaded
    # Another stage: the losses of other data say nothing about what is a spike in these.
    step, window = jax.jit(
        lambda: (jnp.zeros((), jnp.int32), empty_window(recipe.optimizer)),
        out_shardings=(want.step.sharding, jax.tree.map(lambda leaf: leaf.sharding, want.window)),
    )()
    return loaded._replace(step=step, window=window)


def _hugging_face(uri: str, recipe: Recipe, want: dict[str, Any]) -> Any:
    """The parameters at `uri` on the shardings of `want`. Raises ConfigurationError naming initFrom.hf."""
    from trainer.weights.on_mesh import load_params
    from trainer.weights.sources import open_hugging_face

    try:
        return load_params(open_hugging_face(uri, recipe), {name: leaf.sharding for name, leaf in want.items()})
    except ConfigurationError as error:
        raise ConfigurationError(f"initFrom.hf: {error}") from None


def check_source(init: InitRecord, expected: dict[str, int], found: dict[str, int]) -> None:
    """Compare the leaves taken over from another run's commit with that commit's digest.

    Raises ConfigurationError when they differ.
    """
    taken = {name: value for name, value in found.items() if _taken(init, name)}
    wrong = compare_digest(taken, {name: expected[name] for name in taken if name in expected})
    if wrong:
        raise ConfigurationError(f"initFrom: {init.checkpoint_uri} is damaged: {wrong}; name another commit with @STEP")


def _taken(init: InitRecord, leaf: str) -> bool:
    assert init.source is not None
    if not init.source.optimizer_state:
        return leaf.startswith("params/")
    return init.source.step or not (leaf == "step" or leaf.startswith("window/"))


def check_again(init: InitRecord, found: dict[str, int]) -> str:
    """What a later start has to say about its initial state: empty if it is the first one's, bit for bit.

    Raises ConfigurationError when what it was taken from changed since.
    """
    if init.digest is None:
        return ""
    wrong = compare_digest(found, init.digest)
    if wrong and init.source is not None:
        raise ConfigurationError(
            f"initFrom: {init.checkpoint_uri} changed since this run began ({wrong}); "
            "put the original back, or begin a new run"
        )
    return wrong
