"""Read a program once, when a reward model is built, and say in one sentence what is wrong with it."""

import inspect
import linecache
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array
from numpyro.distributions import biject_to

from ppl_bandit.numerics.compilation import run_once
from ppl_bandit.program import means
from ppl_bandit.program.jaxprs import UNKNOWN, dependencies, read_indices
from ppl_bandit.program.probing import NUMBERS, feasible_latents, feasible_rewards
from ppl_bandit.program.supports import has_moving_support, simplex_gaps
from ppl_bandit.program.tracing import Site, Trace, is_prior_term, log_prob, repeat_rows, run_program
from ppl_bandit.types import InvalidProgram

__all__ = ["Facts", "validate"]

_NUM_POINTS = 4
_CLOSED = (NotImplementedError, AttributeError, TypeError)  # how a distribution says that a way to its mean is closed


class Facts(NamedTuple):
    """What validation learnt about a program."""

    outcomes: tuple[str, ...]
    context: Any
    latent_shapes: Mapping[str, tuple[int, ...]]
    outcome_kinds: Mapping[str, str]
    mean_way: means.MeanWay | None
    expected_reward_way: str
    has_moving_support: bool


def validate(program: Callable, num_arms: int, context: Any, outcomes: Any) -> Facts:
    """Check a program against everything that could make its readings disagree, cheapest checks first.

    Raises:
        InvalidProgram: with what was found, what was expected and what to write instead.
    """
    outcomes, context = _check_arguments(program, num_arms, context, outcomes)
    trace, longer = (_traced(program, context, num_rows) for num_rows in (2, 3))
    latents = [name for name, site in trace.items() if _is_latent(name, site, outcomes)]
    _check_outcomes(trace, outcomes, num_rows=2)
    _check_outcomes(longer, outcomes, num_rows=3)  # a shape can fit two rows by chance
    _check_latents(trace, longer, latents)
    has_expected_reward = _check_expected_reward(trace, outcomes)
    shapes = {name: tuple(jnp.shape(trace[name]["value"])) for name in latents}
    kinds = {
        name: "f" if jnp.issubdtype(trace[name]["value"].dtype, jnp.floating) else "i"
        for name in trace
        if name in outcomes
    }
    reading = _Reading(program, int(num_arms), context, outcomes, tuple(latents), kinds)
    with jax.enable_x64(True):
        moves = _support_moves(reading, shapes)
        _check_flow(reading, shapes, has_expected_reward)
        mean_way = None if has_expected_reward else _find_mean(reading)
        if mean_way is not means.WAYS[0]:
            _check_rows(reading, mean_way)
    if mean_way is None:
        words = "the program's own expected_reward site"
    else:
        words = f"the mean of '{outcomes[0]}', from {mean_way.words}"
    return Facts(outcomes, context, shapes, kinds, mean_way, words, moves)


class _Reading(NamedTuple):
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
        try:
            return run_program(self.program, arm, context, {**latents, **values}, key)
        except (AttributeError, TypeError, NotImplementedError) as error:  # of the program, not of a way to its mean
            raise InvalidProgram(_failure(error, self.program, jnp.shape(arm)[0])) from error

    def arms(self) -> tuple[Any, Any]:
        repeated = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (self.num_arms, *leaf.shape)), self.context)
        return np.arange(self.num_arms), repeated  # NumPy: known numbers stay known in a jaxpr


def _check_arguments(program: Callable, num_arms: Any, context: Any, outcomes: Any) -> tuple[tuple[str, ...], Any]:
    if not callable(program):
        raise InvalidProgram(f"program must be a function of arm, or of arm and context; got {type(program).__name__}")
    if isinstance(num_arms, bool) or not isinstance(num_arms, int | np.integer) or num_arms < 1:
        raise InvalidProgram(f"num_arms must be a positive integer, got {num_arms!r}")
    names = (outcomes,) if isinstance(outcomes, str) else tuple(outcomes)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InvalidProgram(f"outcomes must be one or more different site names, got {outcomes!r}")
    required, accepted = _num_positional(program)
    if required > 2 or accepted < 1:
        raise InvalidProgram(
            f"the program must take (arm) or (arm, context), but it needs {required} positional arguments; "
            "close over anything else"
        )
    if context is None and required == 2:
        raise InvalidProgram(
            "the program takes a context, but no example was given: pass context=, one context without a leading axis"
        )
    if context is not None and accepted == 1:
        raise InvalidProgram(
            "an example context was given, but the program takes arm alone: add a context argument to it"
        )
    if context is None:
        return names, None
    leaves, treedef = jax.tree.flatten(context)
    arrays = [np.asarray(leaf) for leaf in leaves]
    bad = [array.dtype for array in arrays if array.dtype.kind not in "fiub"]
    if bad or not arrays:
        raise InvalidProgram(f"context must hold numbers or booleans, got leaves of type {bad or 'none at all'}")
    # In double precision: a float32 example would drag the certificates of the exact engine down with it.
    wide = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in arrays]
    return names, jax.tree.unflatten(treedef, wide)


