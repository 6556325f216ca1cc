"""Ranges of what outer latents reach: they hold at random points, and what may have a kink, a pole or a branch is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.program.jaxpr.forms import Data, Forms, Refused

POSITIVE, UNIT, REAL, MODERATE = (0.0, np.inf), (0.0, 1.0), (-np.inf, np.inf), (-100.0, 100.0)


def read(function, support, **options):
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(function)(np.zeros(3))
        forms = Forms(**options)
        (found,) = forms.evaluate(closed, [forms.outer((3,), *support)])
    return forms.values(found), forms


ANALYTIC = {
    "arithmetic": (lambda o: 1.0 / (1.0 + o[0] * o[0]) - o[1] / 3.0, REAL),
    "log": (lambda o: jnp.log(o), POSITIVE),
    "log of the rest": (lambda o: jnp.log1p(-o), UNIT),
    "logit": (lambda o: jnp.log(o / (1.0 - o)), UNIT),
    "root of a sum of squares and 1": (lambda o: jnp.sqrt(1.0 + jnp.sum(o**2)), REAL),
    "root of 1 less a square": (lambda o: jnp.sqrt(1.0 - o**2), (-1.0, 1.0)),
    "reciprocal root": (lambda o: jax.lax.rsqrt(o[0] + o[2]), POSITIVE),
    "real powers": (lambda o: o ** jnp.array([0.5, -1.0, 2.0]), POSITIVE),
    "whole powers": (lambda o: o ** jnp.array([0.0, 1.0, 2.0]), REAL),
    "exponential": (lambda o: jnp.exp(-o), MODERATE),
    "sigmoid": (lambda o: jax.nn.sigmoid(o), MODERATE),
    "softplus": (lambda o: jnp.log(jax.nn.softplus(o)), MODERATE),
    "log gamma": (lambda o: jax.lax.lgamma(o), POSITIVE),
    "a choice by constants": (lambda o: jnp.log(jnp.where(jnp.array([True, False, True]), o, 2.0)), POSITIVE),
    "a comparison that is decided": (lambda o: jnp.where(o > -1.0, jnp.maximum(o, 0.0), jnp.abs(o) + 9.0), POSITIVE),
    "moves": (lambda o: jnp.log(jnp.concatenate([o[::-1], o[None, 1], jnp.ones(2)])[jnp.array([3, 0])]), POSITIVE),
    "products": (lambda o: jnp.log(jnp.cumprod(o) * jnp.prod(o)), UNIT),
    "sums": (lambda o: jnp.log(jnp.cumsum(o) + o.sum()), POSITIVE),
    "a matrix product": (lambda o: jnp.log(jnp.einsum("i,j->", o, o)), POSITIVE),
    "added in places": (lambda o: jnp.log(jnp.ones(4).at[jnp.array([1, 2, 2])].add(o)), UNIT),
    "a factor and its determinant": (
        lambda o: jnp.log(jnp.diagonal(jnp.linalg.cholesky(jnp.eye(3) + o[:, None] * o))),
        POSITIVE,
    ),
}


@pytest.mark.parametrize("name", ANALYTIC)
def test_ranges_of_analytic_functions_hold_at_random_points(name):
    function, (low, high) = ANALYTIC[name]
    found, forms = read(function, (low, high))
    assert any(isinstance(part, Data) and part.is_outer for part in found) and not forms.flattens
    points = np.random.default_rng(3).normal(size=(2_000, 3)) * 3.0
    points = np.exp(points) if low == 0.0 else points
    points = points / (1.0 + points) if high == 1.0 else points
    points = np.clip(points, low + 1e-6, high - 1e-6)
    with jax.enable_x64(True):
        values = np.asarray(jax.jit(jax.vmap(function))(points))
    ends = [part.range[:2] if isinstance(part, Data) else (part.number,) * 2 for part in found]
    assert np.all(values >= np.min(ends)) and np.all(values <= np.max(ends))


@jax.jit
def softplus(x):
    return jnp.maximum(x, 0.0)


KINKS = {
    "a comparison": (lambda o: jnp.where(o < 3.0, o, o**2), POSITIVE, "comparison"),
    "a branch": (lambda o: jax.lax.cond(o[0] > 0, jnp.sin, jnp.cos, o), REAL, "comparison"),
    "abs": (lambda o: jnp.abs(o), REAL, "kink"),
    "the root of a square": (lambda o: jnp.sqrt(o**2), REAL, "square root"),
    "the logarithm of a square": (lambda o: jnp.log((o - 1.0) ** 2), POSITIVE, "logarithm"),
    "a maximum": (lambda o: jnp.maximum(o, 0.5), POSITIVE, "maximum"),
    "a function of the user's that has a name of JAX's": (lambda o: softplus(o - 3.0), POSITIVE, "maximum"),
    "a pole": (lambda o: 1.0 / (o - 3.0), POSITIVE, "division"),
    "a negative power": (lambda o: o**-2, REAL, "negative power"),
    "rounding": (lambda o: jnp.floor(o), POSITIVE, "rounding"),
    "fewer digits": (lambda o: o.astype(jnp.float32), POSITIVE, "rounding"),
    "an index": (lambda o: jnp.arange(3.0)[o[0].astype(int)], POSITIVE, "conversion"),
    "the largest": (lambda o: jnp.max(o), POSITIVE, "largest"),
    "a position": (lambda o: o[jnp.argmax(o)], POSITIVE, "argmax"),
    "a loop": (lambda o: jax.lax.fori_loop(0, 3, lambda i, x: x * o, o), POSITIVE, "scan"),
    "a power that overflows": (lambda o: o**20, POSITIVE, "overflow"),
    "no rule": (lambda o: jnp.arctan(o), UNIT, "`atan` is not known to be analytic"),
    "an exponential that flattens": (lambda o: jnp.exp(o), REAL, "flattens"),
}


@pytest.mark.parametrize("name", KINKS)
def test_what_may_have_a_kink_a_pole_or_a_branch_is_refused_with_the_operation(name):
    function, support, words = KINKS[name]
    found, _ = read(function, support)
    refused = next(part for part in found if isinstance(part, Refused))
    assert words in refused.reason and refused.line.is_users


def test_a_function_that_flattens_far_out_is_marked_where_it_may():
    found, forms = read(lambda o: jnp.exp(o), REAL, may_flatten=True)
    assert all(isinstance(part, Data) for part in found) and forms.flattens
