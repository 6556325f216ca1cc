"""An experiment behind an address: the HTTP service of live bandits, and its Python client.

Nothing else of the package imports this folder; it needs the extra `serve`, but for `Client`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppl_bandit.deciders.decider import Decider
    from ppl_bandit.files.keys import KeyFile
    from ppl_bandit.serving.app import create_app
    from ppl_bandit.serving.batches import Limits
    from ppl_bandit.serving.client import Client

__all__ = ["Client", "Decider", "KeyFile", "Limits", "create_app"]

_HOMES = {
    "Client": "serving.client",
    "Decider": "deciders.decider",
    "KeyFile": "files.keys",
    "Limits": "serving.batches",
    "create_app": "serving.app",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"ppl_bandit.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ppl_bandit"):
            raise
        raise ImportError(
            f"{__name__}.{name} needs {error.name}: python -m pip install 'ppl_bandit[serve]'", name=error.name
        ) from error
