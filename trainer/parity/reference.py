"""What Hugging Face's model makes of given tokens. Runs in an environment with torch and transformers, not in ours.

    python reference.py HF_FOLDER TOKENS.npy OUT --dtype float32

TOKENS.npy is int32 [rows, length]. Writes to OUT per row: logits-<row>.npy, float32 [length, vocabulary], and
hidden-<row>.npy, float32 [layers + 1, length, hidden_size], the embeddings and what each layer hands on; and about.json.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("hf")
    parser.add_argument("tokens")
    parser.add_argument("out")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    given = parser.parse_args()

    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        given.hf, torch_dtype=getattr(torch, given.dtype), attn_implementation="sdpa", use_safetensors=True
    )
    # From 5.0 on one table of rotary positions, YaRN's, goes to all layers; the model was trained with it in those with
    # full attention alone (transformers issue 45945).
    if getattr(model.config, "rope_scaling", None) and not hasattr(model.model, "rotary_embs"):
        scaling = model.config.rope_scaling
        if scaling.get("rope_type", "default") != "default":
            sys.exit(
                f"transformers {transformers.__version__} applies YaRN to windowed layers too, which is not how OLMo 3 "
                "was trained; use transformers 4.57"
            )
    model.eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    kept: list[np.ndarray] = []

    def keep(_module: object, _inputs: object, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        kept.append(tensor[0].float().cpu().numpy())  # type: ignore[attr-defined]

    model.model.embed_tokens.register_forward_hook(keep)
    for layer in model.model.layers:
        layer.register_forward_hook(keep)
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    tokens = np.load(given.tokens)
    with torch.inference_mode():
        for row, ids in enumerate(tokens):
            kept.clear()
            logits = model(torch.tensor(ids[None], dtype=torch.long, device=device), use_cache=False).logits[0]
            np.save(out / f"logits-{row:04d}.npy", logits.float().cpu().numpy())
            np.save(out / f"hidden-{row:04d}.npy", np.stack(kept))
            print(f"row {row + 1} of {len(tokens)}", file=sys.stderr)
    np.save(out / "tokens.npy", tokens)
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": given.dtype, "hf": given.hf}
    (out / "about.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
