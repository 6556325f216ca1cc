"""The contract of selectors: checks of their arguments, and the result when these are unusable.

A selection rule is a function `(key, RuleInputs) -> (arm, num_candidates, propensities)` that may assume a valid table;
`make_selector` turns it into a selector. An invalid concrete table raises ValueError. Inside a trace nothing can be raised: the
result is then arm -1 with nan propensities, and the caller outside the trace raises.

Also here: shares of draws that each arm wins, and draws of an arm from given probabilities.

`winner_frequencies` is p-hat of the paper, the Monte Carlo estimate of the probability that each arm is optimal.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.random_bits import uniform
from ppl_bandit.runtime.artefact import is_plain
from ppl_bandit.runtime.jax_adapter import is_tracer
from ppl_bandit.types import Key, Marginals, Selection, Selector


def winner_frequencies(
    table: Float[Array, "M A"], allowed: Bool[Array, " A"], *, is_lowest_first: bool = False
) -> Float[Array, " A"]:
    """Count the share of draws that each arm wins: p-hat_a = (1/M) sum_m 1[arm a is best in draw m].

    Args:
        table: sampled expected rewards, finite where allowed.
        allowed: arms that compete; the others get 0.
        is_lowest_first: whether a tied row goes to its lowest index alone; otherwise tied arms share it equally.

    Returns:
        Shares that sum to 1; exactly one-hot when one arm wins every draw.
    """
    num_draws = table.shape[0]
    rows_won = jnp.sum(winner_weights(table, allowed, is_lowest_first=is_lowest_first), axis=1)
    # XLA may divide by multiplying with a reciprocal, and n * (1 / n) is not always 1.
    return jnp.where(rows_won == num_draws, 1.0, rows_won / num_draws)


def winner_weights(
    table: Float[Array, "M A"], allowed: Bool[Array, " A"], *, is_lowest_first: bool = False
) -> Float[Array, "A M"]:
    """Give each draw's winner weight 1, and 0 to the rest; winners that tie share it as in `winner_frequencies`."""
    # Arms first: reductions over draws, the long axis, then read contiguous memory, several times faster for a few arms.
    competing = jnp.where(allowed[:, None], table.T, -jnp.inf)
    if is_lowest_first:
        return (jnp.argmax(competing, axis=0) == jnp.arange(table.shape[1])[:, None]).astype(table.dtype)
    is_winner = competing == jnp.max(competing, axis=0)
    return is_winner / jnp.sum(is_winner, axis=0).astype(table.dtype)


def is_largest(values: Float[Array, " A"], allowed: Bool[Array, " A"], *, rounding: float) -> Bool[Array, " A"]:
    """Mark the allowed arms whose value is the largest, or short of it by at most `rounding` relative epsilons."""
    largest = jnp.max(jnp.where(allowed, values, -jnp.inf))
    return allowed & (values >= largest - rounding * jnp.finfo(values.dtype).eps * jnp.abs(largest))


def share_equally(is_member: Bool[Array, " A"], dtype: jnp.dtype) -> Float[Array, " A"]:
    """Spread probability 1 evenly over the marked arms; all 0 if no arm is marked."""
    return is_member.astype(dtype) / jnp.maximum(jnp.sum(is_member), 1).astype(dtype)


def draw_arm(key: Key, probs: Float[Array, " A"]) -> Int[Array, ""]:
    """Draw one arm from Cat(probs); see `pick_arm`."""
    return pick_arm(uniform(key, (), probs.dtype), probs)


def pick_arm(uniform: Float[Array, ""], probs: Float[Array, " A"]) -> Int[Array, ""]:
    """Turn a uniform number into a draw from Cat(probs); an arm of probability 0 is never drawn.

    Args:
        uniform: in [0, 1).
        probs: nonnegative, at least one positive; need not sum to exactly 1.
    """
    cumulative = jnp.cumsum(probs)
    # A parallel cumulative sum may rise by a rounding error at an arm of probability 0: hence the two guards.
    total = jnp.max(jnp.where(probs > 0, cumulative, 0.0))
    return jnp.argmax((probs > 0) & (cumulative > uniform * total))


def find_leader(probs: Float[Array, " A"]) -> Int[Array, ""]:
    """Return the arm with the largest probability, the lowest index of several."""
    return jnp.argmax(probs)


# The text of each selector when one of this library's factories made it.
_MADE: WeakKeyDictionary[Selector, str] = WeakKeyDictionary()


