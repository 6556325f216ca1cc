"""The readings of a program - prior, likelihood, expected reward - and whether they agree with each other.

On the jaxpr: what flows into which of them, and which entries of an array the arms read. By numbers: whether a row stands for
itself, and which way to an outcome's mean is open.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.program.jaxpr.dependence import dependencies
from ppl_bandit.program.jaxpr.index_ranges import UNKNOWN, index_ranges
from ppl_bandit.program.jaxpr.source_lines import source_line
from ppl_bandit.program.model import means
from ppl_bandit.program.model.failures import failure, where
from ppl_bandit.program.model.probing import NUMBERS, feasible_latents, feasible_rewards
from ppl_bandit.program.model.supports import has_moving_support, simplex_gaps
from ppl_bandit.program.model.tracing import Trace, is_prior_term, log_prob, repeat_rows, run_program
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, Jaxpr, all_equations
from ppl_bandit.types import InvalidProgram

__all__ = ["Reading", "check_flow", "check_rows", "find_mean", "support_moves"]

_NUM_POINTS = 4
_MAX_INTEGER = 3
_CLOSED = (NotImplementedError, AttributeError, TypeError)  # how a distribution says that a way to its mean is closed


class Reading(NamedTuple):
    """A program and how it is to be read."""

    program: Callable
    num_arms: int
    context: Any
    outcomes: tuple[str, ...]
    latents: tuple[str, ...]
    kinds: Mapping[str, str]

    def run(
        self,
        latents: Mapping[str, Array],
        arm: Array,
        context: Any,
        values: Mapping[str, Array],
        key: Array | None = None,
    ) -> Trace:
        """Run the program with some sites given."""
        try:
            return run_program(self.program, arm, context, {**latents, **values}, key)
        except (AttributeError, TypeError, NotImplementedError) as error:  # of the program, not of a way to its mean
            raise InvalidProgram(failure(error, self.program, jnp.shape(arm)[0])) from error

    def arms(self) -> tuple[Any, Any]:
        """Return one row for each arm, in the example context."""
        repeated = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (self.num_arms, *leaf.shape)), self.context)
        return np.arange(self.num_arms), repeated  # NumPy: known numbers stay known in a jaxpr


def check_flow(
    reading: Reading, shapes: Mapping[str, tuple[int, ...]], has_expected_reward: bool
) -> tuple[tuple[tuple[str, ...], ...], Any]:
    """Check on the jaxpr what flows into the prior and the expected reward, and that arm indices stay in range.

    Returns:
        The outcomes in groups: the density of each depends on the values of no outcome outside of its own group. And for
        every leaf of the context how large an integer may be in place of a 0 in the example.
    """
    arm, context = reading.arms()
    outcomes: dict[str, Any] = {name: np.zeros(reading.num_arms, NUMBERS[kind]) for name, kind in reading.kinds.items()}
    latents = {name: np.zeros(shape) for name, shape in shapes.items()}

    def flow(
        key: Array, latents: Any, arm: Array, context: Any, outcomes: Any
    ) -> tuple[list[Array], Array, list[Array]]:
        trace = reading.run(latents, arm, context, outcomes, key)
        prior = [log_prob(site) for name, site in trace.items() if is_prior_term(name, site, reading.outcomes)]
        goal = trace["expected_reward"]["value"] if has_expected_reward else jnp.zeros(())
        return prior, goal, [log_prob(trace[name]) for name in reading.outcomes]

    args = (jax.eval_shape(jr.key, 0), latents, arm, context, outcomes)
    closed, shape = jax.make_jaxpr(flow, return_shape=True)(*args)
    labels = [
        frozenset([label])
        for label, arg in zip(("key", "latents", "arm", "context", "outcomes"), args, strict=True)
        for _ in jax.tree.leaves(arg)
    ]
    found = dependencies(closed, labels)
    num_prior = len(shape[0])
    if any("key" in reaching for reaching in found):
        raise InvalidProgram(
            "a random draw hidden from NumPyro reaches a prior, the likelihood or the expected reward, so that the program "
            "does not say the same twice: draw with numpyro.sample alone, outside of handlers.block and of NumPyro's own scan; "
            "steps of a chain can be one site, `numpyro.sample(name, dist.Normal(0, 1).expand([T]))`, added up by jnp.cumsum "
            "or jax.lax.scan"
        )
    _check_callbacks(closed.jaxpr)
    _check_derivative(reading, latents, outcomes)
    for reaching in found[:num_prior]:
        for source in sorted(reaching - {"latents"}):
            raise InvalidProgram(
                f"a prior, factor or observed constant of the program depends on {source}: what is known before the data must "
                "not vary with it; index or scale the outcome's parameters instead"
            )
    if "outcomes" in found[num_prior]:
        raise InvalidProgram(
            "expected_reward depends on the drawn value of an outcome: write it with the parameters alone, it is a mean"
        )
    leaves = jax.tree.leaves(args)
    first = labels.index(frozenset(["arm"]))
    known = [leaf if index == first else UNKNOWN for index, leaf in enumerate(leaves)]
    (extremes,) = _index_ranges(closed, [known])
    for lowest, highest, size in extremes:
        if lowest < 0 or highest >= size:
            raise InvalidProgram(
                f"with num_arms={reading.num_arms} the program reads entries {int(lowest)} to {int(highest)} of an axis with "
                f"{size} entries: jax would silently read the nearest one; give every arm its own entry or correct num_arms"
            )
    span = range(first + 1, first + 1 + len(jax.tree.leaves(context)))
    largest = jax.tree.unflatten(jax.tree.structure(context), _largest_integers(closed, leaves, span, first))
    own: list[frozenset] = [frozenset()] * (len(labels) - len(outcomes)) + [
        frozenset([name]) for name in sorted(outcomes)
    ]
    reached = dependencies(closed, own)[num_prior + 1 :]
    return _groups(dict(zip(reading.outcomes, reached, strict=True))), largest


def _index_ranges(closed: ClosedJaxpr, cases: Sequence[Sequence[Any]]) -> list[list[tuple[int, int, int]]]:
    """Return, for each case of known inputs, the lowest and the highest of each index and the size of its axis."""
    sizes: list[list[int]] = []

    def ranges() -> list[list[tuple[Array, Array]]]:
        found = [index_ranges(closed, known) for known in cases]
        sizes[:] = [[index.size for index in of_case] for of_case in found]
        return [[(index.lowest, index.highest) for index in of_case] for of_case in found]

    return [
        [(int(lowest), int(highest), size) for (lowest, highest), size in zip(of_case, own, strict=True)]
        for of_case, own in zip(run_once(ranges), sizes, strict=True)
    ]


def _largest_integers(closed: ClosedJaxpr, leaves: Sequence[Any], span: range, arm: int) -> list[int]:
    """Return, for each leaf of the context, the largest integer that may stand for its zeros: no index leaves its axis."""
    asked = [index for index in span if leaves[index].dtype.kind in "iu" and not np.all(leaves[index])]
    cases = []
    for index, value in itertools.product(asked, range(1, _MAX_INTEGER + 1)):
        known = [leaf if place == arm or place in span else UNKNOWN for place, leaf in enumerate(leaves)]
        known[index] = np.where(leaves[index] == 0, value, leaves[index]).astype(leaves[index].dtype)
        cases.append(known)
    largest = dict.fromkeys(span, 0)
    if cases:
        fits = [all(0 <= low and high < size for low, high, size in found) for found in _index_ranges(closed, cases)]
        for index, own in zip(asked, np.reshape(fits, (len(asked), -1)), strict=True):
            largest[index] = int(np.cumprod(own).sum())
    return list(largest.values())


def _groups(reads: Mapping[str, frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    """Join what reads each other, directly or through others; the order of the names stays."""
    groups: list[set[str]] = []
    for name, read in reads.items():
        joined = {name, *read}
        apart = [group for group in groups if not group & joined]
        groups = [*apart, joined.union(*(group for group in groups if group & joined))]
    order = list(reads)
    return tuple(sorted((tuple(sorted(group, key=order.index)) for group in groups), key=lambda g: order.index(g[0])))


def support_moves(reading: Reading, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the support of an outcome depends on a latent."""
    arm, context = reading.arms()
    values: dict[str, Any] = {name: np.zeros(reading.num_arms, NUMBERS[kind]) for name, kind in reading.kinds.items()}

    def supports(latents: Any) -> list[Any]:
        trace = reading.run(latents, arm, context, values)
        return [trace[name]["fn"].support for name in reading.outcomes]

    return has_moving_support(supports, {name: np.zeros(shape) for name, shape in shapes.items()})


