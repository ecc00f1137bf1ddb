"""Writes olmo_core_flops.json: OLMo-core's own count of FLOP per token. Called by make_olmo_core.py, or run by itself.

/tmp/golden/bin/python -m tests.golden.olmo_core_flops
"""

from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.transformer import TransformerConfig

from tests.golden.answers import write_json

LENGTHS = (512, 4096, 5000, 8192, 65536)


def write_flops() -> None:
    answers = {}
    for name in ("olmo3_190M", "olmo3_7B"):
        config = getattr(TransformerConfig, name)(vocab_size=100352, attn_backend=AttentionBackendName.torch)
        model = config.build(init_device="meta")
        answers[name] = {str(length): model.num_flops_per_token(length) for length in LENGTHS}
    write_json("flops", answers)


if __name__ == "__main__":
    write_flops()
