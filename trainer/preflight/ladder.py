"""The plans that are compiled and committed: what docs/plans.md shows. Importable without JAX."""

from dataclasses import dataclass

TPU7X = ("tpu7x-2x4x4", "tpu7x-4x4x4", "tpu7x-4x4x8", "tpu7x-4x8x8", "tpu7x-8x8x8")
V5P = ("v5p-2x4x4", "v5p-4x4x4", "v5p-4x4x8", "v5p-4x8x8", "v5p-8x8x8")
UNEVEN = ("tpu7x-4x4x12", "tpu7x-4x8x12", "v5p-4x8x12", "v5p-8x8x12")  # 384 and 768 devices do not divide 512


@dataclass(frozen=True)
class Entry:
    recipe: str
    device_type: str
    slices: int = 1
    tensor: int = 1  # devices that divide the heads; the planner takes 1

    @property
    def name(self) -> str:
        """For example "olmo3_7b_stage1 2 × v5p-4x4x8"."""
        slices = f"{self.slices} × " if self.slices > 1 else ""
        tensor = f", tensor {self.tensor}" if self.tensor > 1 else ""
        return f"{self.recipe} {slices}{self.device_type}{tensor}"

    @property
    def command(self) -> str:
        """What compiles it."""
        slices = f" --slices {self.slices}" if self.slices > 1 else ""
        tensor = f" --tensor {self.tensor}" if self.tensor > 1 else ""
        return f"python -m trainer preflight --recipe {self.recipe} --device {self.device_type}{slices}{tensor}"


LADDER = (
    *(Entry("olmo3_7b_stage1", name) for name in (*TPU7X, *V5P)),
    *(Entry("olmo3_7b_stage1", name) for name in UNEVEN),
    *(Entry("olmo3_7b_stage1", name, tensor=2) for name in ("tpu7x-4x4x4", "v5p-4x4x8")),
    *(Entry("olmo3_7b_stage1", name, 2) for name in ("tpu7x-4x4x4", "tpu7x-4x4x8", "v5p-4x4x8")),
    *(Entry("olmo3_7b_stage2", name) for name in ("tpu7x-4x4x4", "tpu7x-4x4x8", "v5p-4x4x4", "v5p-4x4x8")),
    *(Entry("olmo3_7b_stage3", name) for name in ("tpu7x-4x4x4", "tpu7x-4x8x8", "v5p-4x4x4", "v5p-4x4x8")),
)