def _check_callbacks(jaxpr: Jaxpr) -> None:
    """Check that callbacks may return what they do: they run in threads that know the precision of the process alone."""
    with ThreadPoolExecutor(1) as pool:
        is_wide = pool.submit(lambda: jnp.result_type(float) == jnp.float64).result()
    for equation in () if is_wide else all_equations(jaxpr):
        returned = [out.aval for out in equation.outvars]
        if equation.primitive.name.endswith("callback") and any(aval.dtype == jnp.float64 for aval in returned):
            raise InvalidProgram(
                f"a callback of the program ({source_line([equation]).text or equation.primitive.name}) returns float64, in "
                "which densities are computed here, and jax turns that into float32 unless the whole process computes in "
                'float64: say jax.config.update("jax_enable_x64", True) before anything else, or call it in float32, '
                "as in `f(x.astype(jnp.float32))`"
            )


def _check_derivative(reading: Reading, latents: Mapping[str, Any], outcomes: Mapping[str, Any]) -> None:
    """Check that jax can differentiate the density: every engine walks along its slope."""
    arm, context = reading.arms()

    def density(latents: Any) -> Array:
        trace = reading.run(latents, arm, context, jax.tree.map(jnp.asarray, outcomes))
        return sum((log_prob(site).sum() for site in trace.values() if site["type"] == "sample"), start=jnp.zeros(()))

    try:
        jax.eval_shape(jax.grad(density), latents)
    except InvalidProgram:
        raise
    except Exception as error:
        raise InvalidProgram(
            f"jax cannot differentiate the program by its latents{where(error, reading.program)}, and every engine follows "
            f"the slope of its density ({type(error).__name__}: {str(error).splitlines()[0]}): write it in jax operations that "
            "have a reverse-mode derivative (jax.lax.scan or fori_loop with fixed bounds in place of a while_loop), or wrap "
            "the callback in jax.custom_vjp"
        ) from error


