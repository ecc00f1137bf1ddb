"""Makes tests/golden/transformers/: small random Olmo3ForCausalLM models and what transformers computes with them.

Run by hand in an environment with torch, transformers 4.57 and ai2-olmo-core 3.0.0 (the files say which versions made
them): python tests/golden/make_transformers.py. Each folder holds config.json and model.safetensors as transformers
saves them, and reference.npz:

tokens            int32 [2, 24]
logits            float32 [2, 24, 64], computed in float32
hidden            float32 [layers + 1, 24, 24], of the first row: embeddings and what each layer hands on
logits_bfloat16   float32 [2, 24, 64], computed in bfloat16
logits_olmo_core  float32 [2, 24, 64], OLMo-core's with the same weights, in float32

YaRN: transformers from 5.0 on applies it to windowed layers too, so that 4.57 and OLMo-core are what to compare with.
`olmo_core/` is a checkpoint that two processes wrote with OLMo-core under FSDP, of the weights of `gqa`.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from olmo_core.nn.attention import SlidingWindowAttentionConfig
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.rope import YaRNRoPEScalingConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.nn.transformer.config import TransformerBlockType
from transformers import Olmo3Config, Olmo3ForCausalLM

HERE = Path(__file__).parent / "transformers"
REFERENCE = Path(__file__).parents[2] / "trainer" / "parity" / "reference.py"
ROWS, LENGTH, VOCAB, WIDTH = 2, 24, 64, 24
S, F = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
MODELS: dict[str, dict[str, Any]] = {
    "mha": {"num_attention_heads": 4, "layer_types": [S, F, S, F], "sliding_window": 5},
    "gqa": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": [S, F],
        "sliding_window": 9,
    },
    "yarn": {
        "num_attention_heads": 2,
        "layer_types": [S, S, S, F],
        "sliding_window": 7,
        "rope_theta": 100.0,
        "rope_scaling": YARN,
        "max_position_embeddings": 512,
    },
}


def make(name: str, changes: dict[str, Any]) -> None:
    """One folder."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": len(changes["layer_types"]),
        "max_position_embeddings": 64,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(sum(map(ord, name)))
    model = Olmo3ForCausalLM(Olmo3Config(**{**fields, **changes}))
    with torch.no_grad():
        for key, p in model.named_parameters():  # loud, so that every part matters; norms as well
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if key.endswith("norm.weight") else 0.0))
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), dtype=torch.int32).numpy()
    arrays = {"tokens": tokens}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as scratch:
            np.save(f"{scratch}/tokens.npy", tokens)
            command = [sys.executable, str(REFERENCE), str(folder), f"{scratch}/tokens.npy", f"{scratch}/out"]
            subprocess.run([*command, "--dtype", dtype], check=True)
            read = {
                kind: np.stack([np.load(f"{scratch}/out/{kind}-{row:04d}.npy") for row in range(ROWS)])
                for kind in ("logits", "hidden")
            }
        suffix = "" if dtype == "float32" else "_bfloat16"
        arrays[f"logits{suffix}"] = read["logits"]
        if dtype == "float32":
            arrays["hidden"] = read["hidden"][0]
    theirs = olmo_core_config(model.config).build(init_device="cpu")
    theirs.load_state_dict(olmo_core_state(model), strict=True)
    theirs.eval()
    with torch.inference_mode():
        arrays["logits_olmo_core"] = theirs(torch.tensor(tokens, dtype=torch.long)).float().numpy()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "ai2-olmo-core": "3.0.0"}
    np.savez_compressed(folder / "reference.npz", versions=json.dumps(versions), **arrays)
    print(name, "largest difference of the two peers:", np.abs(arrays["logits"] - arrays["logits_olmo_core"]).max())
    if name == "gqa":
        write_olmo_core(model)


def olmo_core_config(config: Olmo3Config) -> TransformerConfig:
    """The same architecture in OLMo-core's words."""
    windows = [config.sliding_window if kind == S else -1 for kind in config.layer_types]
    made = TransformerConfig.llama_like(
        d_model=config.hidden_size,
        vocab_size=config.vocab_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None),
        qk_norm=True,
        block_name=TransformerBlockType.reordered_norm,
        rope_theta=config.rope_theta,
        layer_norm_eps=config.rms_norm_eps,
        feed_forward=FeedForwardConfig(hidden_size=config.intermediate_size, bias=False),
        sliding_window=SlidingWindowAttentionConfig(
            force_full_attention_on_first_layer=False, force_full_attention_on_last_layer=True, pattern=windows
        ),
    )
    if config.rope_scaling is None:
        return made
    yarn = config.rope_scaling
    return made.with_rope_scaling(
        YaRNRoPEScalingConfig(
            factor=yarn["factor"],
            beta_fast=yarn["beta_fast"],
            beta_slow=yarn["beta_slow"],
            old_context_len=yarn["original_max_position_embeddings"],
        )
    )


def olmo_core_state(model: Olmo3ForCausalLM) -> dict[str, torch.Tensor]:
    """The weights under OLMo-core's names, by its own converter."""
    from olmo_core.nn.hf.convert import convert_state_from_hf

    state = {key: value.float() for key, value in model.state_dict().items()}
    return convert_state_from_hf(model.config, state, model_type="olmo3")


def write_olmo_core(model: Olmo3ForCausalLM) -> None:
    """A checkpoint as OLMo-core writes one from two processes, in float32."""
    folder = HERE / "olmo_core"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        torch.save((olmo_core_config(model.config), olmo_core_state(model)), f"{scratch}/model.pt")
        mp.spawn(_save, args=(f"{scratch}/model.pt", str(folder)), nprocs=2)
    forget_place(folder)


def forget_place(folder: Path) -> None:
    """torch notes where a checkpoint was written, which is nobody's business."""
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.storage_meta.checkpoint_id = folder.name
    index.write_bytes(pickle.dumps(metadata))


def _save(rank: int, path: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617", "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "NUM_NODES": "1"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from olmo_core.distributed.checkpoint import save_model_and_optim_state
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    config, state = torch.load(path, weights_only=False)
    model = config.build(init_device="cpu")
    model.load_state_dict(state)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    save_model_and_optim_state(folder, model, save_overwrite=True, thread_count=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, changes in MODELS.items():
        make(name, changes)
