"""XLA options of the training step, by TPU generation. Each is accepted by libtpu 0.0.50.1, which refuses unknown names."""

from jax.sharding import Mesh

# Of the 64 MiB of VMEM, what one operation may take. The default makes matrix products of smaller tiles: forward and
# backward of a layer of the 7B, 8192 tokens, are estimated at 34.8 million cycles with it and at 28.6 million with this.
_VMEM = {"xla_tpu_scoped_vmem_limit_kib": "65536"}

OPTIONS: dict[str, dict[str, str]] = {"TPU7x": _VMEM, "TPU v5": _VMEM, "TPU v5p": _VMEM}  # by jax.Device.device_kind


def options(mesh: Mesh) -> dict[str, str] | None:
    """`compiler_options` of jax.jit for the devices of a mesh; None: XLA's defaults."""
    return OPTIONS.get(mesh.devices.flat[0].device_kind)
