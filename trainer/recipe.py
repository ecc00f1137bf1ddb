"""The frozen definition of a training: model, data, order, optimizer, schedule, batch. It never mentions hardware.

A recipe is a Python file with constants on top and a function `recipe() -> Recipe` (trainer/recipes/). `load` reads it,
`freeze` measures its data files, and the frozen recipe has a fingerprint: two runs with the same fingerprint train on
the same batches with the same mathematics. Importable without JAX.
"""

import difflib
import hashlib
import importlib.util
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from trainer.errors import ConfigurationError
from trainer.frozen import Frozen, explain_validation

DOCUMENTS = (".yaml", ".yml", ".json")
DTYPE_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}

# Fields younger than the first runs. Where one is at its default it is left out of the fingerprint, so that a run begun
# before it existed keeps its own.
ADDED = {"model": ("yarn",), "data": ("packing", "mask_documents", "repetition_filter", "untrained_bit")}
UNTRAINED = 1 << 31


class Yarn(Frozen):
    """Rotary positions stretched for longer sequences (arXiv 2309.00071), in the full-attention layers only.

    Windowed layers never see further than their window and keep their positions (OLMo-core's with_rope_scaling).
    """

    factor: float = Field(gt=1, description="how many times longer than old_length")
    old_length: int = Field(gt=0, description="sequence length that the model was trained with before")
    beta_fast: float = Field(default=32, gt=0, description="dimensions that turn more often than this are left alone")
    beta_slow: float = Field(
        default=1, gt=0, description="dimensions that turn less often than this are stretched in full"
    )

    @property
    def attention_factor(self) -> float:
        """What cos and sin, and so queries and keys, are multiplied with."""
        return 0.1 * math.log(self.factor) + 1


class Model(Frozen):
    """OLMo 3 at any size (arXiv 2512.13961, table 33)."""

    vocab_size: int = Field(gt=0, description="ids the tokenizer can produce")
    padded_vocab_size: int = Field(
        gt=0, description="rows of the embedding and of the head; the extra ones are never targets"
    )
    d_model: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    mlp_hidden: int = Field(gt=0)
    window_pattern: tuple[int, ...] = Field(
        default=(4096, 4096, 4096, -1),
        description="attention window per layer, repeated; it includes the token itself; -1 is full attention; the last layer is always full",
    )
    rope_theta: float = 500_000.0
    yarn: Yarn | None = None
    norm_eps: float = 1e-6
    init_std: float = 0.02

    @model_validator(mode="after")
    def _consistent(self) -> "Model":
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: rotary embeddings turn pairs")
        if not self.window_pattern or any(w == 0 or w < -1 for w in self.window_pattern):
            raise ValueError("window_pattern needs positive windows, or -1 for full attention")
        return self

    def window(self, layer: int) -> int:
        """Attention window of `layer`, itself included; -1 is full. The last layer is always full."""
        return -1 if layer == self.n_layers - 1 else self.window_pattern[layer % len(self.window_pattern)]


class DataFile(Frozen):
    """One file of raw little-endian tokens without a header, as OLMo-core writes them."""

    path: str = Field(description="relative to the data root, which is not part of the recipe")
    bytes: int | None = Field(default=None, ge=0, description="measured when the recipe is frozen")


class Order(Frozen):
    """Which instances make up batch t. `version` changes whenever the same seed would give another order."""

    kind: Literal["olmo_core", "feistel"]
    seed: int
    version: Literal[1] = 1


class RepetitionFilter(Frozen):
    """Leave instances out of the loss in which a pattern of so many tokens stands so often in a row (OLMo-core)."""

    min_period: int = Field(default=1, ge=1)
    max_period: int = Field(default=13, ge=1)
    max_count: int = Field(default=32, ge=3)


class Packing(Frozen):
    """data.files are made from these by `python -m trainer data pack`: whole documents, best fit decreasing."""

    sources: tuple[str, ...] = Field(min_length=1, description="token files, relative to their root, in packing order")
    group_size: int = Field(gt=0, description="sources whose documents are packed together, into one of data.files")
    pad_id: int = Field(ge=0, description="fills an instance up; never a target, and in no document")


