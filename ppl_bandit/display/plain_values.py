"""Results as dicts, lists and numbers for JSON."""

import math
from collections.abc import Mapping
from typing import Any


def to_plain(value: Any) -> Any:
    """Return NamedTuples as dicts and arrays as lists, with None for nan and infinities, which JSON does not have."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
