"""Rules of an experiment on top of a selector: a floor, a control's share, limits per arm, softened probabilities.

Each rule returns the propensities that it plays with, so that its decisions can be re-weighted afterwards.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.selectors.selector_contract import (
    Follow,
    RuleInputs,
    as_selector,
    draw_arm,
    make_selector,
    share_equally,
    wrap_selector,
)
from ppl_bandit.types import Key, Selection, Selector, check_number

_NUM_HALVINGS = 60  # of an interval of length at most 2: to the last bit of a float64


def _as_limits(values: float | Sequence[float], argument: str) -> np.ndarray:
    try:
        return np.atleast_1d(np.asarray(values, float))
    except (TypeError, ValueError):
        raise ValueError(f"{argument} must be probabilities in [0, 1], one or one each, got {values!r}") from None


def with_floor(selector: Selector, floor: float) -> Selector:
    """Play every allowed arm with probability at least `floor`, and follow `selector` otherwise.

    With K allowed arms, the propensities become floor + (1 - K floor) times those of `selector`. So every arm continues to be
    played, and a log of decisions can be re-weighted to value another policy: no weight exceeds 1 / floor.

    Args:
        selector: followed with probability 1 - K floor; its `num_candidates` and `best_arm_probs` are passed on.
        floor: at least 0 and at most 1 / A; 1 / A plays all A arms equally often.
    """
    if not 0.0 <= check_number(floor, "floor") <= 1.0:
        raise ValueError(
            f"floor must lie in [0, 1/A] for A arms, got {floor}; "
            "it is the least probability of each single arm, not of exploring"
        )
    selector = as_selector(selector)

    def choose(key: Key, mask: Bool[Array, " A"], step: Int[Array, ""], follow: Follow) -> Selection:
        key_selector, key_coin, key_arm = jr.split(key, 3)
        num_arms = mask.size
        if floor > 1.0 / num_arms:
            raise ValueError(
                f"floor must be at most 1/A = {1.0 / num_arms:.6g} for the table's {num_arms} arms, got {floor}: "
                "the arms' floors would sum to more than 1; lower it"
            )
        inner = follow(key_selector, mask)
        dtype = inner.propensities.dtype
        uniform_probs = share_equally(mask, dtype)
        explore_prob = jnp.minimum(floor * jnp.sum(mask), 1.0).astype(dtype)
        is_exploring = jr.bernoulli(key_coin, explore_prob) & (inner.arm >= 0)
        return inner._replace(
            arm=jnp.where(is_exploring, draw_arm(key_arm, uniform_probs), inner.arm),
            propensities=explore_prob * uniform_probs + (1.0 - explore_prob) * inner.propensities,
        )

    return wrap_selector(selector, {"floor": floor}, choose, keeps_allowed=True, is_affine=True)


def with_control(selector: Selector, share: float | str, arm: int = 0) -> Selector:
    """Play one arm with a fixed probability, and let `selector` choose among the others with the rest.

    Where the control is not allowed, or nothing else is, the fixed share does not apply.

    Args:
        selector: chooses among the other arms.
        share: the control's probability, strictly inside (0, 1), or "sqrt": 1 / (1 + sqrt(k)) with k other arms, so that
            with equal shares of these the control has sqrt(k) decisions for each decision of another arm.
        arm: index of the control.
    """
    if share != "sqrt" and (isinstance(share, str) or not 0.0 < check_number(share, "share") < 1.0):
        raise ValueError(
            f'share must lie strictly inside (0, 1) or be "sqrt", got {share!r}; leave the rule out to fix no share'
        )
    if isinstance(arm, bool) or not isinstance(arm, int | np.integer) or arm < 0:
        raise ValueError(f"arm must be the index of an arm, counted from 0, got {arm!r}")
    selector = as_selector(selector)

    def choose(key: Key, mask: Bool[Array, " A"], step: Int[Array, ""], follow: Follow) -> Selection:
        key_selector, key_coin = jr.split(key)
        num_arms = mask.size
        if arm >= num_arms:
            raise ValueError(f"arm is {arm}, but the table has the arms 0 to {num_arms - 1}: name one of these")
        is_control = jnp.arange(num_arms) == arm
        others = mask & ~is_control
        own: Any = 1.0 / (1.0 + jnp.sqrt(jnp.sum(others))) if share == "sqrt" else share
        share_now = jnp.where(jnp.any(others), jnp.where(mask[arm], own, 0.0), jnp.where(mask[arm], 1.0, 0.0))
        inner = follow(key_selector, jnp.where(jnp.any(others), others, mask))
        dtype = inner.propensities.dtype
        share_now = share_now.astype(dtype)
        is_playing = jr.bernoulli(key_coin, share_now) & (inner.arm >= 0)
        propensities = jnp.where(
            is_control, share_now, (1.0 - share_now) * jnp.where(is_control, 0.0, inner.propensities)
        )
        return inner._replace(
            arm=jnp.where(is_playing, arm, inner.arm),
            best_arm_probs=follow(key_selector, mask).best_arm_probs,  # the control may be best, too
            propensities=jnp.where(jnp.any(others), propensities, inner.propensities),
        )

    return wrap_selector(selector, {"share": share, "arm": int(arm)}, choose)


def with_limits(
    selector: Selector,
    floors: float | Sequence[float] = 0.0,
    caps: float | Sequence[float] = 1.0,
    decay: float = 0.0,
) -> Selector:
    """Keep every arm's probability between a floor and a cap of its own, and as near to `selector`'s as these allow.

    The propensities are those of `selector` plus one number, the same for all arms, cut to each arm's limits; the number is
    the one for which they add up to 1. The arm is then drawn from them.

    Args:
        selector: gives the propensities to approximate; its `num_candidates` and `best_arm_probs` are passed on.
        floors: least probabilities, one for all arms or one each; arms beyond the list have none.
        caps: greatest probabilities, likewise; arms beyond the list have none.
        decay: the floors at step t are `floors` / t**decay, so that exploration fades; 0 keeps them.

    Where the allowed arms' floors add up to more than 1 they are scaled down, and where their caps add up to less, these are
    scaled up: some arm must be played.
    """
    lows, highs = _as_limits(floors, "floors"), _as_limits(caps, "caps")
    for name, values in (("floors", lows), ("caps", highs)):
        if values.ndim != 1 or not np.all((values >= 0.0) & (values <= 1.0)):
            raise ValueError(
                f"{name} must be probabilities in [0, 1], one for all arms or one each, got {values.tolist()}"
            )
    if not 0.0 <= check_number(decay, "decay") < np.inf:
        raise ValueError(f"decay must be at least 0, got {decay}; 0 keeps the floors as they are")
    shared = min(lows.size, highs.size)
    if lows.size > 1 and highs.size > 1 and np.any(lows[:shared] > highs[:shared]):
        raise ValueError(
            f"floors {lows.tolist()} exceed caps {highs.tolist()} for some arm: lower the one or raise the other"
        )
    if lows.size > 1 and lows.sum() > 1.0:
        raise ValueError(f"floors add up to {lows.sum():g}, more than 1: lower them")
    selector = as_selector(selector)

    def choose(key: Key, mask: Bool[Array, " A"], step: Int[Array, ""], follow: Follow) -> Selection:
        key_selector, key_arm = jr.split(key)
        num_arms = mask.size
        inner = follow(key_selector, mask)
        dtype = inner.propensities.dtype
        low = jnp.where(mask, _spread(lows, num_arms, 0.0), 0.0).astype(dtype) / step.astype(dtype) ** decay
        high = jnp.where(mask, _spread(highs, num_arms, 1.0), 0.0).astype(dtype)
        low = low / jnp.maximum(jnp.sum(low), 1.0)
        high = jnp.maximum(high, low)
        high = jnp.minimum(high / jnp.minimum(jnp.sum(high), 1.0), 1.0)
        propensities = _project(jnp.nan_to_num(inner.propensities), low, high)
        return _redrawn(key_arm, inner, propensities)

    settings = {"floors": _plain(lows), "caps": _plain(highs), "decay": float(decay)}
    return wrap_selector(selector, settings, choose, keeps_allowed=True)


def softened(selector: Selector, power: float | Sequence[Sequence[float]]) -> Selector:
    """Raise the propensities of a selector to a power and divide them by their sum: nearer to equal shares, the lower it is.

    Args:
        selector: gives the propensities; its `num_candidates` and `best_arm_probs` are passed on.
        power: in [0, 1]: 1 leaves them as they are, 0 makes them equal. Or pairs (decisions, power), such as
            `[(0, 0.3), (500, 0.7)]`: the power from that number of decisions on.
    """
    pairs: Any = [(0, power)] if np.ndim(power) == 0 else power
    given = np.asarray(pairs, object)
    is_number = given.ndim == 2 and given.shape[1:] == (2,) and all(type(v) in (int, float) for v in given.ravel())
    starts, powers = given.astype(float).T if is_number else (np.array([-1.0]), np.array([-1.0]))
    if starts[0] != 0 or np.any(np.diff(starts) <= 0) or not np.all((powers >= 0.0) & (powers <= 1.0)):
        raise ValueError(
            "power must lie in [0, 1], or be pairs (decisions, power) that begin with 0 decisions and increase, got "
            f"{power!r}"
        )
    selector = as_selector(selector)

    def choose(key: Key, mask: Bool[Array, " A"], step: Int[Array, ""], follow: Follow) -> Selection:
        key_selector, key_arm = jr.split(key)
        inner = follow(key_selector, mask)
        own = jnp.asarray(powers, inner.propensities.dtype)[jnp.searchsorted(jnp.asarray(starts), step) - 1]
        weights = jnp.where(mask, jnp.nan_to_num(inner.propensities) ** own, 0.0)
        return _redrawn(key_arm, inner, weights / jnp.sum(weights))

    settings = {"power": float(powers[0]) if powers.size == 1 else [[int(start), float(own)] for start, own in pairs]}
    return wrap_selector(selector, settings, choose, keeps_allowed=True)


def _redrawn(key: Key, inner: Selection, propensities: Float[Array, " A"]) -> Selection:
    """Return a selection with its arm drawn from other propensities; an unusable one stays as it is."""
    is_usable = inner.arm >= 0
    return inner._replace(
        arm=jnp.where(is_usable, draw_arm(key, propensities), inner.arm),
        propensities=jnp.where(is_usable, propensities, inner.propensities),
    )


def _plain(values: np.ndarray) -> float | list[float]:
    return float(values[0]) if values.size == 1 else values.tolist()


def _spread(values: np.ndarray, num_arms: int, rest: float) -> Float[Array, " A"]:
    """Return one value per arm: the same for all, or those of a list and `rest` beyond it."""
    if values.size == 1:
        return jnp.full(num_arms, values[0])
    return jnp.asarray([*values[:num_arms], *[rest] * (num_arms - values.size)])


def _project(probs: Float[Array, " A"], low: Float[Array, " A"], high: Float[Array, " A"]) -> Float[Array, " A"]:
    """Return clip(probs + shift, low, high) for the shift that makes it add up to 1: the nearest point with these limits."""

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = 0.5 * (bounds[0] + bounds[1])
        is_short = jnp.sum(jnp.clip(probs + middle, low, high)) < 1.0
        return jnp.where(is_short, middle, bounds[0]), jnp.where(is_short, bounds[1], middle)

    one = jnp.ones((), probs.dtype)
    below, above = jax.lax.fori_loop(0, _NUM_HALVINGS, halve, (-one, one))
    found = jnp.clip(probs + 0.5 * (below + above), low, high)
    return found / jnp.sum(found)


def fixed(probs: Sequence[float] | None = None) -> Selector:
    """Play the arms with fixed probabilities, whatever the data say: the allocation of a trial that does not adapt.

    Where some arms are not allowed, the others keep their ratios. If all allowed arms have probability 0, they share the play
    equally.

    Args:
        probs: one nonnegative number per arm; they are divided by their sum. None plays all arms equally often.
    """
    given = None if probs is None else np.asarray(probs)
    if given is not None:
        is_list = given.dtype.kind in "fiu" and given.ndim == 1 and given.size > 0
        given = given.astype(float) if is_list else np.array([-1.0])
        if not np.all(np.isfinite(given) & (given >= 0.0)) or given.sum() == 0.0:
            raise ValueError(
                f"probs must be nonnegative numbers, one per arm, at least one of them positive, got {probs!r}; "
                "leave probs out to play all arms equally often"
            )
        given = given / given.sum()

    def rule(key: Key, inputs: RuleInputs):
        allowed = inputs.allowed
        shares = share_equally(allowed, inputs.best_arm_probs.dtype)
        if given is not None:
            if given.size != allowed.size:
                raise ValueError(f"probs has {given.size} entries for {allowed.size} arms: give one per arm")
            own = jnp.where(allowed, jnp.asarray(given, shares.dtype), 0.0)
            shares = jnp.where(jnp.sum(own) > 0, own / jnp.sum(own), shares)
        return draw_arm(key, shares), jnp.asarray(0), shares

    settings = {"probs": None if given is None else given.tolist()}
    return make_selector(rule, settings=settings, reads_table=False, is_linear=True)