class RuleInputs(NamedTuple):
    """The inputs of a selection rule.

    Attributes:
        table: sampled expected rewards; finite, and 0 in the columns of arms that are not allowed. None where p-hat is
            given in its place, to a rule that does not read the table.
        allowed: which arms may be played; at least one.
        best_arm_probs: p-hat, the share of draws that each arm wins.
        scores: result of the rule's `score` function; None without marginals, or without a `score`.
        step: counts from 1.
    """

    table: Float[Array, "M A"] | None
    allowed: Bool[Array, " A"]
    best_arm_probs: Float[Array, " A"]
    scores: Float[Array, "... A"] | None
    step: Int[Array, ""]


Rule: TypeAlias = Callable[[Key, RuleInputs], tuple[Int[Array, ""], Int[Array, ""], Float[Array, " A"]]]
Score: TypeAlias = Callable[[Marginals, Int[Array, ""], Bool[Array, " A"]], Float[Array, "... A"] | None]
Follow: TypeAlias = Callable[[Key, Bool[Array, " A"]], Selection]


def make_selector(
    rule: Rule,
    *,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    is_lowest_first: bool = False,
    score: Score | None = None,
    required_marginals: tuple[str, ...] = (),
    reads_table: bool = True,
    is_exact: bool = False,
    is_linear: bool = False,
    is_deterministic: bool = False,
    horizon: int | None = None,
) -> Selector:
    """Turn a selection rule into a selector: check, clean the table, decide, and flag what could not be decided.

    The rule is compiled once per selector and per shape of the table, also when the selector is called outside `jit`.

    Args:
        rule: decides, given a clean table.
        name: of the selector; None is the function that the rule was written in.
        settings: arguments of the selector's factory, for records and comparisons.
        is_lowest_first: whether a row's tied arms lose to the lowest index instead of sharing the row.
        score: computes scores from the marginals. It stays outside the compiled part, because an engine returns new
            functions at every step. It returns None if the marginals lack a field that it reads.
        required_marginals: the fields of the marginals that `score` needs.
        reads_table: whether the rule reads the table even if it has p-hat and scores.
        is_exact: whether p-hat is the marginals' exact probability, where they offer it.
        is_linear: whether the propensities are linear in p-hat.
        is_deterministic: whether the table decides the arm, up to ties.
        horizon: the last step that the rule is made for, if it has one.

    Returns:
        The selector. Where an allowed arm has a non-finite entry (or score) or no arm is allowed it raises ValueError,
        or, inside a trace, returns arm -1, num_candidates 0, and nan for both kinds of probabilities.
    """

    @jax.jit
    def decide(key, table, shares, allowed, scores, step) -> Selection:
        # With scores, shares are only passed on: if they were checked, a simulation would have to compute them.
        is_usable: Any = True
        for part in (table, shares if scores is None else None, scores):
            if part is not None:  # -inf where no arm is allowed
                is_usable &= jnp.isfinite(jnp.max(jnp.where(allowed, jnp.abs(part), -jnp.inf)))
        # Valid values in place of unusable ones keep loops finite; their result is discarded below.
        safe_allowed = allowed | ~is_usable
        safe_table = None if table is None else jnp.where(is_usable & allowed, table, 0.0)
        safe_scores = None if scores is None else jnp.where(is_usable & allowed, scores, 0.0)
        if shares is None:
            assert safe_table is not None  # one of the two is given
            probs = winner_frequencies(safe_table, safe_allowed, is_lowest_first=is_lowest_first)
        else:
            probs = jnp.where(is_usable, jnp.where(allowed, shares, 0.0), 1.0 / shares.size)
        arm, num_candidates, propensities = rule(key, RuleInputs(safe_table, safe_allowed, probs, safe_scores, step))
        return Selection(
            arm=jnp.where(is_usable, arm, -1).astype(int),
            best_arm_probs=jnp.where(is_usable, probs, jnp.nan),
            num_candidates=jnp.where(is_usable, num_candidates, 0).astype(int),
            propensities=jnp.where(is_usable, propensities, jnp.nan),
        )

    def scores_of(marginals, step, allowed, dtype) -> Float[Array, "... A"] | None:
        found = None if score is None or marginals is None else score(marginals, step, allowed)
        return None if found is None else _check_scores(jnp.asarray(found, dtype), allowed)

    def select(key, table, step, *, allowed=None, marginals=None) -> Selection:
        table, allowed, step = check_arguments(table, allowed, step)
        step = _within(step, horizon)
        if is_exact and marginals is not None and selector.can_skip_table(marginals):
            assert marginals.best_arm_probs is not None
            return select_from_probs(key, marginals.best_arm_probs(allowed), step, allowed=allowed, marginals=marginals)
        return decide(key, table, None, allowed, scores_of(marginals, step, allowed, table.dtype), step)

    def select_from_probs(key, shares, step, *, allowed=None, marginals=None) -> Selection:
        (shares,), allowed, step = check_arguments(jnp.asarray(shares)[None], allowed, step)
        step = _within(step, horizon)
        scores = scores_of(marginals, step, allowed, shares.dtype)
        if score is not None and scores is None:
            raise ValueError("marginals must be given, with all that the selector reads, where there is no table")
        return decide(key, None, shares, allowed, scores, step)

    selector = Selector(
        _factory_of(rule) if name is None else name,
        dict(settings or {}),
        select,
        None if reads_table else select_from_probs,
        uses_marginals=is_exact or score is not None,
        required_marginals=required_marginals,
        is_exact=is_exact,
        is_linear=is_linear,
        is_deterministic=is_deterministic,
        horizon=horizon,
    )
    return _as_made(selector, rule)


