"""Pause Python's cyclic garbage collector while many long-lived objects are created."""

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_gc"]


@contextlib.contextmanager
def paused_gc(*, is_permanent: bool = False) -> Iterator[None]:
    """Disable cyclic garbage collection inside the context.

    Tracing and importing create thousands of objects that stay alive. Collections that run meanwhile find nothing and take
    longer each time.

    Args:
        is_permanent: whether the new objects stay alive until the process ends, as modules do. They then move to the oldest
            generation at once, so that later collections of young objects skip them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if is_permanent and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # unfreezing moves objects to the oldest generation
            gc.enable()
