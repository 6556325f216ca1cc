"""Posterior inference for a program: engine factories over a RewardModel."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppl_bandit.engines.choose import choose
    from ppl_bandit.engines.fits import laplace, svi
    from ppl_bandit.engines.updates.block_particles import nuts
    from ppl_bandit.engines.updates.collapsed import collapsed
    from ppl_bandit.engines.updates.collapsed_kalman import collapsed_kalman
    from ppl_bandit.engines.updates.exact import conjugate, kalman
    from ppl_bandit.engines.updates.particle_filter import particle_filter
    from ppl_bandit.engines.updates.reweight import reweight

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
_MODULES = {
    "choose": "choose",
    "collapsed": "updates.collapsed",
    "collapsed_kalman": "updates.collapsed_kalman",
    "conjugate": "updates.exact",
    "kalman": "updates.exact",
    "laplace": "fits",
    "nuts": "updates.block_particles",
    "particle_filter": "updates.particle_filter",
    "reweight": "updates.reweight",
    "svi": "fits",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            return  # the import system sets the module `choose` here, under the name of the factory
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