def find_mean(reading: Reading) -> means.MeanWay:
    """Return the first way to the outcome's mean that is open and finite at draws of the latents.

    The distribution's own formula, nearly always open, is tried together with the check of the rows. Points near the middle
    of the support come first: drawing from the prior takes far longer to compile.
    """
    try:
        if check_rows(reading, means.WAYS[0]) == 1:
            return means.WAYS[0]
    except _CLOSED:
        pass
    arm, context = reading.arms()
    outcome = reading.outcomes[0]

    def verdict(way: means.MeanWay, is_drawn: bool) -> int:
        def one(seed: Array) -> Array:
            if is_drawn:
                trace = reading.run({}, arm[:1], repeat_rows(reading.context, 1), {}, jr.key(seed))
                latents = {name: trace[name]["value"] for name in reading.latents}
            else:
                latents = feasible_latents(reading.program, reading.latents, reading.context, seed)
            return jnp.min(way.verdict(reading.run(latents, arm, context, {})[outcome]["fn"]))

        return int(run_once(lambda: jnp.min(jax.vmap(one)(jnp.arange(2 * _NUM_POINTS)))))

    for way in means.WAYS:
        try:
            found = verdict(way, is_drawn=False)
            found = found if found == 1 else verdict(way, is_drawn=True)
        except (*_CLOSED, ValueError):
            continue
        if found == 1:
            if way is means.WAYS[0]:
                check_rows(reading, way)
            return way
        if found == -1:
            break
    raise InvalidProgram(
        f"the distribution of '{outcome}' has no finite mean at draws from the prior, so its expected reward is undefined: "
        'name what to maximise with numpyro.deterministic("expected_reward", ...), a median or a utility for instance'
    )


