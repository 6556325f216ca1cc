"""Posterior inference for a program: engine factories over a RewardModel."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppl_bandit.engines.approximate.block_particles import nuts
    from ppl_bandit.engines.approximate.reweight import reweight
    from ppl_bandit.engines.approximate.svi import laplace, svi
    from ppl_bandit.engines.choose import choose
    from ppl_bandit.engines.collapsed.collapsed import collapsed
    from ppl_bandit.engines.exact.conjugate import conjugate, kalman
    from ppl_bandit.engines.moving.collapsed_kalman import collapsed_kalman
    from ppl_bandit.engines.moving.particle_filter import particle_filter

__all__ = [
    "choose",
    "collapsed",
    "collapsed_kalman",
    "conjugate",
    "kalman",
    "laplace",
    "nuts",
    "particle_filter",
    "reweight",
    "svi",
]

# Factories are imported on first use: a process needs one of them.
_FOLDERS = {
    "collapsed": "collapsed.",
    "collapsed_kalman": "moving.",
    "conjugate": "exact.",
    "kalman": "moving.",
    "laplace": "approximate.",
    "nuts": "approximate.",
    "particle_filter": "moving.",
    "reweight": "approximate.",
    "svi": "approximate.",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"{__name__}.{_FOLDERS.get(name, '')}{name}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            return  # the import system sets the modules `choose` and `collapsed` here, under the names of the factories
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
