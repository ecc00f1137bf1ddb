"""What both sides are given: computed the same everywhere, so that only the answers have to be stored.

`make_olmo_core.py` gives this to OLMo-core's classes and stores what they answer; tests/unit/test_golden_*.py gives it
to the trainer and compares. Needs numpy and nothing else. A bit generator's stream never changes (NEP 19), what numpy
makes of it may, so only the raw stream is used.
"""

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
HERE = Path(__file__).parent


def uniform(seed: int, *shape: int) -> npt.NDArray[np.float64]:
    """float64 [*shape] in [0, 1)."""
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape, dtype=int)))
    return ((np.asarray(raw, np.uint64) >> np.uint64(11)) * 2.0**-53).reshape(shape)


def bell(seed: int, *shape: int) -> npt.NDArray[np.float64]:
    """float64 [*shape], nearly normal: the sum of four uniform numbers, mean 0 and deviation 1."""
    return (uniform(seed, *shape, 4).sum(-1) - 2) * np.sqrt(3)


# --- the optimizer alone

OPTIMIZER_STEPS = 220
OPTIMIZER_RESUMES_AT = 150  # a second run is stopped after this many steps and continued without its window
OPTIMIZER_STORED = [*range(1, 8), 63, 64, 65, *range(80, 221, 20), 99, 101, 149, 150, 151, 152, 189, 190, 191]
OPTIMIZER_SHAPES = {"embedding": (6, 4), "wq": (1, 4, 4), "mlp_norm": (1, 4), "head": (4, 6)}  # as the trainer has them
OPTIMIZER_PEAK = 3e-3


def optimizer_params() -> dict[str, F32]:
    """The parameters before the first step."""
    return {
        name: (bell(100 + i, *shape) * 0.5 + (1.0 if name.endswith("norm") else 0.0)).astype(np.float32)
        for i, (name, shape) in enumerate(OPTIMIZER_SHAPES.items())
    }


def optimizer_step(step: int) -> tuple[float, dict[str, F32]]:
    """(cross entropy, gradients) that lead to `step`, from 1.

    Norms lie on both sides of the clip. A loss spike at 40 comes before the rule is in force; then a loss spike at 100,
    a norm spike at 151 and a plateau from 190 on, which is skipped until it is the new normal.
    """
    size = 0.05 + 0.12 * float(uniform(step, 1)[0])
    size *= {151: 60.0}.get(step, 1.0)
    grads = {
        name: (size * bell(1000 * step + i, *shape)).astype(np.float32)
        for i, (name, shape) in enumerate(OPTIMIZER_SHAPES.items())
    }
    loss = 6.0 * step**-0.15 + 0.04 * float(bell(50_000 + step, 1)[0])
    loss += {40: 5.0, 100: 5.0}.get(step, 0.0) + (4.5 if step >= 190 else 0.0)
    return float(np.float32(loss)), grads


# --- a whole model, trained

MODEL = {"d_model": 32, "n_layers": 4, "n_heads": 4, "head_dim": 8, "mlp_hidden": 96, "vocab": 320, "window": 6}
MODEL_LENGTH, MODEL_BATCH, MODEL_STEPS, MODEL_STORED = 24, 8, 24, (1, 2, 3, 8, 16, 24)
MODEL_PEAK, MODEL_WARMUP, MODEL_TOTAL = 4e-3, 6, 40
YARN = {"factor": 8.0, "old_length": 16, "beta_fast": 32, "beta_slow": 1}  # short, so that both ends of the ramp matter
EOS, PAD = 256, 300


def model_params() -> dict[str, F32]:
    """The trainer's names and shapes: projections [layers, in, out]. Loud enough that every part matters."""
    n, d, f, v = (MODEL[k] for k in ("n_layers", "d_model", "mlp_hidden", "vocab"))
    shapes = {
        "embedding": (v, d), "wq": (n, d, d), "wk": (n, d, d), "wv": (n, d, d), "q_norm": (n, d), "k_norm": (n, d),
        "wo": (n, d, d), "attention_norm": (n, d), "w_gate": (n, d, f), "w_up": (n, d, f), "w_down": (n, f, d),
        "mlp_norm": (n, d), "norm": (d,), "head": (d, v),
    }  # fmt: skip
    return {
        name: (
            bell(200 + i, *shape) * (0.1 if name.endswith("norm") else 0.08) + (1.0 if name.endswith("norm") else 0)
        ).astype(np.float32)
        for i, (name, shape) in enumerate(shapes.items())
    }


