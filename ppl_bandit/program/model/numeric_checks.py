"""Checks of a program by evaluation: the rows of a batch must be independent given the latents, and the mean must be finite."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, constraints

from ppl_bandit.program.fingerprints import jaxpr_fingerprint
from ppl_bandit.program.model import means
from ppl_bandit.program.model.probing import feasible_latents, feasible_rewards
from ppl_bandit.program.model.sites import ProgramSpec
from ppl_bandit.program.model.tracing import log_prob, repeat_rows
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.numpyro_adapter import inner_distribution
from ppl_bandit.types import InvalidProgram

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
