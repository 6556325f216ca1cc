"""Arrays and a JSON header in one file: an npz archive with a SHA-256 digest of all its contents, without pickle."""

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

_UNREADABLE = (
    *(ValueError, KeyError, EOFError, OSError, AttributeError, MemoryError, OverflowError, NotImplementedError),
    *(RuntimeError, zipfile.BadZipFile, zlib.error),
)


def write_archive(header: Mapping[str, Any], trees: Mapping[str, Any]) -> bytes:
    """Return the bytes of an archive.

    Args:
        header: JSON values.
        trees: pytrees of arrays or random keys, by name; a tree may be None.
    """
    arrays: dict[str, np.ndarray] = {}
    contents: dict[str, Any] = {}
    for name, tree in trees.items():
        leaves = jax.tree.leaves(tree)
        keys = [i for i, leaf in enumerate(leaves) if _is_key(leaf)]
        contents[name] = {"num_leaves": None if tree is None else len(leaves), "keys": keys}
        arrays |= {f"{name}_{i}": _plain(leaf) for i, leaf in enumerate(leaves)}
    full = {**header, "trees": contents}
    text = json.dumps({**full, "digest": _digest(full, arrays)})
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(text.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def read_archive(contents: bytes) -> tuple[dict[str, Any], dict[str, list[Any] | None]]:
    """Return the header and the leaves of each tree.

    Raises:
        ValueError: if the bytes are not an archive, or differ from what was written.
    """
    # A zip file may have other bytes before and behind it, which no digest covers.
    end = contents[-22:]  # the record that ends a zip file without a comment: sizes, then the length of the comment
    size, offset, comment = struct.unpack("<IIH", end[12:]) if len(end) == 22 else (0, 0, 1)
    if not end.startswith(b"PK\5\6") or comment or offset + size + 22 != len(contents):
        raise ValueError("it cannot be read: it is not an archive, or other bytes precede or follow it")
    try:
        with zipfile.ZipFile(io.BytesIO(contents)) as file:
            # What `write_archive` writes is not compressed; a compressed file could expand to any size.
            parts = file.infolist()
            sizes = [part.file_size for part in parts if part.compress_type == zipfile.ZIP_STORED]
            if len(sizes) < len(parts) or sum(sizes) > len(contents):
                raise ValueError("its parts are compressed, or overlap")
            arrays = {part.filename.removesuffix(".npy"): _array(file.read(part)) for part in parts}
        header = json.loads(arrays.pop("header").tobytes())
        digest = header.pop("digest", None)
        trees = header.get("trees", {})
        is_unchanged = digest == _digest(header, arrays)
    except _UNREADABLE as error:
        raise ValueError(f"it cannot be read ({error})") from None
    if not is_unchanged:
        raise ValueError("its contents are not what was written: the digest differs")
    del header["trees"]
    found: dict[str, list[Any] | None] = {}
    for name, tree in trees.items():
        leaves: list[Any] = [arrays[f"{name}_{i}"] for i in range(tree["num_leaves"] or 0)]
        for i in tree["keys"]:
            leaves[i] = jax.random.wrap_key_data(leaves[i])
        found[name] = None if tree["num_leaves"] is None else leaves
    return header, found


def _array(part: bytes) -> np.ndarray:
    start = 10 + int.from_bytes(part[8:10], "little")
    dtype, shape, order = _form(part[:start])
    return np.frombuffer(part, dtype, math.prod(shape), start).reshape(shape, order=order).copy()


@functools.lru_cache(maxsize=1024)  # NumPy parses the header of an array as Python code, which takes 50 us
def _form(header: bytes) -> tuple[np.dtype, tuple[int, ...], Literal["C", "F"]]:
    file = io.BytesIO(header)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array has another format than was written")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    return dtype, shape, "F" if is_fortran else "C"


def _digest(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}:{array.dtype.str}:{array.shape};".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


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