def check_rows(reading: Reading, mean_way: means.MeanWay | None) -> int:
    """Check by numbers that a row's likelihood and expected reward do not depend on the other rows of a batch.

    Returns:
        The verdict on the mean, 1 where it is finite; see `MeanWay`.
    """
    num_arms = reading.num_arms

    def readings(latents: Any, arm: Array, context: Any, picks: Array) -> tuple[Array, Array, Array, dict]:
        gaps: dict[tuple[str, str], Array] = {}
        rewards, _ = feasible_rewards(reading.program, latents, arm, context, reading.kinds, picks)
        if len(reading.outcomes) == 1:
            rewards = {reading.outcomes[0]: rewards}
        trace = reading.run(latents, arm, context, rewards)
        density = sum((log_prob(trace[name]) for name in reading.outcomes), start=jnp.zeros(()))
        goal = means.expected_reward(trace, reading.outcomes, mean_way)
        verdict = jnp.ones(arm.shape, int) if mean_way is None else mean_way.verdict(trace[reading.outcomes[0]]["fn"])
        for name in reading.outcomes:
            for argument, gap in simplex_gaps(trace[name]["fn"]):
                gaps[name, argument] = jnp.broadcast_to(gap, arm.shape)
        return density, goal, verdict, dict(gaps)

    def compared(seed: Array) -> tuple[Any, ...]:
        arm, context = reading.arms()
        latents = feasible_latents(reading.program, reading.latents, reading.context, seed)
        picks = (7 * jnp.arange(num_arms)[:, None] + 5 * jnp.arange(len(reading.outcomes)) + 3 * seed) % 61
        together = readings(latents, arm, context, picks)
        alone = jax.vmap(
            lambda a, c, p: jax.tree.map(
                lambda out: out[0], readings(latents, a[None], jax.tree.map(lambda leaf: leaf[None], c), p[None])
            )
        )(arm, context, picks)
        same = [
            jnp.all(jnp.isclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True))
            for a, b in zip(together[:2], alone[:2], strict=True)
        ]
        return same[0], same[1], jnp.any(jnp.isfinite(together[0])), jnp.min(together[2]), together[3]

    density_same, goal_same, some_finite, verdicts, gaps = run_once(lambda: jax.vmap(compared)(jnp.arange(_NUM_POINTS)))
    for (name, argument), gap in gaps.items():
        if not gap.max() < 1e-6:
            raise InvalidProgram(
                f"the {argument} of '{name}' do not sum to 1 (they are off by {gap.max():.2g} at a value tried from the "
                "interior of the prior), so they are no probabilities: divide by their sum, `p / p.sum(-1, keepdims=True)`, or "
                "give them a Dirichlet prior"
            )
    if not some_finite.any():
        raise InvalidProgram(
            "the log likelihood is not finite at any value tried from the interior of the prior: check that the outcome's "
            "parameters stay inside their domain (probabilities in [0, 1], scales above 0)"
        )
    is_noisy = mean_way is means.MONTE_CARLO  # its random numbers differ between a batch and a row
    if not density_same.all() or not (is_noisy or goal_same.all()):
        raise InvalidProgram(
            "a row's likelihood or expected reward changes with the other rows of the batch: rows must be independent given "
            "the latents, so use no sum, sort, shift or cumulative operation along the rows"
        )
    return int(verdicts.min())
