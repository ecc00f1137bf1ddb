"""The versions that a start records."""

import contextlib
import platform


def versions() -> dict[str, str]:
    """Of everything whose change could change the numbers."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("untildone", "jax", "jaxlib", "orbax-checkpoint", "grain", "numpy", "libtpu"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
