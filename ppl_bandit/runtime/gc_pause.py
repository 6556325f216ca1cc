"""When Python looks for garbage: not while thousands of objects are made that all stay."""

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["uncollected"]


@contextlib.contextmanager
def uncollected(*, all_stay: bool = False) -> Iterator[None]:
    """Let the garbage be: of many objects that stay, such as a traced program or a module, each look takes longer.

    Args:
        all_stay: whether nothing that is made inside becomes garbage: it is not looked at afterwards either, until Python looks
            at everything.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            if all_stay and not gc.get_freeze_count():
                gc.freeze()  # and at once back, among the oldest
                gc.unfreeze()
            gc.enable()
