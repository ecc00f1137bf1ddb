"""XLA options of the training step, by TPU generation. Each is accepted by libtpu 0.0.50.1, which refuses unknown names."""

from jax.sharding import Mesh

# Of the 64 MiB of VMEM, what one operation may take. The default makes matrix products of smaller tiles: forward and
# backward of a layer of the 7B, 8192 tokens, are estimated at 34.8 million cycles with it and at 28.6 million with this.
_VMEM = {"xla_tpu_scoped_vmem_limit_kib": "65536"}

# v5p runs collectives on its TensorCores, which compute nothing meanwhile, unless told to leave them to its SparseCores as
# tpu7x does by default. Of the 7B's communication on v5p-4x4x4 nothing was hidden behind work before (docs/diary.md). The
# v5p flags of MaxText's recipes, xla_tpu_enable_async_collective_fusion_fuse_all_gather among them, are refused there.
_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
}
_V5P = _VMEM | _SPARSE_CORES

OPTIONS: dict[str, dict[str, str]] = {"TPU7x": _VMEM, "TPU v5": _V5P, "TPU v5p": _V5P}  # by jax.Device.device_kind


def options(mesh: Mesh) -> dict[str, str] | None:
    """`compiler_options` of jax.jit for the devices of a mesh; None: XLA's defaults."""
    return OPTIONS.get(mesh.devices.flat[0].device_kind)
