"""The law of each arm's expected reward, where the exact engine knows it in closed form.

An expected reward that is affine in the latents inherits their family: one Beta or Gamma element scaled and shifted, a linear
form of a Gaussian block. Whether it is affine, and which elements it reads, is decided on the jaxpr of the expected reward,
for every context at once; what is not plainly affine has no closed form here.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.extend.core import Jaxpr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.exact import pseudo_counts as counting
from ppl_bandit.engines.exact.families import Layout, Posterior
from ppl_bandit.numerics import laws, sampling
from ppl_bandit.numerics.compilation import run_once
from ppl_bandit.program.jaxprs import bind, evaluate, subjaxpr
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Key, Marginals

__all__ = ["marginals_of"]

Table: TypeAlias = Callable[[Key, int], Array]  # (key, M) -> (M, A)

_DATA = object()  # a value that depends on the context: known when a decision is made
_LOST = object()  # a value that depends on latents in another way
_HIGHEST = jax.lax.Precision.HIGHEST  # accelerators round to 10 bits
_MOVES = (
    "broadcast_in_dim concatenate copy cumsum dynamic_slice expand_dims gather neg pad reduce_sum reshape rev select_n slice "
    "squeeze transpose"
).split()


class _NotAffine(Exception):
    """The expected reward is not plainly affine in the latents."""


class _Affine(NamedTuple):
    """An array whose entries are affine in the latents, or reciprocals of one of them.

    Attributes:
        reads: (..., E), which elements each entry reads; computed, with all that is known beforehand, in one go.
        is_lost: whether it is not plainly affine after all.
        is_term: whether each entry is a multiple of elements, with nothing added.
        power: 1, or -1 for a multiple of the reciprocal of one element.
    """

    reads: Bool[Array, "... E"]
    is_lost: Bool[Array, ""]
    is_term: bool = True
    power: int = 1


def marginals_of(model: RewardModel, layout: Layout) -> Callable[[Posterior, Any], Marginals | None]:
    """Return (state, context) -> the law of every arm's expected reward, or None where it has no closed form.

    The program is looked at when it is first asked for: most bandits never do.
    """

    @functools.cache
    def offer() -> Callable[[Posterior, Any], Marginals] | None:
        with jax.core.eval_context():  # also while a decision is being traced
            return _offer_of(model, layout)

    def marginals(state: Posterior, context: Any) -> Marginals | None:
        known = offer()
        return None if known is None else known(state, context)

    return marginals


def _offer_of(model: RewardModel, layout: Layout) -> Callable[[Posterior, Any], Marginals] | None:
    try:
        reads_of_arms, power = _expected_reward_structure(model, layout)
    except _NotAffine:
        return None
    kinds = np.concatenate([np.full(site.size, site.kind, dtype=object) for site in layout.sites])
    places = np.concatenate([site.start + np.arange(site.size) for site in layout.sites])
    reads = [np.flatnonzero(row) for row in reads_of_arms]
    if any(row.size == 0 for row in reads) or len({kinds[e] for row in reads for e in row}) != 1:
        return None
    kind = kinds[reads[0][0]]
    if kind == "real":
        owner = _owners(layout)
        own = [{int(owner[places[e]]) for e in row} for row in reads]
        if power != 1 or any(len(groups) != 1 for groups in own):
            return None
        groups = np.array([groups.pop() for groups in own])
        if np.all(groups < 0):
            find_noise = _when_asked(lambda: counting.known_noise(model, layout))

            def normal_offer(state: Posterior, context: Any) -> Marginals:
                law, table = _joint_normal(model, layout, state, context)

                def counts() -> Float[Array, " A"] | None:
                    noise = find_noise()
                    return None if noise is None else noise(context) / law.width**2

                return _offer(law, is_independent=False, counts=counts)._replace(table=table)

            return normal_offer
        if np.any(groups < 0):
            return None
        is_independent = np.unique(groups).size == groups.size
        find_scale = _when_asked(lambda: counting.own_noise(model, layout, groups))

        def student_t_offer(state: Posterior, context: Any) -> Marginals:
            law, table = _joint_student_t(model, layout, groups, state, context)

            def counts() -> Float[Array, " A"] | None:
                scale = find_scale()
                return None if scale is None else scale(context) * (state.rate / state.shape)[groups] / law.width**2

            return _offer(law, is_independent, counts=counts)._replace(table=table)

        return student_t_offer
    if kind not in ("unit", "positive") or any(row.size != 1 for row in reads):
        return None
    places = np.array([places[row[0]] for row in reads])
    is_independent = np.unique(places).size == places.size
    low, high = _bounds(layout, kind, places)
    if power == -1 and np.any(low != 0):
        return None
    make = _beta if kind == "unit" else _gamma
    if power == -1 and kind == "unit":
        return None
    find_spread = _when_asked(lambda: counting.element_noise(model, layout, kind, places))
    fixed = None if model.context is not None else run_once(lambda: _coefficients(model, power, None))

    def offer(state: Posterior, context: Any) -> Marginals:
        offset, slope = _coefficients(model, power, context) if fixed is None else fixed
        law = make(layout, state, places, low, high, offset, slope, power)

        def counts() -> Float[Array, " A"] | None:
            spread = find_spread()
            if spread is None:
                return None
            x = laws.node_values(law)
            noises = spread(((x - offset) / slope) ** power, context)
            return laws.average(law, noises) / laws.average(law, (x - laws.average(law, x)) ** 2)

        return _offer(law, is_independent, counts=counts)

    return offer


def _when_asked(find: Callable[[], Callable | None]) -> Callable[[], Callable | None]:
    """Look once, when first asked: few selectors ask, and looking compiles."""

    @functools.cache
    def found() -> Callable | None:
        with jax.core.eval_context():
            return find()

    return found


def _offer(law: laws.Law, is_independent: bool, *, counts: Callable[[], Array | None]) -> Marginals:
    def probs(allowed: Bool[Array, " A"] | None = None) -> Float[Array, " A"]:
        return laws.best_arm_probs(law, allowed)

    return Marginals(
        lambda x: laws.cdf(law, x),
        lambda order: laws.quantile(law, order),
        probs if is_independent else None,
        lambda: laws.tail(law),
        counts,
    )


def _beta(
    layout: Layout, state: Posterior, places: Any, low: Any, high: Any, offset: Any, slope: Any, power: int
) -> laws.Law:
    del layout, power
    a, b = state.beta[places, 0], state.beta[places, 1]
    return laws.beta_law(a, b, offset + slope * low, slope * (high - low))


def _gamma(
    layout: Layout, state: Posterior, places: Any, low: Any, high: Any, offset: Any, slope: Any, power: int
) -> laws.Law:
    del high
    exponent = power / layout.power[places]
    return laws.gamma_law(state.shape[places], state.rate[places], offset + slope * low, slope, exponent)


def _joint_student_t(
    model: RewardModel, layout: Layout, groups: np.ndarray, state: Posterior, context: Any
) -> tuple[laws.Law, Table]:
    """Return the law of linear forms, and a way to draw them together.

    Each reads one block x | u ~ Normal(mean, inverse(u precision)), u ~ Gamma(shape, rate).
    """
    loc, weights = _linear_form(model, layout, _real_mean(layout, state), context)
    own = jnp.where(layout.is_member[groups], jnp.take_along_axis(weights, layout.members[groups], axis=1), 0.0)
    halves = jnp.einsum("ast,at->as", _inverse_root(state.scaled_precision)[groups], own, precision=_HIGHEST)
    shape, rate = state.shape[groups], state.rate[groups]
    law = laws.student_t_law(2.0 * shape, loc, jnp.sqrt(jnp.sum(halves**2, axis=1) * rate / shape))
    kinds, which = np.unique(groups, return_inverse=True)
    # Arms of different blocks are orthogonal: each has rows of its own.
    root = (halves[:, None, :] * jax.nn.one_hot(which, kinds.size, dtype=loc.dtype)[:, :, None]).reshape(loc.size, -1)

    def table(key: Key, num_samples: int) -> Float[Array, "M A"]:
        key_scale, key_noise = jr.split(key)
        log_u = sampling.log_gamma(key_scale, state.shape[kinds], (num_samples,)) - jnp.log(state.rate[kinds])
        spread = jnp.exp(-0.5 * log_u)[:, which] * _correlated(key_noise, root, num_samples)
        return (loc + spread)[:, _twins(loc, root)]

    return law, table


def _joint_normal(model: RewardModel, layout: Layout, state: Posterior, context: Any) -> tuple[laws.Law, Table]:
    """Return the law of linear forms of the free Gaussian block, and a way to draw them together."""
    loc, weights = _linear_form(model, layout, _real_mean(layout, state), context)
    halves = jnp.einsum("st,at->as", _inverse_root(state.precision), weights[:, layout.free], precision=_HIGHEST)
    law = laws.student_t_law(jnp.full(loc.shape, jnp.inf), loc, jnp.sqrt(jnp.sum(halves**2, axis=1)))

    def table(key: Key, num_samples: int) -> Float[Array, "M A"]:
        return (loc + _correlated(key, halves, num_samples))[:, _twins(loc, halves)]

    return law, table


def _correlated(key: Key, root: Float[Array, "A F"], num_samples: int) -> Float[Array, "M A"]:
    """Draw Gaussian vectors with covariance root root', from as few numbers as there are arms, or columns of the root."""
    num_arms, num_columns = root.shape
    if num_columns > num_arms:
        root = jnp.linalg.qr(root.T, mode="r").T
    one = jnp.ones((), root.dtype)
    noise = sampling.normal(key, 0.0 * one, one, (root.shape[1], num_samples))
    return jnp.matmul(root, noise, precision=_HIGHEST).T