def wrap_selector(
    selector: Selector,
    settings: Mapping[str, Any],
    choose: Callable[[Key, Bool[Array, " A"], Int[Array, ""], Follow], Selection],
    *,
    keeps_allowed: bool = False,
    is_affine: bool = False,
) -> Selector:
    """Build a selector on another one, with its horizon and its use of marginals.

    Its name is that of the function in which `choose` is defined.

    Args:
        selector: the inner selector.
        settings: of the outer rule; the inner selector is added to them.
        choose: `(key, allowed, step, follow) -> Selection`, where `follow(key, allowed)` is the inner selection.
        keeps_allowed: whether `choose` follows the inner selector for the same allowed arms only. The outer rule then needs a
            table only if the inner one does.
        is_affine: whether, besides, the propensities are affine in those of the inner selector.
    """

    def on(inner: Callable[..., Selection], has_table: bool) -> Callable[..., Selection]:
        def select(key, given, step, *, allowed=None, marginals=None) -> Selection:
            table, mask, step = check_arguments(given if has_table else jnp.asarray(given)[None], allowed, step)
            given = table if has_table else table[0]

            def follow(key: Key, allowed: Bool[Array, " A"]) -> Selection:
                return inner(key, given, step, allowed=allowed, marginals=marginals)

            return choose(key, mask, step, follow)

        return select

    from_probs = selector.select_from_probs
    wrapped = Selector(
        _factory_of(choose),
        {"selector": selector, **settings},
        on(selector, True),
        on(from_probs, False) if keeps_allowed and from_probs is not None else None,
        uses_marginals=selector.uses_marginals,
        required_marginals=selector.required_marginals,
        is_exact=keeps_allowed and selector.is_exact,
        is_linear=is_affine and selector.is_linear,
        horizon=selector.horizon,
    )
    return _as_made(wrapped, choose)


def selector_key(selector: Selector) -> str | None:
    """Return a selector as text that says what it computes; None if one of this library's factories did not make it.

    `dataclasses.replace` can give a selector other functions under the same name and settings.
    """
    can_be_told = all(
        selector_key(value) is not None if isinstance(value, Selector) else is_plain(value)
        for value in selector.settings.values()
    )
    return str(selector) if can_be_told and _MADE.get(selector) == str(selector) else None


def _as_made(selector: Selector, rule: Callable) -> Selector:
    if getattr(rule, "__module__", "").startswith(f"{__package__}."):
        _MADE[selector] = str(selector)
    return selector


def check_horizon(step: int, horizon: int | None) -> None:
    """Refuse a step beyond the last one that a selector was made for.

    Raises:
        ValueError: with the step, the horizon, and what to do instead.
    """
    if horizon is not None and step > horizon:
        raise ValueError(
            f"step {step} is beyond the horizon of {horizon} decisions that the selector was made for: choose a horizon that "
            "covers every decision, or go on with a selector that needs none, such as selectors.greedy()"
        )