class Data(Frozen):
    """The training mix and the held-out set. Instance i: files in this order, each cut into whole windows."""

    files: tuple[DataFile, ...] = Field(min_length=1)
    held_out: tuple[DataFile, ...] = ()
    dtype: Literal["uint8", "uint16", "uint32"] = "uint32"
    eos_id: int = Field(ge=0)
    omitted_files: tuple[str, ...] = Field(
        default=(), description="files of the original mix left out on purpose; taken out of `files`"
    )
    order: Order
    packing: Packing | None = None
    mask_documents: bool = Field(default=False, description="no attention across an eos_id; each document by itself")
    repetition_filter: RepetitionFilter | None = None
    untrained_bit: bool = Field(
        default=False, description="a token with bit 31 set is read, but no target: a prompt; uint32 only"
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, body: Any) -> Any:
        """Takes omitted_files out of what is read or packed, so that naming them there is all there is to do."""
        if not isinstance(body, dict) or not isinstance(body.get("omitted_files"), (list, tuple)):
            return body
        left_out = [name for name in body["omitted_files"] if isinstance(name, str)]
        files, packing = body.get("files"), body.get("packing")
        if isinstance(files, (list, tuple)):
            body = {**body, "files": [file for file in files if _path(file) not in left_out]}
        packing = packing.model_dump() if isinstance(packing, Packing) else packing
        if isinstance(packing, dict) and isinstance(packing.get("sources"), (list, tuple)):
            sources = [source for source in packing["sources"] if source not in left_out]
            body = {**body, "packing": {**packing, "sources": sources}}
        return body

    @property
    def originals(self) -> tuple[str, ...]:
        """The files of the mix that are read or packed."""
        return self.packing.sources if self.packing is not None else tuple(file.path for file in self.files)


def _path(file: Any) -> Any:
    """The path of a data file, given as one or written out."""
    return file.get("path") if isinstance(file, dict) else getattr(file, "path", None)


class Optimizer(Frozen):
    """SkipStepAdamW (OLMo-core): decoupled decay on all but the embedding, one global clip, a spike is skipped."""

    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0
    skip_window: int = Field(default=128, ge=2, description="losses and norms remembered for the skip rule")
    skip_sigma: float = 6.0
    z_loss: float = 1e-5


class SchedulePiece(Frozen):
    """Learning rate for steps below `until_step` (None: for ever), by global step, warmup from 0 to peak.

    `shape` says what follows the warmup: cosine or linear to alpha_f · peak at total_steps, or constant.
    `half_cosine` is OLMo-core's HalfCosWithWarmup: the second half of a cosine, centred on the end of the warmup.
    """

    shape: Literal["cosine", "half_cosine", "linear", "constant"]
    peak: float = Field(gt=0)
    warmup_steps: int = Field(ge=0)
    total_steps: int = Field(gt=0)
    alpha_f: float = Field(ge=0, le=1)
    until_step: int | None = Field(default=None, gt=0)


