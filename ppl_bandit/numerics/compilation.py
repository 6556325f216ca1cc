"""How hard the compiler works: what runs once, or for a millisecond, should not take seconds to compile."""

import functools
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["quick_jit", "quick_options", "run_once"]

# The older emitters compile in half the time, and their code is no slower at the sizes of one decision.
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


@functools.cache
def quick_options() -> dict[str, Any]:
    """Return options under which XLA compiles quickly, without those that this XLA does not know."""
    return _QUICK if _is_known(_QUICK) else {name: value for name, value in _QUICK.items() if _is_known({name: value})}


def _is_known(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except Exception as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def quick_jit(function: Callable, **settings: Any) -> jax.stages.Wrapped:
    """Jit a function that is to be compiled quickly rather than well."""
    return jax.jit(function, compiler_options=quick_options(), **settings)


def run_once(function: Callable[[], Any]) -> Any:
    """Compile quickly, run once, and return numpy arrays."""
    return jax.device_get(quick_jit(function)())
