"""Checks of a program when it is built: on its jaxpr, and on draws of its prior."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, constraints

from ppl_bandit.program.fingerprints import jaxpr_fingerprint
from ppl_bandit.program.jaxpr.entry_reads import connected_components, reads_of_latents, tells_rows_apart
from ppl_bandit.program.jaxpr.index_limits import IndexLimit, find_index_limits, index_ranges, sizes_indexed_by
from ppl_bandit.program.jaxpr.interpreter import DATA, dependencies, source_line
from ppl_bandit.program.model import means
from ppl_bandit.program.model.probing import DTYPE_OF_KIND, feasible_latents, feasible_rewards
from ppl_bandit.program.model.sites import ProgramSpec, failing_line
from ppl_bandit.program.model.tracing import is_prior_term, log_prob, repeat_rows
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, Jaxpr, all_equations
from ppl_bandit.runtime.numpyro_adapter import inner_distribution
from ppl_bandit.types import InvalidProgram

_MAX_INTEGER = 3


def check_dependence(
    spec: ProgramSpec, shapes: Mapping[str, tuple[int, ...]], has_expected_reward: bool
) -> tuple[bool, tuple[tuple[str, ...], ...], Any, tuple[IndexLimit, ...], bool, int | None]:
    """Check on the jaxpr what the prior and the expected reward depend on, and that arm indices stay in range.

    Returns:
        Whether a bound of an outcome's support depends on a latent; groups of outcomes, such that the density of an outcome
        depends on the values of outcomes of its own group only; for every leaf of the context the largest integer that may
        replace a 0 of the example; the limits of contexts that are indices; whether the outcomes or the expected reward depend
        on the arm; and an arm, the first or the last, for which they depend on no latent.
    """
    arm, context = spec.one_row_per_arm()
    outcomes: dict[str, Any] = {name: np.zeros(spec.num_arms, DTYPE_OF_KIND[kind]) for name, kind in spec.kinds.items()}
    latents = {name: np.zeros(shape) for name, shape in shapes.items()}

    def densities(
        key: Array, latents: Any, arm: Array, context: Any, outcomes: Any
    ) -> tuple[list[Array], Array, list[Array], list[Array]]:
        trace = spec.run(latents, arm, context, outcomes, key)
        prior = [log_prob(site) for name, site in trace.items() if is_prior_term(name, site, spec.outcomes)]
        expected = trace["expected_reward"]["value"] if has_expected_reward else jnp.zeros(())
        ends = jax.tree.leaves([trace[name]["fn"].support for name in spec.outcomes])
        return prior, expected, [log_prob(trace[name]) for name in spec.outcomes], list(map(jnp.asarray, ends))

    args = (jax.eval_shape(jr.key, 0), latents, arm, context, outcomes)
    closed, shape = jax.make_jaxpr(densities, return_shape=True)(*args)
    sources = "key", "latents", "arm", "context"
    labels: list[frozenset] = [
        frozenset([source]) for source, arg in zip(sources, args[:-1], strict=True) for _ in jax.tree.leaves(arg)
    ]
    labels += [frozenset(["outcomes", (name,)]) for name in sorted(outcomes)]
    found = dependencies(closed, labels)
    num_prior, num_ends = len(shape[0]), len(shape[3])
    found, ends = found[: len(found) - num_ends], found[len(found) - num_ends :]
    if any("key" in reaching for reaching in found):
        raise InvalidProgram(
            "a random draw hidden from NumPyro reaches a prior, the likelihood or the expected reward, so that two runs of the "
            "program differ: draw with numpyro.sample only, outside of handlers.block and of NumPyro's own scan; the "
            "steps of a chain can be one site, `numpyro.sample(name, dist.Normal(0, 1).expand([T]))`, added up by jnp.cumsum "
            "or jax.lax.scan"
        )
    _check_callbacks(closed.jaxpr)
    _check_derivative(spec, latents, outcomes)
    for reaching in found[:num_prior]:
        for source in sorted(reaching & {"arm", "context", "outcomes"}):
            raise InvalidProgram(
                f"a prior, factor or observed constant of the program depends on {source}: a prior must be the same for all "
                "data; index or scale the outcome's parameters instead"
            )
    if "outcomes" in found[num_prior]:
        raise InvalidProgram(
            "expected_reward depends on the drawn value of an outcome: it is a mean, so write it with the parameters only"
        )
    leaves = jax.tree.leaves(args)
    first = labels.index(frozenset(["arm"]))
    known = [leaf if number == first else DATA for number, leaf in enumerate(leaves)]
    for lowest, highest, size in index_ranges(closed, known):
        if lowest < 0 or highest >= size:
            raise InvalidProgram(
                f"with num_arms={spec.num_arms} the program reads entries {lowest} to {highest} of an axis with "
                f"{size} entries: JAX would silently read the nearest one; give every arm its own entry or correct num_arms"
            )
    span = range(first + 1, first + 1 + len(jax.tree.leaves(context)))
    given = [leaf if number == first or number in span else DATA for number, leaf in enumerate(leaves)]
    integers = [_largest_integer(closed, given, number) for number in span]
    largest = jax.tree.unflatten(jax.tree.structure(context), integers)
    limits = find_index_limits(closed, given, span)
    larger = [size for size in sizes_indexed_by(closed, given, first) if size > spec.num_arms > 1]
    if larger:
        raise InvalidProgram(
            f"with num_arms={spec.num_arms} the program indexes an axis of {larger[0]} latents by arm, so that some of them "
            f"belong to no arm: make the plate and num_arms agree, num_arms={larger[0]} for instance"
        )
    uses_arm = spec.num_arms == 1 or (
        any("arm" in own for own in found[num_prior:]) and tells_rows_apart(closed, known, first)
    )
    idle = [arm for arm in sorted({0, spec.num_arms - 1}) if not _reads_latents(closed, leaves, labels, arm, num_prior)]
    is_read = np.array([[(name,) in own for name in spec.outcomes] for own in found[num_prior + 1 :]])
    group = connected_components(is_read | np.eye(len(spec.outcomes), dtype=bool))
    groups = tuple(
        tuple(name for name, own in zip(spec.outcomes, group, strict=True) if own == label)
        for label in np.unique(group)
    )
    return (
        any("latents" in own for own in ends),
        groups,
        largest,
        limits,
        uses_arm,
        idle[0] if idle and latents else None,
    )


def _reads_latents(
    closed: ClosedJaxpr, leaves: Sequence[Any], labels: Sequence[frozenset], arm: int, num_prior: int
) -> bool:
    """Return whether the expected reward or the density of an outcome depends on a latent if all rows have one arm."""
    sources = [next(iter(label)) for label in labels]
    args = [
        np.full_like(leaf, arm) if source == "arm" else source == "latents"
        for leaf, source in zip(leaves, sources, strict=True)
    ]
    return any(reads_of_latents(closed, args)[num_prior:])


def _largest_integer(closed: ClosedJaxpr, given: list[Any], number: int) -> int:
    """Return the largest integer that may replace the zeros of a leaf of the context with every index still in range."""
    leaf, largest = given[number], 0
    if leaf.dtype.kind not in "iu" or np.all(leaf):
        return 0
    for value in range(1, _MAX_INTEGER + 1):
        varied = [*given[:number], np.where(leaf == 0, value, leaf).astype(leaf.dtype), *given[number + 1 :]]
        if any(low < 0 or high >= size for low, high, size in index_ranges(closed, varied)):
            break
        largest = value
    return largest


def _check_callbacks(jaxpr: Jaxpr) -> None:
    """Check the precision of callbacks: JAX runs them in threads in which only the precision of the whole process is set."""
    with ThreadPoolExecutor(1) as pool:
        is_wide = pool.submit(lambda: jnp.result_type(float) == jnp.float64).result()
    for equation in () if is_wide else all_equations(jaxpr):
        returned = [out.aval for out in equation.outvars]
        if equation.primitive.name.endswith("callback") and any(aval.dtype == jnp.float64 for aval in returned):
            raise InvalidProgram(
                f"a callback of the program ({source_line([equation]).text or equation.primitive.name}) returns float64, "
                "the precision of all densities, and JAX converts that to float32 unless the whole process uses float64: call "
                'jax.config.update("jax_enable_x64", True) before anything else, or call it in float32, '
                "as in `f(x.astype(jnp.float32))`"
            )


def _check_derivative(spec: ProgramSpec, latents: Mapping[str, Any], outcomes: Mapping[str, Any]) -> None:
    """Check that JAX can differentiate the density: every engine needs its gradient."""
    arm, context = spec.one_row_per_arm()

    def density(latents: Any) -> Array:
        trace = spec.run(latents, arm, context, jax.tree.map(jnp.asarray, outcomes))
        return sum((log_prob(site).sum() for site in trace.values() if site["type"] == "sample"), start=jnp.zeros(()))

    try:
        jax.eval_shape(jax.grad(density), latents)
    except InvalidProgram:
        raise
    except Exception as error:
        raise InvalidProgram(
            f"JAX cannot differentiate the program by its latents{failing_line(error, spec.program)}, and every engine needs "
            f"the gradient of its density ({type(error).__name__}: {str(error).splitlines()[0]}): write it in jax operations "
            "that have a reverse-mode derivative (jax.lax.scan or fori_loop with fixed bounds in place of a while_loop), or "
            "wrap the callback in jax.custom_vjp"
        ) from error


_NUM_POINTS = 4
# Raised by distributions without a mean or icdf; ImportError by those whose icdf needs TensorFlow Probability (Gamma, Beta).
_NOT_AVAILABLE = (NotImplementedError, AttributeError, TypeError, ImportError)


def choose_mean_method(spec: ProgramSpec) -> means.MeanMethod:
    """Return the first method for the outcome's mean that applies and is finite, and check with it that rows are independent.

    Points near the middle of the support are tried first, because sampling from the prior takes far longer to compile.
    """
    arm, context = spec.one_row_per_arm()
    outcome = spec.outcomes[0]

    def verdict_at_draws(method: means.MeanMethod) -> int:
        def one(seed: Array) -> Array:
            trace = spec.run({}, arm[:1], repeat_rows(spec.context, 1), {}, jr.key(seed))
            latents = {name: trace[name]["value"] for name in spec.latents}
            return jnp.min(method.verdict(spec.run(latents, arm, context, {})[outcome]["fn"]))

        return int(run_once(lambda: jnp.min(jax.vmap(one)(jnp.arange(2 * _NUM_POINTS)))))

    for method in means.MEAN_METHODS:
        try:
            found = check_row_independence(spec, method)
            found = found if found == 1 else verdict_at_draws(method)
        except InvalidProgram:
            raise
        except (*_NOT_AVAILABLE, ValueError):
            continue
        if found == 1:
            return method
        if found == -1:
            break
    raise InvalidProgram(
        f"the distribution of '{outcome}' has no finite mean at draws from the prior, so its expected reward is undefined: "
        'name what to maximise with numpyro.deterministic("expected_reward", ...), a median or a utility for instance'
    )


def check_row_independence(spec: ProgramSpec, mean_method: means.MeanMethod | None) -> int:
    """Check numerically that the likelihood and expected reward of a row do not depend on the other rows of a batch.

    Returns:
        The verdict on the mean, 1 where it is finite; see `MeanMethod`.
    """
    num_arms = spec.num_arms

    def evaluate(latents: Any, arm: Array, context: Any, picks: Array) -> tuple[Array, Array, Array, dict]:
        errors: dict[tuple[str, str], Array] = {}
        rewards, _ = feasible_rewards(spec.program, latents, arm, context, spec.kinds, picks)
        trace = spec.run(latents, arm, context, rewards)
        density = sum((log_prob(trace[name]) for name in spec.outcomes), start=jnp.zeros(()))
        expected = means.expected_reward(trace, spec.outcomes, mean_method)
        verdict = (
            jnp.ones(arm.shape, int) if mean_method is None else mean_method.verdict(trace[spec.outcomes[0]]["fn"])
        )
        for name in spec.outcomes:
            for argument, error in _simplex_errors(trace[name]["fn"]):
                errors[name, argument] = jnp.broadcast_to(error, arm.shape)
        return density, expected, verdict, dict(errors)

    def compared(seed: Array) -> tuple[Any, ...]:
        arm, context = spec.one_row_per_arm()
        latents = feasible_latents(spec.program, spec.latents, spec.context, seed)
        picks = (7 * jnp.arange(num_arms)[:, None] + 5 * jnp.arange(len(spec.outcomes)) + 3 * seed) % 61
        together = evaluate(latents, arm, context, picks)
        alone = jax.vmap(
            lambda a, c, p: jax.tree.map(
                lambda out: out[0], evaluate(latents, a[None], jax.tree.map(lambda leaf: leaf[None], c), p[None])
            )
        )(arm, context, picks)
        same = [
            jnp.all(jnp.isclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True))
            for a, b in zip(together[:2], alone[:2], strict=True)
        ]
        return same[0], same[1], jnp.any(jnp.isfinite(together[0])), jnp.min(together[2]), together[3]

    density_same, expected_same, some_finite, verdicts, errors = run_once(
        lambda: jax.vmap(compared)(jnp.arange(_NUM_POINTS))
    )
    for (name, argument), error in errors.items():
        if not error.max() < 1e-6:
            raise InvalidProgram(
                f"the {argument} of '{name}' do not sum to 1 (they are off by {error.max():.2g} at a value tried from the "
                "interior of the prior), so they are not probabilities: divide by their sum, `p / p.sum(-1, keepdims=True)`, "
                "or give them a Dirichlet prior"
            )
    if not some_finite.any():
        raise InvalidProgram(
            "the log likelihood is not finite at any value tried from the interior of the prior: check that the outcome's "
            "parameters stay inside their domain (probabilities in [0, 1], scales above 0)"
        )
    is_noisy = mean_method is not None and mean_method.uses_draws  # its random numbers differ between a batch and a row
    if not density_same.all() or not (is_noisy or expected_same.all()):
        if _is_impure(spec):
            raise InvalidProgram(
                "two runs of the program with the same arguments differ, so that its readings would disagree: it changes "
                "something outside of itself, such as a counter or a list that grows, or draws from a random generator of "
                "Python or NumPy; compute such numbers once, outside of the program, and draw with numpyro.sample"
            )
        raise InvalidProgram(
            "a row's likelihood or expected reward changes with the other rows of the batch: rows must be independent given "
            "the latents, so use no sum, sort, shift or cumulative operation along the rows"
        )
    return int(verdicts.min())


def _simplex_errors(fn: Distribution) -> Iterator[tuple[str, Float[Array, "..."]]]:
    """Yield the arguments of a distribution, and of those inside it, that must lie on a simplex, with their error."""
    for name, constraint in fn.arg_constraints.items():
        if constraint is constraints.simplex and name in vars(fn):
            value = jnp.asarray(vars(fn)[name])
            yield name, jnp.abs(value.sum(axis=-1) - 1.0) + jnp.maximum(-value.min(axis=-1), 0.0)
    inner = inner_distribution(fn)
    if inner is not None:
        yield from _simplex_errors(inner)


def _is_impure(spec: ProgramSpec) -> bool:
    """Return whether two traces of the program, with the same arguments, are different computations."""

    def densities() -> list[Array]:
        trace = spec.run({}, jnp.zeros(1, int), repeat_rows(spec.context, 1), {})
        return [log_prob(site) for site in trace.values() if site["type"] == "sample"]

    # Two functions: `make_jaxpr` caches the trace of one.
    first, second = (jaxpr_fingerprint(jax.make_jaxpr(lambda number=number: densities())()) for number in range(2))
    return first != second
