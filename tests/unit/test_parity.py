"""Our model beside transformers and OLMo-core, by their committed answers: the same predictions, layer by layer."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.goldens import MODELS, TRANSFORMERS, reference, streamed
from trainer.errors import ConfigurationError
from trainer.model import forward
from trainer.parity.commands import Given, parity, run, tokens_of
from trainer.parity.compare import Comparison
from trainer.parity.layerwise import Layerwise
from trainer.parity.reference import __doc__ as reference_text
from trainer.recipe import Model
from trainer.rope import rope_table
from trainer.weights.slots import Slot
from trainer.weights.sources import NamedSource, open_hugging_face

pytestmark = pytest.mark.slow


def predicted(name: str, dtype: str = "float32", **changes: Any) -> np.ndarray:
    """Logits [2, 24, 64] of our model with the golden's weights, by the function that trains."""
    source = open_hugging_face(str(TRANSFORMERS / name))
    model = Model.model_validate({**source.description.model.model_dump(), **changes})
    tokens = reference(name)["tokens"]
    logits = jax.jit(lambda p, t: forward(p, t, model, dtype))(streamed(source), tokens)
    return np.asarray(logits)[..., : model.vocab_size]


def compared(theirs: np.ndarray, ours: np.ndarray) -> Comparison:
    result = Comparison("float32", 1e-9, 1.0)
    for a, b in zip(theirs, ours, strict=True):
        result.add_logits(a, b, np.zeros(0, np.int64))
    return result


def divergence(theirs: np.ndarray, ours: np.ndarray) -> dict[str, Any]:
    return compared(theirs, ours).to_json()


def divergences(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    return np.asarray(compared(theirs, ours).kl)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers_and_olmo_core_s(name: str) -> None:
    """Several windows, grouped heads or not, heads wider than the model over them, YaRN on full attention alone."""
    golden, ours = reference(name), predicted(name)
    for peer in ("logits", "logits_olmo_core"):
        found = divergence(golden[peer], ours)
        assert found["kl_max"] < 1e-9
        assert found["top1"] == 1
        np.testing.assert_allclose(ours, golden[peer], atol=2e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mha", {"window_pattern": (6, -1)}),
        ("mha", {"window_pattern": (4, -1)}),
        ("mha", {"window_pattern": (5, 5, 5, -1)}),
        ("mha", {"rope_theta": 400_000.0}),
        ("mha", {"norm_eps": 1e-5}),
        ("yarn", {"yarn": None}),
        ("yarn", {"yarn": {"factor": 8.0, "old_length": 32}}),
        ("yarn", {"yarn": {"factor": 8.5, "old_length": 64}}),
        ("yarn", {"yarn": {"factor": 8.0, "old_length": 64, "beta_slow": 2.0}}),
        ("yarn", {"window_pattern": (-1, -1, -1, -1)}),  # YaRN on all layers, and no windows
    ],
)
def test_the_goldens_tell_every_wrong_model_apart(name: str, changes: dict[str, Any]) -> None:
    assert divergence(reference(name)["logits"], predicted(name, **changes))["kl_max"] > 1e-8


def test_yarn_on_windowed_layers_as_transformers_5_has_it_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """4.57, which made the golden, gives windowed layers the plain table."""
    yarn = open_hugging_face(str(TRANSFORMERS / "yarn")).description.model.yarn
    monkeypatch.setattr(
        "trainer.model.rope_table", lambda length, head_dim, theta, _=None: rope_table(length, head_dim, theta, yarn)
    )
    assert divergence(reference("yarn")["logits"], predicted("yarn"))["kl_mean"] > 1e-4


def test_bfloat16_is_as_close_to_float32_as_transformers_is() -> None:
    """Rounding falls elsewhere in each, so that neither is closer on every input: the geometric mean decides."""
    ratios = []
    for name in MODELS:
        golden = reference(name)
        theirs = divergences(golden["logits"], golden["logits_bfloat16"])
        ours = divergences(golden["logits"], predicted(name, "bfloat16"))
        ratios.append(np.log(ours).mean() - np.log(theirs).mean())
        assert ours.mean() < 1.5e-3
    assert np.exp(np.mean(ratios)) < 1.25


# -- the command


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[str], Path]:
    """A folder as --keep leaves it, from a golden's first row."""

    def make(name: str, dtype: str = "float32") -> Path:
        golden, folder = reference(name), tmp_path / f"kept-{name}-{dtype}"
        folder.mkdir()
        np.save(folder / "tokens.npy", golden["tokens"][:1])
        np.save(folder / "hidden-0000.npy", golden["hidden"])
        np.save(folder / "logits-0000.npy", golden["logits" if dtype == "float32" else "logits_bfloat16"][0])
        about = {"transformers": "4.57.6", "torch": "2.13.0", "dtype": dtype, "hf": name}
        (folder / "about.json").write_text(json.dumps(about))
        return folder

    return make


