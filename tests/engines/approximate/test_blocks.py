"""Blocks of latents are independent given any data."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit.engines.particles.blocks import independent_blocks
from ppl_bandit.engines.particles.space import unconstrained_space
from ppl_bandit.program.model.reward_model import RewardModel


def blocks_of(program, num_arms, context=None):
    model = RewardModel(program, num_arms, context=context)
    found = independent_blocks(model, unconstrained_space(model))
    return [
        set(row[row < unconstrained_space(model).size].tolist()) for row in found.coordinates
    ], found.of_arm.tolist()


def test_arms_with_separate_latents_are_independent_blocks():
    def by_index(arm, context):
        weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        numpyro.sample("reward", dist.Bernoulli(logits=jnp.sum(weights[arm] * context, axis=-1)))

    def by_case(arm, context):
        weights = [numpyro.sample(f"w{a}", dist.Normal(0.0, 1.0).expand([2]).to_event(1)) for a in range(3)]
        cases = [jnp.where(arm == a, context @ weights[a], 0.0) for a in range(3)]
        numpyro.sample("reward", dist.Bernoulli(logits=sum(cases)))

    apart = ([{0, 1}, {2, 3}, {4, 5}], [0, 1, 2])
    assert blocks_of(by_index, 3, np.ones(2)) == apart
    assert blocks_of(by_case, 3, np.ones(2)) == apart


def test_latents_that_share_a_term_of_the_prior_or_a_row_are_one_block():
    def through_the_rows(arm, context):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        numpyro.sample(
            "reward", dist.Normal(weights[arm] + weights[context.astype(int)], 1.0)
        )  # an index that data choose

    def through_the_prior(arm):
        common = numpyro.sample("common", dist.Normal(0.0, 1.0))
        own = numpyro.sample("own", dist.Normal(common, 1.0).expand([3]).to_event(1))
        numpyro.sample("reward", dist.Normal(own[arm], 1.0))

    def through_a_factor(arm):
        own = numpyro.sample("own", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.factor("tie", -jnp.square(own[0] - own[1]))
        numpyro.sample("reward", dist.Normal(own[arm], 1.0))

    assert blocks_of(through_the_rows, 3, np.array(1.0))[0] == [{0, 1, 2}]
    assert blocks_of(through_the_prior, 3)[0] == [{0, 1, 2, 3}]
    assert blocks_of(through_a_factor, 3) == ([{0, 1}, {2}], [0, 0, 1])


def test_latents_that_no_row_informs_are_one_block():
    def program(arm):
        own = numpyro.sample("own", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("idle", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("reward", dist.Exponential(own[arm]))

    assert blocks_of(program, 2) == ([{0}, {1}, {2, 3}], [0, 1])
