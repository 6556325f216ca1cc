"""Properties of the devices that computations run on."""

import jax
from jax.sharding import Mesh

__all__ = ["is_on_cpu", "working_memory"]

_CPU_MEMORY = 1 << 29


def is_on_cpu(mesh: Mesh | None = None) -> bool:
    """Return whether computations on a mesh, or on JAX's default device, run on a CPU."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return platform == "cpu"


def working_memory(mesh: Mesh | None = None) -> int:
    """Return the bytes that one computation should use at most: half a GiB on a CPU, else a third of the devices' memory."""
    if is_on_cpu(mesh):
        return _CPU_MEMORY
    num_devices = 1 if mesh is None else mesh.size
    return jax.local_devices()[0].memory_stats()["bytes_limit"] // 3 * num_devices