@pytest.mark.parametrize("name", MODELS)
def test_the_command_passes_layer_by_layer(name: str, kept: Callable[[str], Path], tmp_path: Path) -> None:
    plot = tmp_path / "p.png"
    arguments = ["--reference", str(kept(name)), "--checkpoint", str(TRANSFORMERS / name)]
    done = CliRunner().invoke(parity, [*arguments, "--json", "--plot", str(plot)], standalone_mode=False)
    assert done.return_value == 0, done.output
    body = json.loads(done.stdout)
    assert body["passed"] is True
    assert body["kl_mean"] < 1e-9
    assert body["first_divergence"] is None
    assert len(body["layer_errors"]) == len(reference(name)["hidden"])
    assert body["layer_errors"][0] == 0
    assert max(body["layer_errors"]) < 1e-5
    assert body["ce_ours"] == pytest.approx(body["ce_reference"], abs=1e-5)
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_the_first_layer_that_differs_is_named_and_the_exit_code_is_1(
    kept: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = NamedSource.read

    def broken(self: NamedSource, slot: Slot) -> np.ndarray:
        value = read(self, slot)
        if (slot.parameter, slot.layer) == ("w_up", 2):
            value[:, :5] *= 1.01
        return value

    monkeypatch.setattr(NamedSource, "read", broken)
    arguments = ["--reference", str(kept("mha")), "--checkpoint", str(TRANSFORMERS / "mha")]
    done = CliRunner().invoke(parity, arguments, standalone_mode=False)
    assert done.return_value == 1
    assert re.search(r"first divergence +layer 2 \(", done.output)
    assert re.search(r"result +mean KL .* is not below 1e-09", done.output)


def test_limits_in_bfloat16_and_by_option(kept: Callable[[str, str], Path]) -> None:
    arguments = ["--reference", str(kept("gqa", "bfloat16")), "--checkpoint", str(TRANSFORMERS / "gqa")]
    done = CliRunner().invoke(parity, [*arguments, "--dtype", "bfloat16"], standalone_mode=False)
    assert done.return_value == 0, done.output
    assert "limits" in done.output and "mean KL < 0.0015, top-1 ≥ 98.7500%" in done.output
    done = CliRunner().invoke(parity, [*arguments, "--dtype", "bfloat16", "--max-kl", "1e-9"], standalone_mode=False)
    assert done.return_value == 1
    assert "is not below 1e-09" in done.output
    done = CliRunner().invoke(parity, [*arguments, "--dtype", "bfloat16", "--min-top1", "1.1"], standalone_mode=False)
    assert done.return_value == 1
    assert "% is below 110.0000%" in done.output


def test_layer_by_layer_is_the_model_that_trains() -> None:
    for name in MODELS:
        source = open_hugging_face(str(TRANSFORMERS / name))
        tokens = reference(name)["tokens"]
        layerwise = Layerwise(source, "float32")
        *_, last = layerwise.hidden(tokens)
        found = np.zeros((*tokens.shape, source.description.model.vocab_size), np.float32)
        for row, first, logits in layerwise.logits(last):
            found[row, first : first + len(logits)] = logits
        np.testing.assert_allclose(found, predicted(name), atol=1e-5)


def test_tokens_from_files(tmp_path: Path) -> None:
    np.arange(40, dtype="<u4").tofile(tmp_path / "raw.npy")
    found = tokens_of(Given(tokens=str(tmp_path / "raw.npy"), rows=2, length=5), 64, 512)
    assert found.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    np.save(tmp_path / "array.npy", np.ones((3, 4), np.int64))
    assert tokens_of(Given(tokens=str(tmp_path / "array.npy")), 64, 512).shape == (3, 4)
    with pytest.raises(ConfigurationError, match="40 tokens, 1 × 512 are wanted"):
        tokens_of(Given(tokens=str(tmp_path / "raw.npy")), 64, 512)
    assert tokens_of(Given(), 64, 65_536).shape == (1, 8192)


def test_bad_requests_are_named(kept: Callable[[str], Path], tmp_path: Path) -> None:
    mha = str(TRANSFORMERS / "mha")
    with pytest.raises(ConfigurationError, match="one of --hf and --reference"):
        run(Given())
    with pytest.raises(ConfigurationError, match="give --run or --checkpoint"):
        run(Given(reference=str(kept("mha"))))
    with pytest.raises(ConfigurationError, match="one of --run and --checkpoint"):
        run(Given(hf=mha, run_directory="/a", checkpoint="/b"))
    with pytest.raises(ConfigurationError, match="not what --keep writes"):
        run(Given(reference=str(tmp_path), checkpoint=mha))
    with pytest.raises(ConfigurationError, match="was computed in float32; give --dtype float32"):
        run(Given(reference=str(tmp_path / "kept-mha-float32"), checkpoint=mha, dtype="bfloat16"))
    with pytest.raises(ConfigurationError, match="the reference has 4 layers, our model 2"):
        run(Given(reference=str(tmp_path / "kept-mha-float32"), checkpoint=str(TRANSFORMERS / "gqa")))
    with pytest.raises(ConfigurationError, match=r"--python /nowhere: No such file"):
        run(Given(hf=mha, python="/nowhere", length=4))
    assert "transformers" in str(reference_text)


def test_without_transformers_the_fix_is_named() -> None:
    with pytest.raises(ConfigurationError, match="No module named 'torch'; give --python, an environment with torch"):
        run(Given(hf=str(TRANSFORMERS / "mha"), length=4))
