"""What every engine that is not exact shares: checks of its settings, room for data, and honest words."""

from typing import Any

from ppl_bandit.engines.buffer import grow
from ppl_bandit.program import RewardModel
from ppl_bandit.types import Explanation

__all__ = ["check_settings", "explain", "reserve"]


def check_settings(discount: float, **counts: int) -> None:
    """Check the settings of an engine: counts are positive integers, the discount lies in (0, 1].

    Raises:
        ValueError: with what was given, what was expected and what to do instead.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if not 0.0 < discount <= 1.0:
        raise ValueError(
            f"discount must lie in (0, 1], got {discount}; 1 forgets nothing, 0.99 halves a row in 69 rows"
        )


def reserve(state: Any, num_rows: int) -> Any:
    """Return a state with room for more rows of data; its capacity doubles until they fit. Runs outside `jit`."""
    return state._replace(buffer=grow(state.buffer, num_rows))


def explain(
    model: RewardModel, engine: str, reason: str, posterior: str, discount: float, lines: list[str]
) -> Explanation:
    """Return the account of an approximate engine.

    Args:
        reason: one sentence: what the draws are.
        posterior: what the posterior of each site is represented by.
        lines: what is approximated, and what evidence every update returns.
    """
    name = getattr(model.program, "__name__", "the program")
    sites = {site: f"{posterior}{f', shape {shape}' if shape else ''}" for site, shape in model.latent_shapes.items()}
    text = [f"{name}: APPROXIMATE ({engine}). {reason[0].upper()}{reason[1:]}.", ""]
    text += [f"  {site}: {words}" for site, words in sites.items()]
    text += ["", f"  expected reward: {model.expected_reward_way}", *(f"  {line}" for line in lines)]
    if discount < 1.0:
        text.append(f"  forgetting: each row's log likelihood counts {discount:g} times what the next row's does")
    return Explanation(engine, False, reason, sites, "\n".join(text))