def _num_positional(program: Callable) -> tuple[int, float]:
    try:
        parameters = inspect.signature(program).parameters.values()
    except (TypeError, ValueError):  # a builtin or an exotic callable: let the trace speak
        return 1, 2
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return required, float("inf") if many else len(positional)


def _has_bijection(fn: Any) -> bool:
    try:
        biject_to(fn.support)
    except NotImplementedError:
        return False
    return True


def _traced(program: Callable, context: Any, num_rows: int) -> Trace:
    """Trace the program without running it."""
    caught: dict[str, Any] = {}

    def body(arm: Array, rows: Any) -> None:
        caught.update(run_program(program, arm, rows, {}))
        for site in caught.values():  # now: bounds of a support may be traced values, which mean nothing later
            site["has_bijection"] = site["type"] != "sample" or _has_bijection(site["fn"])

    rows = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (num_rows, *leaf.shape)), context)
    try:
        jax.eval_shape(body, np.arange(num_rows), rows)
    except InvalidProgram:
        raise
    except (
        jax.errors.TracerBoolConversionError,
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.TracerArrayConversionError,
    ) as error:
        raise InvalidProgram(_run_time_value(error, program)) from error
    except Exception as error:
        if "truth value of an array" in str(error):
            raise InvalidProgram(_run_time_value(error, program)) from error
        raise InvalidProgram(_failure(error, program, num_rows)) from error
    return caught


def _failure(error: BaseException, program: Callable, num_rows: int) -> str:
    words = f"the program failed on {num_rows} rows{_where(error, program)}: {type(error).__name__}: {error}"
    if "must have integer" in str(error):
        words += (
            "; a number of trials or an index that comes as a float, from a context for instance, needs .astype(int)"
        )
    return words


def _run_time_value(error: BaseException, program: Callable) -> str:
    return (
        f"the program needs a value that is only known at run time{_where(error, program)}: it must not branch in Python on "
        "arm, context or a site's value, nor turn them into Python or NumPy numbers; index an array by arm or use jnp.where"
    )


def _where(error: BaseException, program: Callable) -> str:
    code = getattr(inspect.unwrap(program), "__code__", None)
    line, step = None, error.__traceback__
    while step is not None:
        if code is not None and step.tb_frame.f_code.co_filename == code.co_filename:
            line = step.tb_lineno
        step = step.tb_next
    if line is None or code is None:
        return ""
    return f" (line {line}: `{linecache.getline(code.co_filename, line).strip()}`)"


def _is_latent(name: str, site: Site, outcomes: tuple[str, ...]) -> bool:
    return is_prior_term(name, site, outcomes) and not site["is_observed"]


def _check_outcomes(trace: Trace, outcomes: tuple[str, ...], num_rows: int) -> None:
    samples = [name for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]]
    for name in outcomes:
        site = trace.get(name)
        if site is None or site["type"] != "sample":
            raise InvalidProgram(
                f"the program has no sample site '{name}'; its sample sites are {samples}: "
                f"rename the outcome to '{name}' or pass outcomes=(...)"
            )
        if site["is_observed"]:
            raise InvalidProgram(
                f"the program passes obs= to '{name}': leave it out, the library conditions the program itself"
            )
        shape, fn = jnp.shape(site["value"]), site["fn"]
        if shape != (num_rows,) or fn.event_shape:
            raise InvalidProgram(
                f"the outcome '{name}' has shape {shape} (batch {tuple(fn.batch_shape)}, event {tuple(fn.event_shape)}) for "
                f"{num_rows} rows of data, expected ({num_rows},) with an empty event shape: one number per row, such as "
                "dist.Bernoulli(rate[arm])"
            )


def _check_latents(trace: Trace, longer: Trace, latents: list[str]) -> None:
    for name, site in trace.items():
        if site["type"] == "param":
            raise InvalidProgram(f"numpyro.param '{name}' has no posterior: give it a prior with numpyro.sample")
        if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            raise InvalidProgram(f"the plate '{name}' is subsampled: leave out subsample_size, every row counts once")
        if site["type"] in ("control_flow", "prng_key", "mutable"):
            raise InvalidProgram(
                f"'{name}' is a numpyro {site['type']} site, which cannot be conditioned: use plain jax code"
            )
    if not latents:
        raise InvalidProgram(
            "the program has no latent sample site, so there is nothing to learn: give a parameter a prior"
        )
    for name in latents:
        if trace[name]["scale"] is not None or _is_masked(trace[name]["fn"]):
            handler = "scale" if trace[name]["scale"] is not None else "mask"
            raise InvalidProgram(
                f"the latent '{name}' stands inside handlers.{handler}, which changes its density and not its draws, so that "
                "the readings of the program would disagree: write the prior that is meant (Normal(m, s) to the power k is "
                "Normal(m, s / sqrt(k))), and weigh or mask the outcome alone"
            )
        before, after = jnp.shape(trace[name]["value"]), jnp.shape(longer[name]["value"])
        if before != after:
            raise InvalidProgram(
                f"the latent '{name}' has shape {before} for 2 rows and {after} for 3: a latent per row cannot be learnt; "
                "share it between rows, or integrate it out by writing the marginal distribution of the outcome"
            )
        if trace[name]["fn"].support.is_discrete:
            raise InvalidProgram(
                f"the latent '{name}' is discrete: sum it out, for instance with dist.MixtureSameFamily or "
                "dist.MixtureGeneral for the outcome"
            )
        if not trace[name]["has_bijection"]:
            raise InvalidProgram(
                f"the latent '{name}' lives on {type(trace[name]['fn'].support).__name__.strip('_')}, to which NumPyro has no "
                "bijection from the reals, so no engine can sample it: write it as a function of latents with a real, "
                "positive, interval or simplex support"
            )


