"""What a bandit does before its first decision and update, counted and not timed: operations traced."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Interaction, RewardModel, engines
from ppl_bandit.engines.proof.assignment import find_scales, read_supports, split_gaussian_blocks
from ppl_bandit.engines.proof.examination import measure
from ppl_bandit.engines.updates.chunks import chunk_absorber
from ppl_bandit.runtime.jax_adapter import all_equations


def conversion(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def linear(arm, context):
    with numpyro.plate("arms", 2):
        variance = numpyro.sample("variance", dist.InverseGamma(1.0, 1.0))
        prior = dist.Normal(jnp.ones(3), jnp.sqrt(variance)[:, None])
        weights = numpyro.sample("weights", prior.to_event(1))
    mean = jnp.sum(weights[arm] * context, axis=-1)
    numpyro.sample("reward", dist.Normal(mean, jnp.sqrt(variance[arm])))


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, num_arms, context, most_examined, most_learnt",
    [(conversion, 3, None, 1980, 1260), (linear, 2, np.full(3, 0.5), 4010, 2200)],
)
def test_an_examination_and_an_update_are_small_programs(program, num_arms, context, most_examined, most_learnt):
    """A quarter of a millisecond of a start is one operation, traced, lowered and compiled; families that a program does not
    have add none. A tenth above what there were when this was written.
    """
    with jax.enable_x64(True):
        model = RewardModel(program, num_arms, context)
        layout = split_gaussian_blocks(model, find_scales(model, read_supports(model)))
        examined = jax.make_jaxpr(lambda: measure(model, layout, chunk_absorber(model, layout)))()
        engine = engines.conjugate(model)
        row = Interaction(jnp.zeros(1, int), jnp.ones(1), model.context_rows(1))
        learnt = jax.make_jaxpr(engine.update)(jr.key(0), engine.init(jr.key(0)), row)
    assert len(list(all_equations(examined.jaxpr))) <= most_examined
    assert len(list(all_equations(learnt.jaxpr))) <= most_learnt