def as_selector(selector: Any) -> Selector:
    """Return a selector unchanged, or make one of a plain function with the arguments of a selector.

    Raises:
        ValueError: for the name of a selector, for a value that is not callable, for a factory that was not called, and for
            other arguments.
    """
    if isinstance(selector, Selector):
        return selector
    if isinstance(selector, str):
        raise ValueError(
            f"selector is the text {selector!r}: pass the selector itself, as in selector=selectors.{selector}()"
        )
    if not callable(selector):
        raise ValueError(f"selector must be a selector, got {selector!r}; use one such as selectors.double_sampling()")
    if getattr(selector, "__module__", "").startswith("ppl_bandit.selectors"):
        raise ValueError(f"selector is the factory {selector.__name__}: call it, as in selectors.{selector.__name__}()")
    try:
        inspect.signature(selector).bind("key", "table", "step", allowed=None, marginals=None)
    except ValueError:  # a callable that has no signature
        pass
    except TypeError as error:
        raise ValueError(
            f"selector {_factory_of(selector)} cannot be called as select(key, table, step, *, allowed, marginals) ({error}): "
            "take these arguments, or **more, and return a Selection"
        ) from None
    return Selector(_factory_of(selector), {}, selector)


def _within(step: Int[Array, ""], horizon: int | None) -> Int[Array, ""]:
    if horizon is None:
        return step
    if _is_concrete(step):
        check_horizon(int(np.asarray(step)), horizon)
    return jnp.minimum(step, horizon)


def _factory_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__).partition(".<locals>")[0]


def check_arguments(
    table: Any, allowed: Any, step: Any
) -> tuple[Float[Array, "M A"], Bool[Array, " A"], Int[Array, ""]]:
    """Check concrete arguments, and return the three arguments as arrays.

    Returns:
        The table in float32 or float64, the mask (all true where it was None), and the step.
    """
    table = jnp.asarray(table)
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(
            f"table must have shape (M, A) with M >= 1 draws and A >= 1 arms, got {table.shape}; "
            "pass one row per posterior draw and use jax.vmap for a batch of tables"
        )
    if jnp.issubdtype(table.dtype, jnp.complexfloating) or table.dtype == bool:
        raise ValueError(f"table must hold real expected rewards, got dtype {table.dtype}; pass floats")
    table = table.astype(jnp.promote_types(table.dtype, jnp.float32))
    num_arms = table.shape[1]
    allowed = jnp.ones(num_arms, bool) if allowed is None else jnp.asarray(allowed)
    if allowed.dtype != bool or allowed.shape != (num_arms,):
        raise ValueError(
            f"allowed must be a boolean mask of shape ({num_arms},), one entry per arm of the table, "
            f"got shape {allowed.shape} and dtype {allowed.dtype}; pass True for each arm that may be played"
        )
    step = jnp.asarray(step)
    if step.shape != () or not jnp.issubdtype(step.dtype, jnp.integer):
        raise ValueError(f"step must be one integer, got shape {step.shape} and dtype {step.dtype}; count steps from 1")
    if _is_concrete(step) and int(np.asarray(step)) < 1:
        raise ValueError(f"step must be at least 1, got {int(np.asarray(step))}; count steps from 1")
    if _is_concrete(allowed):
        if not np.any(np.asarray(allowed)):
            raise ValueError(
                "allowed must let at least one arm be played, got False for every arm; pass None to allow all"
            )
        if _is_concrete(table):
            remedy = "check the engine's draws, or mask the arm with allowed="
            _check_finite(np.asarray(table), np.asarray(allowed), "table", remedy)
    # Without a fixed dtype, a Python int and an array would each compile the rule once.
    return table, allowed, step.astype(int)


def _check_scores(scores: Array, allowed: Bool[Array, " A"]) -> Float[Array, " A"]:
    if scores.shape[-1:] != allowed.shape:
        raise ValueError(
            f"marginals must return shape {allowed.shape}, one entry per arm, got {scores.shape}; "
            "pass the marginals of this table's arms"
        )
    if _is_concrete(scores) and _is_concrete(allowed):
        remedy = "check the engine's marginals, or leave marginals out to use the table"
        _check_finite(np.atleast_2d(np.asarray(scores)), np.asarray(allowed), "what marginals return", remedy)
    return scores


def _is_concrete(value: Array) -> bool:
    return not is_tracer(value)


def _check_finite(values: np.ndarray, allowed: np.ndarray, name: str, remedy: str) -> None:
    # NumPy, not jax: inside a trace a jax operation on a concrete array is traced too, and cannot be branched on.
    bad = ~np.isfinite(values) & allowed
    if bad.any():
        row, arm = np.argwhere(bad)[0]
        raise ValueError(
            f"{name} must be finite for every allowed arm, found {bad.sum()} non-finite entries, "
            f"the first at row {row}, arm {arm}: {values[row, arm]}; {remedy}"
        )