def _is_masked(fn: Any) -> bool:
    while hasattr(fn, "base_dist"):
        if type(fn).__name__ == "MaskedDistribution" and fn._mask is not True:
            return True
        fn = fn.base_dist
    return False


def _check_expected_reward(trace: Trace, outcomes: tuple[str, ...]) -> bool:
    site = trace.get("expected_reward")
    if site is None:
        if len(outcomes) > 1:
            raise InvalidProgram(
                f"with several outcomes {outcomes} the program must say what to maximise: add "
                'numpyro.deterministic("expected_reward", ...) of shape (N,)'
            )
        return False
    if site["type"] != "deterministic" or jnp.shape(site["value"]) != (2,):
        raise InvalidProgram(
            f"expected_reward must be a numpyro.deterministic of shape (N,), got a {site['type']} site of shape "
            f"{jnp.shape(site['value'])} for 2 rows"
        )
    return True


def _check_flow(reading: _Reading, shapes: Mapping[str, tuple[int, ...]], has_expected_reward: bool) -> None:
    """Check on the jaxpr what flows into the prior and the expected reward, and that arm indices stay in range."""
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

    args = (jr.key(0), latents, arm, context, outcomes)
    closed, shape = jax.make_jaxpr(flow, return_shape=True)(*args)
    labels = [
        frozenset([label])
        for label, arg in zip(("key", "latents", "arm", "context", "outcomes"), args, strict=True)
        for _ in jax.tree.leaves(arg)
    ]
    found = dependencies(closed.jaxpr, labels)
    num_prior = len(shape[0])
    if any("key" in reaching for reaching in found):
        raise InvalidProgram(
            "a random draw hidden from NumPyro reaches a prior, the likelihood or the expected reward, so that the program "
            "does not say the same twice: draw with numpyro.sample alone, outside of handlers.block and of NumPyro's own scan; "
            "steps of a chain can be one site, `numpyro.sample(name, dist.Normal(0, 1).expand([T]))`, added up by jnp.cumsum "
            "or jax.lax.scan"
        )
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
    known = [UNKNOWN if label != frozenset(["arm"]) else arm for label in labels]
    sizes: list[int] = []

    def ranges() -> list[tuple[Array, Array]]:
        found = read_indices(closed.jaxpr, closed.consts, known)
        sizes.extend(index.size for index in found)
        return [(index.lowest, index.highest) for index in found]

    extremes = run_once(ranges)
    for (lowest, highest), size in zip(extremes, sizes, strict=True):
        if lowest < 0 or highest >= size:
            raise InvalidProgram(
                f"with num_arms={reading.num_arms} the program reads entries {int(lowest)} to {int(highest)} of an axis with "
                f"{size} entries: jax would silently read the nearest one; give every arm its own entry or correct num_arms"
            )


def _support_moves(reading: _Reading, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    arm, context = reading.arms()
    values: dict[str, Any] = {name: np.zeros(reading.num_arms, NUMBERS[kind]) for name, kind in reading.kinds.items()}

    def supports(latents: Any) -> list[Any]:
        trace = reading.run(latents, arm, context, values)
        return [trace[name]["fn"].support for name in reading.outcomes]

    return has_moving_support(supports, {name: np.zeros(shape) for name, shape in shapes.items()})


def _check_derivative(reading: _Reading, latents: Mapping[str, Any], outcomes: Mapping[str, Any]) -> None:
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
            f"jax cannot differentiate the program by its latents{_where(error, reading.program)}, and every engine follows "
            f"the slope of its density ({type(error).__name__}: {str(error).splitlines()[0]}): write it in jax operations that "
            "have a reverse-mode derivative (jax.lax.scan or fori_loop with fixed bounds in place of a while_loop), or wrap "
            "the callback in jax.custom_vjp"
        ) from error


def _find_mean(reading: _Reading) -> means.MeanWay:
    """Return the first way to the outcome's mean that is open and finite at draws of the latents.

    The distribution's own formula, nearly always open, is tried together with the check of the rows. Points near the middle
    of the support come first: drawing from the prior takes far longer to compile.
    """
    try:
        if _check_rows(reading, means.WAYS[0]) == 1:
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
                _check_rows(reading, way)
            return way
        if found == -1:
            break
    raise InvalidProgram(
        f"the distribution of '{outcome}' has no finite mean at draws from the prior, so its expected reward is undefined: "
        'name what to maximise with numpyro.deterministic("expected_reward", ...), a median or a utility for instance'
    )


def _check_rows(reading: _Reading, mean_way: means.MeanWay | None) -> int:
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
