"""Writes the golden files olmo_core_*.{json,npz}: what AI2's own classes answer to tests/golden/inputs.py.

Run it in an environment of its own (Python 3.11 to 3.13, 5 GB, a CPU is enough; a minute):

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install -r requirements/golden.txt
    /tmp/golden/bin/python tests/golden/make_olmo_core.py

The same inputs give the same files, up to the last bits of floating-point numbers on another processor. The files are
committed; the tests read them and need none of this.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import olmo_core.data.utils as olmo_utils
import torch
from olmo_core.data import TokenizerConfig
from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
from olmo_core.nn.rope import YaRNRoPEScalingConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.nn.transformer.config import TransformerBlockType
from olmo_core.optim import CosWithWarmup, HalfCosWithWarmup, LinearWithWarmup, OptimGroupOverride, SkipStepAdamWConfig
from olmo_core.optim.adamw import foreach_adamw_step
from olmo_core.train import Duration
from olmo_core.train.train_module import TransformerTrainModule
from olmo_core.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.golden import inputs
from tests.golden.answers import HERE, write_json
from tests.golden.olmo_core_data import write_filter, write_order, write_packing
from tests.golden.olmo_core_flops import write_flops
from tests.golden.olmo_core_metrics import write_metrics

EMBEDDING = "embeddings.weight"  # the pattern of the official scripts

# --- optimizer, as the train module drives it


def optim_config(lr: float) -> SkipStepAdamWConfig:
    """As in all official OLMo 3 scripts."""
    return SkipStepAdamWConfig(
        lr=lr,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        group_overrides=[OptimGroupOverride(params=[EMBEDDING], opts={"weight_decay": 0.0})],
    )


def optimizer_run(steps: int, forget_after: int | None = None) -> dict[str, np.ndarray]:
    """Everything after the stored steps. `forget_after`: then a new optimizer takes over from the old one's state_dict."""
    schedule = CosWithWarmup(warmup=20)
    model = torch.nn.Module()
    for name, value in inputs.optimizer_params().items():
        module = torch.nn.Module()
        module.register_parameter("weight", torch.nn.Parameter(torch.tensor(value)))
        model.add_module("embeddings" if name == "embedding" else name, module)
    weights = {
        name: model.get_submodule("embeddings" if name == "embedding" else name).weight
        for name in inputs.OPTIMIZER_SHAPES
    }
    optim = optim_config(inputs.OPTIMIZER_PEAK).build(model)
    clip = SimpleNamespace(model=model)
    out: dict[str, list[Any]] = {"norm": [], "skipped": [], "rate": []}
    for step in range(1, steps + 1):
        loss, grads = inputs.optimizer_step(step)
        for name, weight in weights.items():
            weight.grad = torch.tensor(grads[name])
        optim.latest_loss = torch.tensor(loss)
        optim.latest_grad_norm = TransformerTrainModule._clip_grad_norm(clip, 1.0)
        for group in optim.param_groups:
            # The trainer counts the step before it takes it: the first one has the rate of step 1.
            rate = schedule.set_lr(group, SimpleNamespace(max_steps=400, global_step=step))
        optim.step()
        out["norm"].append(float(optim.latest_grad_norm))
        out["skipped"].append(bool(optim.step_skipped))
        out["rate"].append(rate)
        if step in inputs.OPTIMIZER_STORED:
            for name, weight in weights.items():
                state = optim.state[weight]
                for kind, value in (("p", weight), ("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
                    out.setdefault(f"{kind}/{name}", []).append(value.detach().numpy().copy())
            out.setdefault("count", []).append(int(optim.state[weight]["step"]))
        if step == forget_after:
            saved = optim.state_dict()
            optim = optim_config(inputs.OPTIMIZER_PEAK).build(model)
            optim.load_state_dict(saved)
    return {name: np.array(value) for name, value in out.items()}


def write_optimizer() -> None:
    through = optimizer_run(inputs.OPTIMIZER_STEPS)
    resumed = optimizer_run(inputs.OPTIMIZER_STEPS, inputs.OPTIMIZER_RESUMES_AT)
    kept = {name: value for name, value in resumed.items() if name in ("skipped", "count") or name.startswith("p/")}
    np.savez_compressed(
        HERE / "olmo_core_optimizer.npz", **through, **{f"forgetful/{name}": value for name, value in kept.items()}
    )


# --- schedules, with the numbers of the official scripts


def write_schedules() -> None:
    def max_steps(tokens: int, batch: int) -> int:
        trainer = SimpleNamespace(global_train_tokens_seen=0, global_step=0, tokens_per_batch=batch)
        return Trainer._get_max_steps(trainer, Duration.tokens(tokens))

    batch = 8192 * 512
    part_1, part_2 = max_steps(int(5e12), batch), max_steps(int(7e12), batch)
    warmup_2 = int(5e12) // batch // 2 + 2000 // 2
    stage_2, stage_3 = max_steps(100_000_000_000, 2**21), max_steps(50_000_000_000, 2**22)
    one = 1_414_078  # as the reproduction on TPUs set it
    schedules = {
        "stage1_part1": (CosWithWarmup(warmup=2000), 3e-4, part_1),
        "stage1_part2": (HalfCosWithWarmup(warmup=warmup_2), 3e-4, part_2),
        "stage1_one_cosine": (CosWithWarmup(warmup=2000), 3e-4, one),
        "stage2": (LinearWithWarmup(warmup=0, alpha_f=0.0), 0.00020712352850360292, stage_2),
        "stage3": (LinearWithWarmup(warmup=200, alpha_f=0.0), 0.00020712352850360292, stage_3),
    }
    found: dict[str, Any] = {}
    for name, (schedule, peak, t_max) in schedules.items():
        steps = {1, 2, 3, 199, 200, 201, 1000, 1999, 2000, 2001, t_max // 3, t_max // 2, t_max - 1, t_max, t_max + 10}
        if name.startswith("stage1"):
            steps |= {476_837, 476_838, 596_000, 596_046, 596_047, 596_048, 597_045, 597_046, 597_047}
            steps |= {1_000_000, 1_413_813, 1_413_814}
        rates = {step: schedule.get_lr(peak, step, t_max) for step in sorted(steps)}
        found[name] = {"t_max": t_max, "warmup": schedule.warmup, "rates": rates}
    found["stage2_peak_is_part_1_at_2T_tokens"] = CosWithWarmup(warmup=2000).get_lr(3e-4, 2e12 / batch, part_1)
    write_json("schedules", found)


# --- a whole model


class Recorder:
    """What TransformerTrainModule wants of a trainer: it is told metrics, and knows the step."""

    def __init__(self) -> None:
        self.global_step, self.max_steps, self.metrics = 0, inputs.MODEL_TOTAL, {}

    def record_metric(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        self.metrics[name] = float(value)

    def record_ce_loss(self, value: Any, *_: Any, **__: Any) -> None:
        self.metrics["CE"] = float(value)


def model_config(yarn: bool) -> TransformerConfig:
    """OLMo 3 as `TransformerConfig.olmo3_7B` makes it, with other sizes and torch's attention."""
    size = inputs.MODEL
    config = TransformerConfig.llama_like(
        d_model=size["d_model"],
        vocab_size=size["vocab"],
        n_layers=size["n_layers"],
        n_heads=size["n_heads"],
        hidden_size_multiple_of=16,
        block_name=TransformerBlockType.reordered_norm,
        qk_norm=True,
        rope_theta=500_000,
        layer_norm_eps=1e-6,
        attn_backend=AttentionBackendName.torch,
        sliding_window=SlidingWindowAttentionConfig(
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=True,
            pattern=[size["window"]] * 3 + [-1],
        ),
    )
    return config.with_rope_scaling(yarn_config()) if yarn else config


def yarn_config() -> YaRNRoPEScalingConfig:
    y = inputs.YARN
    return YaRNRoPEScalingConfig(y["factor"], y["beta_fast"], y["beta_slow"], y["old_length"])


def names(layer: int | None) -> dict[str, str]:
    """The trainer's name to OLMo-core's."""
    if layer is None:
        return {"embedding": EMBEDDING, "norm": "lm_head.norm.weight", "head": "lm_head.w_out.weight"}
    a, f = f"blocks.{layer}.attention", f"blocks.{layer}.feed_forward"
    return {
        **{f"w{x}": f"{a}.w_{x}.weight" for x in "qkv"},
        "wo": f"{a}.w_out.weight", "q_norm": f"{a}.q_norm.weight", "k_norm": f"{a}.k_norm.weight",
        "attention_norm": f"blocks.{layer}.attention_norm.weight", "mlp_norm": f"{f}_norm.weight",
        "w_gate": f"{f}.w1.weight", "w_down": f"{f}.w2.weight", "w_up": f"{f}.w3.weight",
    }  # fmt: skip


def set_params(model: torch.nn.Module) -> None:
    ours, theirs = inputs.model_params(), dict(model.named_parameters())
    with torch.no_grad():
        for layer in (None, *range(inputs.MODEL["n_layers"])):
            for name, other in names(layer).items():
                value = torch.tensor(ours[name] if layer is None else ours[name][layer])
                theirs.pop(other).copy_(value.T if value.ndim == 2 and name != "embedding" else value)
    assert not theirs, f"not set: {sorted(theirs)}"


def read_params(model: torch.nn.Module) -> dict[str, np.ndarray]:
    theirs = {name: p.detach().numpy() for name, p in model.named_parameters()}

    def one(name: str, other: str) -> np.ndarray:
        value = theirs[other]
        return (value.T if value.ndim == 2 and name != "embedding" else value).copy()

    whole = {name: one(name, other) for name, other in names(None).items()}
    layers = [names(i) for i in range(inputs.MODEL["n_layers"])]
    return whole | {name: np.stack([one(name, layer[name]) for layer in layers]) for name in layers[0]}


def write_model() -> None:
    model = model_config(yarn=False).build(init_device="cpu")
    module = TransformerTrainModule(
        model,
        optim_config(inputs.MODEL_PEAK),
        rank_microbatch_size=4 * inputs.MODEL_LENGTH,  # two micro-batches to a batch
        max_sequence_length=inputs.MODEL_LENGTH,
        z_loss_multiplier=1e-5,
        max_grad_norm=1.0,
        scheduler=CosWithWarmup(warmup=inputs.MODEL_WARMUP),
        device=torch.device("cpu"),
    )
    set_params(model)  # now: the train module initialises the model it is given
    module._trainer = recorder = Recorder()
    out: dict[str, list[Any]] = {}
    for step in range(1, inputs.MODEL_STEPS + 1):
        recorder.global_step = step
        module.zero_grads()
        module.train_batch({"input_ids": torch.tensor(inputs.model_batch(step - 1), dtype=torch.long)})
        module.optim_step()
        for name in ("CE", "Z loss", "total grad norm", "LR (group 0)", "step skipped"):
            out.setdefault(name, []).append(recorder.metrics[name])
        if step in inputs.MODEL_STORED:
            params = read_params(model)
            # Projected on a few directions each: a difference anywhere shows, at a thousandth of the size.
            for i, (name, value) in enumerate(sorted(params.items())):
                flat = value.reshape(-1).astype(np.float64)
                out.setdefault(f"p/{name}", []).append(inputs.bell(300 + i, 16, flat.size) @ flat)
    arrays = {name: np.array(value) for name, value in out.items()}
    np.savez_compressed(HERE / "olmo_core_model.npz", **arrays, **documents())


def documents() -> dict[str, np.ndarray]:
    """Cross entropy per target of packed rows, with YaRN and window: each document run through the model alone.

    OLMo-core masks documents in its CUDA attention only; that is the same as not seeing the other documents.
    """
    model = model_config(yarn=True).build(init_device="cpu")
    set_params(model)
    rows, lengths = inputs.packed_rows()
    batch = {"input_ids": torch.tensor(rows, dtype=torch.long), "label_mask": torch.tensor(rows != inputs.PAD)}
    labels = olmo_utils.get_labels(batch)
    ce = torch.zeros(rows.shape)
    with torch.no_grad():
        for row, parts in enumerate(lengths):
            at = 0
            for length in parts:
                span = slice(at, at + length)
                out = model(batch["input_ids"][None, row, span], labels=labels[None, row, span], loss_reduction="none")
                ce[row, span] = out.ce_loss.reshape(-1)
                at += length
        rope_sin, rope_cos = model.blocks["3"].attention.rope._get_rotary_embedding(64, torch.device("cpu"))
    seven_b = YaRNRoPEScalingConfig(8, 32, 1, 8192)
    inv_freq, factor = seven_b.compute_scaled_inv_freq(500_000, 128, torch.device("cpu"))
    targets = (labels != -100).numpy()
    return {
        "documents/ce": np.where(targets, ce.numpy(), 0),
        "documents/targets": targets,
        "yarn/cos": rope_cos.numpy(),
        "yarn/sin": rope_sin.numpy(),
        "yarn/7b_frequencies": inv_freq.double().numpy(),
        "yarn/7b_factor": np.array(factor),
    }


def write_facts() -> None:
    """What OLMo-core says of the 7B."""
    config = TransformerConfig.olmo3_7B(vocab_size=TokenizerConfig.dolma2().padded_vocab_size())
    small = TransformerConfig.olmo3_190M(vocab_size=TokenizerConfig.dolma2().padded_vocab_size())
    long = config.with_rope_scaling(YaRNRoPEScalingConfig(8, 32, 1, 8192))
    window = config.block.sequence_mixer.sliding_window
    write_json(
        "facts",
        {
            "params": config.num_params,
            "params_190m": small.num_params,
            "params_hf": TransformerConfig.olmo3_7B(vocab_size=100_278).num_params,
            "padded_vocab": TokenizerConfig.dolma2().padded_vocab_size(),
            "windowed": [i for i in range(32) if window.should_use_swa(i, 32)],
            "window_size": window.get_window_size(0, 32),
            "yarn_layers": sorted(long.block_overrides),
            "yarn_hf": YaRNRoPEScalingConfig(8, 32, 1, 8192).to_hf_config(),
            "config_7b": _plain(config.as_config_dict()),
            "config_190m": _plain(small.as_config_dict()),
            "init": init_spread(),
            "nan_after_a_skip": nan_after_a_skip(),
            "eos": TokenizerConfig.dolma2().eos_token_id,
            "pad": TokenizerConfig.dolma2().pad_token_id,
        },
    )


def init_spread() -> dict[str, list[float]]:
    """[deviation, largest magnitude] of some initial weights of a wider model: first layer, last layer, both embeddings."""
    config = model_config(yarn=False)
    wide = TransformerConfig.llama_like(d_model=512, vocab_size=2048, n_layers=4, n_heads=8, **_same(config))
    model = wide.build(init_device="meta")
    model.init_weights(device=torch.device("cpu"), max_seq_len=16)
    chosen = {
        EMBEDDING,
        "blocks.0.attention.w_q.weight",
        "blocks.3.attention.w_out.weight",
        "blocks.3.feed_forward.w2.weight",
        "lm_head.w_out.weight",
        "blocks.0.attention_norm.weight",
    }
    values = {name: p.detach() for name, p in model.named_parameters() if name in chosen}
    return {name: [float(v.std()), float(v.abs().max())] for name, v in values.items()}


def _same(config: TransformerConfig) -> dict[str, Any]:
    mixer = config.block.sequence_mixer
    return {"block_name": config.block.name, "qk_norm": True, "attn_backend": mixer.backend, "layer_norm_eps": 1e-6}


def nan_after_a_skip() -> bool:
    """Whether a skipped step with a NaN gradient leaves NaN in the parameters."""
    p, zero = torch.ones(2), torch.zeros(2)
    foreach_adamw_step(
        [p], [torch.full((2,), float("nan"))], [zero.clone()], [zero.clone()], [torch.zeros(())],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step_factor=torch.tensor(0.0),
    )  # fmt: skip
    return bool(p.isnan().any())


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def main() -> None:
    torch.set_num_threads(1)
    parts = (
        write_facts,
        write_flops,
        write_metrics,
        write_schedules,
        write_filter,
        write_optimizer,
        write_order,
        write_packing,
    )
    for write in (*parts, write_model):
        write()
        print(f"{write.__name__}: done")


if __name__ == "__main__":
    main()