def model_batch(t: int) -> npt.NDArray[np.int32]:
    """int32 [MODEL_BATCH, MODEL_LENGTH]: rows of the real text, the next ones for each batch."""
    text = np.concatenate(text_documents())
    first = t * MODEL_BATCH * MODEL_LENGTH
    return text[first : first + MODEL_BATCH * MODEL_LENGTH].reshape(MODEL_BATCH, MODEL_LENGTH).astype(np.int32)


def packed_rows() -> tuple[npt.NDArray[np.int32], list[list[int]]]:
    """int32 [4, MODEL_LENGTH] of documents with their EOS, then padding; and the documents' lengths.

    The second row is one document cut at the row's end, the third has no padding.
    """
    lengths = [[7, 5, 3], [24], [10, 10, 4], [1, 1, 12]]
    rows = np.full((len(lengths), MODEL_LENGTH), PAD, np.int32)
    for i, (row, parts) in enumerate(zip(rows, lengths, strict=True)):
        at = 0
        for j, length in enumerate(parts):
            row[at : at + length] = (uniform(700 + 10 * i + j, length) * 250).astype(np.int32)
            if parts != [MODEL_LENGTH]:
                row[at + length - 1] = EOS
            at += length
    return rows, lengths


# --- a small real mix

MIX_FILES, MIX_LENGTH, MIX_BATCH, MIX_SEED = 5, 16, 24, 34521  # instances of 16 tokens, 24 of them in a batch
PACKED_LENGTH, PACKED_GROUP = 512, 2
LICENSE_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def text_documents() -> list[npt.NDArray[np.uint32]]:
    """The paragraphs of the Apache licence as bytes, an EOS after each."""
    text = (HERE.parents[1] / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == LICENSE_SHA256, "LICENSE changed: make the goldens again"
    paragraphs = [p for p in text.split(b"\n\n") if p.strip()]
    return [np.append(np.frombuffer(p, np.uint8).astype(np.uint32), np.uint32(EOS)) for p in paragraphs]


def mix_files(distinct: bool = False) -> list[npt.NDArray[np.uint32]]:
    """The documents dealt out to files whose lengths no instance divides; the last one ends without its EOS.

    Half of the documents are said twice, so that many are equally long. `distinct` leaves out every document as long as
    an earlier one: no two are then equally long anywhere, and there is one best-fit-decreasing packing.
    """
    documents = text_documents()
    documents += documents[: len(documents) // 2]
    if distinct:
        kept: dict[int, npt.NDArray[np.uint32]] = {}
        for document in documents:
            kept.setdefault(min(len(document), PACKED_LENGTH), document)
        documents = list(kept.values())
    files = [np.concatenate(documents[i::MIX_FILES]) for i in range(MIX_FILES)]
    files[-1] = files[-1][:-1]
    return files


def write_mix(folder: Path, distinct: bool = False) -> list[Path]:
    """The files as OLMo-core reads them: raw uint32, named .npy all the same."""
    paths = []
    for i, tokens in enumerate(mix_files(distinct)):
        path = folder / f"{i:06d}.npy"
        tokens.astype("<u4").tofile(path)
        paths.append(path)
    return paths


# --- the repetition filter

FILTER_LENGTH = 512


def filter_rows() -> npt.NDArray[np.int32]:
    """int32 [n, FILTER_LENGTH]: repetitions of every period, around the limit of 32 times, anywhere in the row.

    Some are broken by one token, some begin or end with a part of the period, some lie at the very start or end.
    """
    rows = []
    for case in range(400):
        u = uniform(9000 + case, 8)
        row = (uniform(19_000 + case, FILTER_LENGTH) * 1000).astype(np.int32)
        period = 1 + int(u[0] * 15)
        pattern = (uniform(29_000 + case, period) * (2 if u[1] < 0.2 else 1000)).astype(np.int32)
        length = min(FILTER_LENGTH, int(period * (30 + 4 * u[2]) + period * u[3]))
        at = [0, FILTER_LENGTH - length, int(u[4] * (FILTER_LENGTH - length + 1))][int(u[5] * 3)]
        row[at : at + length] = np.resize(pattern, length)
        if u[6] < 0.25:
            row[at + int(u[7] * length)] = 5000
        rows.append(row)
    rows += [
        np.zeros(FILTER_LENGTH, np.int32),
        np.arange(FILTER_LENGTH, dtype=np.int32),
        np.resize([1, 2], FILTER_LENGTH).astype(np.int32),
    ]
    return np.stack(rows)
