"""A fingerprint of a program changes with everything that is computed from it, or there is none."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit.program.fingerprints import program_fingerprint


def program_of(function, outcome=lambda mean: dist.Normal(mean, 1.0)):
    def program(arm):
        with numpyro.plate("arms", 2):
            value = numpyro.sample("value", dist.Normal(0.0, 1.0))
        numpyro.sample("reward", outcome(function(value)[arm]))

    return program


def fingerprint(program):
    return program_fingerprint(program, 2, None, ("reward",))


def with_jvp(slope):
    @jax.custom_jvp
    def function(x):
        return jnp.sin(x)

    function.defjvp(lambda primals, tangents: (function(*primals), slope * tangents[0]))
    return function


def with_vjp(slope):
    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    function.defvjp(lambda x: (function(x), None), lambda _, cotangent: (slope * cotangent,))
    return function


def test_equal_programs_have_equal_fingerprints():
    assert fingerprint(program_of(jnp.sin)) == fingerprint(program_of(jnp.sin)) is not None
    assert fingerprint(program_of(jnp.sin)) != fingerprint(program_of(jnp.cos))


def test_the_rule_of_a_custom_jvp_is_part_of_the_fingerprint():
    assert fingerprint(program_of(with_jvp(2.0))) == fingerprint(program_of(with_jvp(2.0))) is not None
    assert fingerprint(program_of(with_jvp(2.0))) != fingerprint(program_of(with_jvp(3.0)))


def test_a_custom_vjp_has_no_fingerprint():
    assert fingerprint(program_of(with_vjp(2.0))) is None


def patched(mean):
    fn = dist.Normal(mean, 1.0)
    fn.sample = lambda key, sample_shape=(): jnp.zeros(sample_shape + fn.batch_shape)
    return fn


class Own(dist.Normal):
    pass


@pytest.mark.parametrize("outcome", [patched, lambda mean: Own(mean, 1.0)], ids=["patched method", "own class"])
def test_a_distribution_that_is_not_numpyros_has_no_fingerprint(outcome):
    assert fingerprint(program_of(jnp.sin, outcome)) is None
