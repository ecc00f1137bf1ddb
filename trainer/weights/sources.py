"""Opening weights of any kind: a commit of a run, a checkpoint folder, Hugging Face's or OLMo-core's files."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from trainer.errors import ConfigurationError
from trainer.recipe import Recipe
from trainer.weights.checkpoint import CheckpointSource, read_description
from trainer.weights.description import Description, different, from_config, of_recipe
from trainer.weights.folder import Folder
from trainer.weights.olmo_core import OlmoCoreCheckpoint
from trainer.weights.safetensors import INDEX, SINGLE, SafetensorsFolder
from trainer.weights.slots import Naming, Slot, check_tensors, slots, to_ours


class Source(Protocol):
    """Weights that can be read tensor by tensor, as float32 slices of our parameters."""

    uri: str
    description: Description
    dtype: str  # of the tensors as they are stored

    def read(self, slot: Slot) -> np.ndarray:
        """One tensor, as a slice of our parameter, the vocabulary padded."""

    def stream(self) -> Iterator[tuple[Slot, np.ndarray]]:
        """Every tensor once, in the order that is the fastest to read."""


class NamedSource:
    """Weights in files of others, by their names."""

    def __init__(self, files: SafetensorsFolder | OlmoCoreCheckpoint, naming: Naming, description: Description) -> None:
        """Raises ConfigurationError naming every tensor that does not fit."""
        self.uri, self.description, self._files, self._naming = files.uri, description, files, naming
        self._slots = {slot.name(naming): slot for slot in slots(description.model)}
        check_tensors(files.tensors, list(self._slots.values()), description.model, naming, files.uri)
        dtypes = {dtype for dtype, _ in files.tensors.values()}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else "float32"

    def unpadded(self) -> "NamedSource":
        """The same weights for a vocabulary without padding: rows that nobody trained would count in each softmax."""
        model = self.description.model
        model = model.model_copy(update={"padded_vocab_size": model.vocab_size})
        return NamedSource(self._files, self._naming, self.description.model_copy(update={"model": model}))

    def read(self, slot: Slot) -> np.ndarray:
        return to_ours(slot, self._files.read(slot.name(self._naming)), self.description.model)

    def stream(self, order: list[Slot] | None = None) -> Iterator[tuple[Slot, np.ndarray]]:
        """Every tensor once, in `order` if that is given, with the next one read ahead."""
        names = self._files.in_order(list(self._slots)) if order is None else [s.name(self._naming) for s in order]
        with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as ahead:
            coming = ahead.submit(self._files.read, names[0])
            for i, name in enumerate(names):
                tensor = coming.result()
                if i + 1 < len(names):
                    coming = ahead.submit(self._files.read, names[i + 1])
                yield self._slots[name], to_ours(self._slots[name], tensor, self.description.model)
                del tensor


def open_hugging_face(uri: str, recipe: Recipe | None = None) -> NamedSource:
    """The folder of an Olmo3ForCausalLM, on disk or gs://. Raises ConfigurationError when it is none.

    With a `recipe`, the architecture has to be its model's, but for YaRN, which a later stage turns on.
    """
    folder = Folder(uri)
    config = folder.read_json("config.json")
    if config is None:
        raise ConfigurationError(f"{folder.uri}: config.json is missing; give the folder of a Hugging Face model")
    source = f"{folder.uri}/config.json"
    found = from_config(config, source)
    if recipe is not None:
        wrong = [line for line in different(recipe.model, found.model) if not line.startswith("model.yarn ")]
        if wrong:
            raise ConfigurationError(f"{source} describes another model than recipe {recipe.name}: {'; '.join(wrong)}")
        found = found.model_copy(update={"model": recipe.model})
    return NamedSource(SafetensorsFolder(folder), "hf", found)


def open_source(uri: str, recipe: Recipe | None = None) -> Source:
    """Whatever weights lie at `uri`: RUN_DIRECTORY[@STEP], or a folder in one of the formats.

    Raises ConfigurationError when it is none of them, or when only a recipe could say what the tensors mean.
    """
    place, _, step = uri.rpartition("@")
    if place and step.isdigit():
        return _open_commit(place, int(step))
    folder = Folder(uri)
    if folder.size("recipe.json") is not None:
        return _open_commit(uri, None)
    if folder.size("_METADATA") is not None:
        description = of_recipe(recipe) if recipe is not None else read_description(folder)
        if description is None:
            raise ConfigurationError(
                f"{folder.uri}: a checkpoint folder does not say what model it is of; give --recipe"
            )
        return CheckpointSource(folder, description)
    for below in ("", "model_and_optim/"):
        if folder.size(f"{below}.metadata") is not None:
            return NamedSource(OlmoCoreCheckpoint(folder, below), "olmo_core", _needed(recipe, folder))
    if folder.size(SINGLE) is not None or folder.size(INDEX) is not None:
        files = SafetensorsFolder(folder)
        if "embeddings.weight" in files.tensors:
            return NamedSource(files, "olmo_core", _needed(recipe, folder))
        return open_hugging_face(uri, recipe)
    raise ConfigurationError(
        f"{folder.uri}: no weights known here: neither a run directory (recipe.json), nor a checkpoint folder "
        f"(_METADATA), nor {SINGLE} or {INDEX}, nor OLMo-core's .metadata"
    )


def _needed(recipe: Recipe | None, folder: Folder) -> Description:
    if recipe is None:
        raise ConfigurationError(f"{folder.uri}: weights of OLMo-core do not say what model they are of; give --recipe")
    return of_recipe(recipe)


def _open_commit(uri: str, step: int | None) -> CheckpointSource:
    """The commit at `step` (None: the newest) of a run. Raises ConfigurationError; a damaged one is not opened."""
    from trainer.checkpoint import compare_files
    from trainer.rundir.rundir import RunDirectory

    rundir = RunDirectory.open(uri)
    found, stored = rundir.head(), rundir.read_recipe()
    if found is None or stored is None or found[0].commit is None:
        raise ConfigurationError(f"{rundir.uri} has no commit yet")
    records = list(rundir.lineage(found[0].commit))
    record = next((r for r in records if step is None or r.ref.step == step), None)
    if record is None:
        steps = ", ".join(str(r.ref.step) for r in records[:10])
        raise ConfigurationError(f"{rundir.uri} has no commit at step {step}; newest commits: {steps}")
    damage = compare_files(rundir.store, record, 0, 1)
    if damage:
        raise ConfigurationError(f"{record.ref} of {rundir.uri} is damaged: {damage}; name another commit with @STEP")
    return CheckpointSource(Folder(rundir.path(record.checkpoint)), of_recipe(stored.recipe))
