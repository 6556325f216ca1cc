"""An operation of a traced program is found in the user's own line, or not at all."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from ppl_bandit.program.jaxpr.interpreter import source_line
from ppl_bandit.runtime.jax_adapter import called_jaxpr

HERE = "test_source_lines.py"


def stacks_of(function, name):
    """All equations of a primitive, each with the equations that call it."""
    found = []

    def walk(jaxpr, callers):
        for eqn in jaxpr.eqns:
            inner = called_jaxpr(eqn)
            if eqn.primitive.name == name:
                found.append((eqn, *callers))
            elif inner is not None:
                walk(inner[0], (eqn, *callers))

    walk(jax.make_jaxpr(function)(jnp.ones(3)).jaxpr, ())
    return found


def test_a_clip_is_found_in_the_line_that_wrote_it_whoever_traced_it_first():
    jax.make_jaxpr(lambda x: jnp.clip(x, 0.1, 0.9))(jnp.ones(3))  # jax keeps this trace of `clip`, with these frames

    def program(rate):
        return rate.clip(0.1, 0.9)

    found = source_line(stacks_of(program, "max")[0])
    line = program.__code__.co_firstlineno + 1
    assert found.text == f"line {line} of {HERE}: `return rate.clip(0.1, 0.9)`"
    assert found.called == "clip" and found.is_users


def test_an_operator_and_a_jitted_function_of_the_user_are_theirs():
    @jax.jit
    def bend(x):
        return abs(x) + 1.0

    found = source_line(stacks_of(lambda x: bend(x), "abs")[0])
    assert found.is_users and "return abs(x) + 1.0" in found.text


def test_what_a_distribution_does_on_a_line_of_the_user_is_not_theirs():
    def program(x):
        return dist.Bernoulli(probs=x).logits

    lines = [source_line(stack) for stack in stacks_of(program, "log")]
    assert lines and not any(found.is_users for found in lines)
    assert all(HERE in found.text for found in lines)
