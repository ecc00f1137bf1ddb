"""From what a user asks for to what its Caretaker needs: the recipe, frozen, and a first look at the data.

Changes nothing. Slow at times: files are measured, and held-out text is looked for in the training files.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from orchestrator import trainer_process
from orchestrator.api import ConfigMapKeyRef, TrainingRun
from orchestrator.planning import ladder
from trainer import recipe as recipes
from trainer.errors import ConfigurationError
from trainer.freezing import freeze
from trainer.recipe import Recipe
from trainer.rundir.rundir import RunDirectory
from trainer.rundir.store import StoreMissing

# A single call is repeated this long; a longer outage is shown as such, and the look after it starts afresh.
STORE_PATIENCE_SECONDS = 3.0
ConfigMaps = Callable[[ConfigMapKeyRef], str]  # the text of one key of a ConfigMap in the run's namespace


def prepare(run: TrainingRun, config_maps: ConfigMaps | None = None) -> Recipe:
    """The run's recipe, frozen, and every rung of its ladder tried. Changes nothing.

    Raises ConfigurationError for a bad recipe, bad data or a batch that no plan makes exact; StorageUnavailable.
    """
    recipe = freeze(load_recipe(run, config_maps), run.spec.data.root)
    ladder(run, recipe)
    return recipe


def load_recipe(run: TrainingRun, config_maps: ConfigMaps | None = None) -> Recipe:
    """The recipe that `run` names, not frozen yet. Raises ConfigurationError."""
    wanted = run.spec.recipe
    if wanted.config_map is not None:
        if config_maps is None:
            raise ConfigurationError(
                "spec.recipe.configMap: ConfigMaps are in Kubernetes, and this run is not; give spec.recipe.name"
            )
        source = f"spec.recipe.configMap {wanted.config_map.name}, key {wanted.config_map.key}"
        return recipes.override(recipes.parse_document(config_maps(wanted.config_map), source), wanted.overrides)
    return recipes.load(str(wanted.name), wanted.overrides)


def open_run(run: TrainingRun, recipe: Recipe) -> RunDirectory:
    """The run directory, ready for the first act. Its folder is made only after everything else has been found good.

    Raises ConfigurationError, StorageUnavailable.
    """
    uri = run.spec.run_directory
    if "://" not in uri and not Path(uri).absolute().parent.is_dir():
        # Not made: where a disk is not mounted, an empty folder in its place would look like a new run.
        raise ConfigurationError(
            f"spec.runDirectory {uri}: the folder it should be in does not exist ({Path(uri).absolute().parent}); "
            "create that folder, or check the path and that its disk is mounted"
        )
    if not_begun(uri):  # its recipe is fixed by the first act: a mistake in the data must show before
        check_data(recipe, run.spec.data.root)
    return RunDirectory.open(uri, create=True, patience_seconds=STORE_PATIENCE_SECONDS)


def not_begun(uri: str) -> bool:
    """Whether nothing has fixed the recipe of the run at `uri` yet."""
    try:
        return RunDirectory.open(uri, patience_seconds=STORE_PATIENCE_SECONDS).read_recipe() is None
    except StoreMissing:
        return True


def check_data(recipe: Recipe, data_root: str) -> None:
    """Look at the token files as the first start will. Raises ConfigurationError, StorageUnavailable."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(recipe.canonical())
        file.flush()
        done = trainer_process.call("data", "check", "--recipe", file.name, "--data-root", data_root)
    if done.returncode:
        raise trainer_process.failure(done)
