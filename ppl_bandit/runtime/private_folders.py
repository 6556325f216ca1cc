"""Folders that the user alone can write: what lies in a cache is run, so whoever can write there runs code in this process."""

import contextlib
import functools
import os
import stat
import warnings
from pathlib import Path


def make_private(path: Path) -> bool:
    """Create a folder, and those above it that are missing, with the mode 0700; return whether it can be used.

    A folder that others own or can write is not used; one warning says so.
    """
    path = Path(os.path.abspath(path))
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)  # a umask can take the owner's bits
        except OSError:
            return False  # without a writable folder every process computes anew
    reason = refusal(path)
    if reason:
        _warn(f"the cache in {path} is not used: {reason}")
    return not reason


def refusal(path: Path) -> str:
    """Return why others can write in a folder, or replace it, in words and with the remedy; "" if only the user can."""
    if not hasattr(os, "getuid"):
        return ""  # a system with other permissions
    with contextlib.suppress(OSError):
        whole = Path(os.path.realpath(path))
        for folder in (whole, *whole.parents):
            found = folder.lstat()
            is_last = folder == whole
            if found.st_uid not in ((os.getuid(),) if is_last else (os.getuid(), 0)):
                return f"{folder} belongs to another user; set JAX_COMPILATION_CACHE_DIR to a folder of your own"
            can_write = found.st_mode & 0o022
            # In a folder with the sticky bit, such as /tmp, nobody replaces what belongs to another user.
            if can_write and (is_last or not found.st_mode & stat.S_ISVTX):
                return f"other users can write {folder}; run `chmod go-w {folder}`, or set JAX_COMPILATION_CACHE_DIR"
        return ""
    return f"{path} cannot be read"


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