def _twins(loc: Float[Array, " A"], root: Float[Array, "A F"]) -> Int[Array, " A"]:
    """Return, for each arm, the first that is one and the same: they must tie, and rounding would decide between them."""
    size = jnp.max(jnp.abs(root)) + jnp.max(jnp.abs(loc))
    gap = jnp.max(jnp.abs(root[:, None] - root[None]), axis=2) + jnp.abs(loc[:, None] - loc[None])
    return jnp.argmax(gap <= 64.0 * jnp.finfo(loc.dtype).eps * size, axis=1)


def _inverse_root(precision: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """Return inverse(L), with precision = L L'; the square of inverse(L) row is the variance of row' x.

    It depends on the state alone: a batch of contexts shares it.
    """
    if precision.shape[-1] == 1:
        return 1.0 / jnp.sqrt(precision)
    identity = jnp.broadcast_to(jnp.eye(precision.shape[-1], dtype=precision.dtype), precision.shape)
    return jax.lax.linalg.triangular_solve(jnp.linalg.cholesky(precision), identity, left_side=True, lower=True)


def _real_mean(layout: Layout, state: Posterior) -> Array:
    real = jnp.zeros(layout.count("real"), state.mean.dtype).at[layout.free].set(state.mean)
    if layout.members.size:
        real = real.at[layout.members[layout.is_member]].set(state.scaled_mean[layout.is_member])
    return real


def _linear_form(model: RewardModel, layout: Layout, centre: Array, context: Any) -> tuple[Array, Array]:
    """Return the expected rewards at the mean of the reals, (A,), and their slopes, (A, D)."""

    def rewards(real: Array) -> Array:
        latents = {site.name: jnp.ones(site.shape, real.dtype) for site in layout.sites}
        for site in layout.of("real"):
            latents[site.name] = real[site.start : site.start + site.size].reshape(site.shape)
        return _expected(model, latents, context)

    value, pull = jax.vjp(rewards, centre)
    return value, jax.vmap(lambda row: pull(row)[0])(jnp.eye(model.num_arms, dtype=value.dtype))


def _coefficients(model: RewardModel, power: int, context: Any) -> tuple[Array, Array]:
    """Return offset and slope of expected rewards that each read one element."""

    def at(value: float) -> Array:
        return _expected(model, {name: jnp.full(shape, value) for name, shape in model.latent_shapes.items()}, context)

    one = at(1.0)
    return (jnp.zeros_like(one), one) if power == -1 else (at(0.0), one - at(0.0))


def _expected(model: RewardModel, latents: dict[str, Array], context: Any) -> Float[Array, " A"]:
    return model.expected_rewards({name: value[None] for name, value in latents.items()}, context)[0]


def _owners(layout: Layout) -> np.ndarray:
    """Return, for each real element, the positive element that scales it, or -1."""
    owner = np.full(layout.count("real"), -1)
    for group, (members, is_member) in enumerate(zip(layout.members, layout.is_member, strict=True)):
        owner[members[is_member]] = group
    return owner


def _bounds(layout: Layout, kind: str, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = (
        np.concatenate([np.broadcast_to(getattr(site, end), site.shape).ravel() for site in layout.of(kind)])
        for end in ("low", "high")
    )
    return low[places], high[places]


def _expected_reward_structure(model: RewardModel, layout: Layout) -> tuple[np.ndarray, int]:
    """Return which elements each arm's expected reward reads, (A, E), in the order of the layout's sites, and its power."""
    shapes = {site.name: jax.ShapeDtypeStruct(site.shape, jnp.zeros(()).dtype) for site in layout.sites}
    closed = jax.make_jaxpr(lambda latents, context: _expected(model, latents, context))(shapes, model.context)
    num_elements = sum(site.size for site in layout.sites)
    start = dict(zip([s.name for s in layout.sites], np.cumsum([0] + [s.size for s in layout.sites]), strict=False))
    powers: list[int] = []

    def measure() -> tuple[Array, Array]:
        args: list[Any] = []
        for name in sorted(shapes):  # the order in which a dict is flattened
            shape = shapes[name].shape
            own = np.eye(num_elements, dtype=bool)[start[name] : start[name] + int(np.prod(shape, dtype=int))]
            args.append(_Affine(jnp.asarray(own.reshape(*shape, -1)), jnp.zeros((), bool)))
        args += [_DATA] * len(jax.tree.leaves(model.context))
        (out,) = _follow(closed.jaxpr, closed.consts, args)
        if not isinstance(out, _Affine):
            raise _NotAffine
        powers.append(out.power)
        return out.reads, out.is_lost

    reads, is_lost = run_once(measure)
    if is_lost:
        raise _NotAffine
    return reads, powers[0]


def _follow(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
        inner = subjaxpr(eqn)
        if inner is not None:
            return _follow(inner[0], inner[1], values)
        if any(isinstance(value, _Affine) for value in values) and not any(value is _LOST for value in values):
            with contextlib.suppress(_NotAffine):
                return [_step(eqn, values)]
        if any(value is _LOST or isinstance(value, _Affine) for value in values):
            return [_LOST] * len(eqn.outvars)
        if any(value is _DATA for value in values) or eqn.effects:
            return [_DATA] * len(eqn.outvars)
        return bind(eqn, values)

    return evaluate(jaxpr, consts, args, step)


def _step(eqn: Any, values: list[Any]) -> _Affine:
    name, affine = eqn.primitive.name, [value for value in values if isinstance(value, _Affine)]
    first = affine[0]
    if any(value.power != first.power for value in affine):
        raise _NotAffine
    shape = (*eqn.outvars[0].aval.shape, first.reads.shape[-1])
    if name in ("add", "sub", "add_any"):
        reads = jnp.zeros(shape, bool)
        for value in affine:
            reads |= value.reads
        return _checked(affine, reads, len(affine) == 2 and all(value.is_term for value in affine))
    if name in ("mul", "div") and len(affine) == 1:
        spread = first._replace(reads=jnp.broadcast_to(first.reads, shape))
        return spread if name == "mul" or isinstance(values[0], _Affine) else _inverse(spread)
    if name == "integer_pow" and eqn.params["y"] in (1, -1):
        return first if eqn.params["y"] == 1 else _inverse(first)
    if name == "convert_element_type" and np.dtype(eqn.params["new_dtype"]).kind == "f":
        return first
    if name == "dot_general" and len(affine) == 1:
        return _apply(eqn, values, fill=1.0)
    fixed = {"gather": (1,), "dynamic_slice": range(1, len(values)), "select_n": (0,)}.get(name, ())
    if name not in _MOVES or any(values[i] is _DATA or isinstance(values[i], _Affine) for i in fixed):
        raise _NotAffine
    return _apply(eqn, values, fill=0.0, fixed=tuple(fixed))


def _apply(eqn: Any, values: list[Any], fill: float, fixed: Sequence[int] = ()) -> _Affine:
    """Send the elements that are read through a linear operation; what is not a latent is filled."""
    affine = [value for value in values if isinstance(value, _Affine)]

    def through(columns: Sequence[Array]) -> Array:
        left = iter(columns)
        operands = []
        for i, (atom, value) in enumerate(zip(eqn.invars, values, strict=True)):
            if isinstance(value, _Affine):
                operands.append(next(left))
            else:
                operands.append(value if i in fixed else jnp.full(atom.aval.shape, fill))
        return bind(eqn, operands)[0]

    columns = [value.reads.astype(float) for value in affine]
    reads = jax.vmap(through, in_axes=-1, out_axes=-1)(columns) != 0
    # A constant that takes part, in a concatenation or a choice, is something added.
    is_term = all(value.is_term for value in affine) and (fill == 1.0 or len(affine) == len(values) - len(fixed))
    return _checked(affine, reads, is_term)


def _inverse(value: _Affine) -> _Affine:
    if not value.is_term or value.power != 1:
        raise _NotAffine
    return value._replace(power=-1, is_lost=value.is_lost | _reads_several(value.reads))


def _checked(affine: list[_Affine], reads: Bool[Array, "... E"], is_term: bool) -> _Affine:
    """Return what was made of affine parts; sums of reciprocals, and a reciprocal with something added, are not followed."""
    power, is_lost = affine[0].power, functools.reduce(jnp.logical_or, [value.is_lost for value in affine])
    if power == -1:
        if not is_term:
            raise _NotAffine
        is_lost |= _reads_several(reads)
    return _Affine(reads, is_lost, is_term, power)


def _reads_several(reads: Bool[Array, "... E"]) -> Bool[Array, ""]:
    return jnp.any(jnp.sum(reads, axis=-1) > 1)
