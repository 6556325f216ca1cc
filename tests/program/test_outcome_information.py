"""Reward and information can differ: arms whose outcome does not tell about their expected reward."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import prior_engine

from ppl_bandit import Bandit, RewardModel, selectors
from ppl_bandit.program.outcomes import check_information_directed, outcome_information

PAIRS = np.array([(0, 0), (0, 1), (1, 1)])


def duel(arm):
    strength = numpyro.sample("strength", dist.Normal(np.zeros(2), 1.0).to_event(1))
    first, second = strength[jnp.asarray(PAIRS)[arm]].T
    numpyro.sample("reward", dist.Bernoulli(logits=first - second))
    numpyro.deterministic("expected_reward", 0.5 * (first + second))


def price(arm):
    rate = numpyro.sample("rate", dist.Beta(np.ones(2), 3.0).to_event(1))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))
    numpyro.deterministic("expected_reward", jnp.array([3.0, 5.0])[arm] * rate[arm])


def hurdle(arm):
    shares = numpyro.sample("shares", dist.Dirichlet(np.ones((2, 3))).to_event(1))
    level = numpyro.sample("level", dist.Gamma(np.full(2, 2.0), 1.0).to_event(1))
    kind = numpyro.sample("kind", dist.Categorical(shares[arm]))
    numpyro.sample("spend", dist.Exponential(1.0 / level[arm]).mask(kind == 2))
    numpyro.deterministic("expected_reward", shares[arm, 2] * level[arm])


def survey(arm):
    taste = numpyro.sample("taste", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(taste * jnp.array([1.0, -1.0, 1.0])[arm], 1.0))
    numpyro.deterministic("expected_reward", taste * jnp.array([1.0, -1.0, 0.0])[arm])


def linear(arm, context):
    weight = numpyro.sample("weight", dist.Normal(np.zeros((2, 2)), 1.0).to_event(2))
    mean = (weight[arm] * context).sum(-1)
    numpyro.sample("reward", dist.Normal(mean, 1.0))
    numpyro.deterministic("expected_reward", jnp.tanh(mean))


def test_a_duel_of_an_item_with_itself_tells_nothing_and_other_duels_tell_about_another_quantity():
    found = outcome_information(RewardModel(duel, 3))
    assert found.uninformative == (0, 2) and found.misleading == (1,)


@pytest.mark.parametrize(
    ("program", "settings"),
    [
        pytest.param(price, {}, marks=pytest.mark.slow),
        pytest.param(hurdle, {"outcomes": ("kind", "spend")}, marks=pytest.mark.slow),
        (linear, {"context": np.zeros(2)}),
    ],
    ids=["price", "hurdle", "linear"],
)
def test_functions_of_what_the_outcome_tells_are_accepted(program, settings):
    model = RewardModel(program, 2, **settings)
    assert outcome_information(model) == ((), ())
    check_information_directed(model, selectors.information_directed())


def test_information_directed_sampling_is_refused_where_it_would_measure_another_quantity():
    model = RewardModel(survey, 3)
    assert outcome_information(model).misleading == (2,)
    with pytest.raises(ValueError, match=r"outcome of arm 2 does not tell .*selectors.thompson"):
        check_information_directed(model, selectors.with_floor(selectors.information_directed(), 0.1))
    check_information_directed(model, selectors.with_floor(selectors.thompson(), 0.1))


def test_a_bandit_warns_about_arms_that_teach_nothing_and_refuses_information_directed_sampling():
    with pytest.warns(UserWarning, match="outcome of arms 'a a', 'b b' does not depend on any latent"):
        Bandit(duel, arms=["a a", "a b", "b b"], engine=prior_engine, num_samples=50)
    with pytest.raises(ValueError, match="information_directed"):
        Bandit(duel, 3, engine=prior_engine, selector=selectors.information_directed())