class Recipe(Frozen):
    """One stage of training. Everything here decides the numbers; nothing here depends on the machine."""

    name: str
    stage: str = "stage1"
    model: Model
    data: Data
    optimizer: Optimizer = Optimizer()
    schedule: tuple[SchedulePiece, ...] = Field(min_length=1)
    global_batch: int = Field(default=512, gt=0, description="instances per optimizer step")
    sequence_length: int = Field(gt=1, description="tokens per instance")
    init_seed: int = 0
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    param_dtype: Literal["float32"] = "float32"
    reduction: Literal["fast", "invariant"] = Field(
        default="fast",
        description="order of floating-point sums: fast leaves it to XLA, invariant fixes it whatever the devices",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.data.eos_id >= self.model.vocab_size:
            raise ValueError(f"data.eos_id {self.data.eos_id} is not below model.vocab_size {self.model.vocab_size}")
        train = {f.path for f in self.data.files}
        shared = sorted(train & {f.path for f in self.data.held_out})
        if shared:
            raise ValueError(
                f"data.held_out shares files with data.files: {', '.join(shared)}; held-out text must never be trained on"
            )
        if len(train) != len(self.data.files):
            raise ValueError("data.files names a file twice; its instances would be read twice per epoch")
        if self.data.untrained_bit and self.data.dtype != "uint32":
            raise ValueError(f"data.untrained_bit needs data.dtype uint32: {self.data.dtype} has no bit 31")
        if self.data.eos_id >> 8 * DTYPE_BYTES[self.data.dtype]:
            raise ValueError(
                f"data.eos_id {self.data.eos_id} does not fit in data.dtype {self.data.dtype}: files of that dtype "
                "cannot contain it; set data.dtype to what the files are written in"
            )
        if self.data.packing is not None:
            self._check_packing(self.data.packing)
        if self.reduction == "invariant" and self.global_batch & (self.global_batch - 1):
            below = 1 << self.global_batch.bit_length() - 1
            raise ValueError(
                f"reduction invariant sums over instances in pairs, so global_batch must be a power of two: "
                f"not {self.global_batch}, but {below} or {2 * below}; or use reduction fast"
            )
        return self

    def _check_packing(self, packing: Packing) -> None:
        made = -(-len(packing.sources) // packing.group_size)
        if made != len(self.data.files):
            raise ValueError(
                f"data.files has {len(self.data.files)} files, but {len(packing.sources)} sources in groups of "
                f"{packing.group_size} make {made}"
            )
        if packing.pad_id == self.data.eos_id:
            raise ValueError(f"data.packing.pad_id {packing.pad_id} is data.eos_id: padding would be made of documents")
        if packing.pad_id >= self.model.vocab_size:
            raise ValueError(
                f"data.packing.pad_id {packing.pad_id} is not below model.vocab_size {self.model.vocab_size}"
            )

    def fingerprint(self) -> str:
        """sha256 of all that decides the numbers; the name is not among it."""
        body = self.model_dump(mode="json", exclude={"name"})
        for part, fields in ADDED.items():
            defaults = type(getattr(self, part)).model_fields
            for field in fields:
                if body[part][field] == defaults[field].default:
                    del body[part][field]
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def instances_in(self, file: DataFile) -> int:
        """Whole windows of one file; the rest is never read. Needs a frozen recipe."""
        if file.bytes is None:
            raise ConfigurationError(f"data file {file.path}: size not measured yet; freeze the recipe first")
        return file.bytes // DTYPE_BYTES[self.data.dtype] // self.sequence_length

    @property
    def instances(self) -> int:
        """Instances in one epoch before the tail is dropped."""
        return sum(self.instances_in(f) for f in self.data.files)


def load(reference: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe named `reference`, with dotted overrides: a module of trainer.recipes, or a path to a .py file, or to
    a .yaml or .json file that writes the recipe out.

    Raises ConfigurationError for an unknown name (naming the known ones), a file without `recipe()`, or an override
    of a field that does not exist.
    """
    if reference.endswith(DOCUMENTS):
        return override(_document(reference), overrides or {})
    module = _module(reference)
    if not callable(getattr(module, "recipe", None)):
        raise ConfigurationError(
            f"recipe {reference!r}: the file defines no function recipe(); see trainer/recipes/tiny.py"
        )
    recipe = _run(reference, module.recipe)
    if not isinstance(recipe, Recipe):
        raise ConfigurationError(
            f"recipe {reference!r}: recipe() returned {type(recipe).__name__}, not trainer.recipe.Recipe"
        )
    return override(recipe, overrides or {})


def parse_document(text: str, source: str) -> Recipe:
    """A recipe written out as YAML or JSON: the fields of Recipe, data and never code. ConfigurationError."""
    import yaml

    try:
        body = yaml.safe_load(text)
    except RecursionError:
        raise ConfigurationError(f"{source}: nested too deeply; a recipe is a mapping of its fields") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise ConfigurationError(f"{source}:{line} not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(body, dict):
        raise ConfigurationError(f"{source}: a recipe is a mapping of its fields, not {type(body).__name__}")
    return Recipe.parse(body, source)


def _document(path: str) -> Recipe:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"recipe {path!r}: cannot be read: {error}") from None
    return parse_document(text, path)


def override(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """`recipe` with dotted fields replaced, validated again as a whole."""
    body = recipe.model_dump(mode="json")
    for dotted, value in overrides.items():
        node: Any = body
        *parents, last = dotted.split(".")
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise ConfigurationError(f"recipe override {dotted!r}: no such field; fields: {', '.join(sorted(body))}")
        node[last] = value
    changed = Recipe.parse(body, f"recipe {recipe.name!r}")
    if not {"data", "data.files", "data.packing"} & set(overrides):
        _check_omitted(recipe, changed)
    return changed


def _check_omitted(before: Recipe, after: Recipe) -> None:
    """A misspelt name would leave nothing out, and nobody would notice."""
    known = {*before.data.originals, *before.data.omitted_files}
    for name in after.data.omitted_files:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigurationError(
                f"recipe {before.name!r}: data.omitted_files names {name}, which is not a file of the mix{hint}"
            )


def parse_overrides(given: Sequence[str]) -> dict[str, Any]:
    """FIELD=VALUE pairs; a value is JSON if it parses, else text."""
    found: dict[str, Any] = {}
    for pair in given:
        field, sign, text = pair.partition("=")
        if not sign or not field:
            raise ConfigurationError(f"--set {pair!r}: write FIELD=VALUE, for example model.n_layers=2")
        try:
            found[field] = json.loads(text)
        except ValueError:
            found[field] = text
    return found


def _path_of(reference: str) -> str:
    return reference if reference.endswith(".py") else str(Path(__file__).parent / "recipes" / f"{reference}.py")


def _module(reference: str) -> ModuleType:
    folder = Path(__file__).parent / "recipes"
    path = Path(_path_of(reference))
    if not path.is_file():
        known = sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")
        raise ConfigurationError(
            f"recipe {reference!r} not found; known recipes: {', '.join(known)}; or give a path to a .py, .yaml or .json file"
        )
    spec = importlib.util.spec_from_file_location(f"trainer.recipes.{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _run(reference, lambda: loader.exec_module(module))
    return module


def _run(reference: str, code: Callable[[], Any]) -> Any:
    """What `code` of a recipe's file returns; whatever it raises, with the line of that file, as ConfigurationError."""
    try:
        return code()
    except ConfigurationError as error:
        raise ConfigurationError(f"recipe {reference!r}: {error}") from None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == _path_of(reference)]
        at = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
        if isinstance(error, ValidationError):
            said = explain_validation(error, Recipe)
        else:
            said = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
        raise ConfigurationError(f"recipe {reference!r}{f', line {at}' if at else ''}: {said}") from None
