"""What callers hand over by mistake: named with the argument, the value and the remedy, and nothing is changed."""

import datetime

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import bernoulli_engine, prior_engine

from ppl_bandit import Bandit, Environment, RewardModel, engines, selectors
from ppl_bandit.inputs.checks import check_contexts, count_rows


def counts(arm):
    rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0).expand([3]))
    numpyro.sample("reward", dist.Poisson(rate[arm]))


def means(arm):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.0))


@pytest.fixture(scope="module")
def bandit():
    return Bandit(counts, 3, engine=prior_engine, num_samples=20)


REWARDS = {
    "complex": (1 + 2j, "complex numbers; convert"),
    "text": ("3.5", "'3.5': text; convert"),
    "bytes": (b"3", "bytes; convert"),
    "a date": (np.datetime64("2026-01-01"), "dates; convert"),
    "a python date": (datetime.datetime(2026, 1, 1), "objects; convert"),
    "a set": ({1.0}, "got a set; pass a list"),
    "masked": (np.ma.masked_array(1.0, mask=True), "masked array with 1 masked entries"),
    "beyond 2**53": (2**53 + 1, "counts beyond 2\\*\\*53 are not exact"),
    "beyond any integer": (2**70, "counts beyond 2\\*\\*53 are not exact"),
    "beyond any float": (10**400, r"reward holds 10000.*\.\.\.: counts beyond 2\*\*53 are not exact"),
    "beyond any text": (10**5000, "reward holds an integer of 16610 bits: counts beyond"),
    "a float beyond 2**53": (1e17, "counts beyond 2\\*\\*53 are not exact"),
    "none at all": (None, "reward is missing"),
}


@pytest.mark.parametrize("case", REWARDS)
def test_a_reward_that_is_no_number_is_refused(bandit, case):
    value, words = REWARDS[case]
    with pytest.raises(ValueError, match=words):
        bandit.update(arm=0, reward=value)
    assert bandit.num_rewards == 0


BATCHES = {
    "a set of arms": (dict(arms={0, 1}, rewards=[1, 2]), "arms must be a sequence of arms"),
    "a dict of arms": (dict(arms={0: 1}, rewards=[1]), "arms must be a sequence of arms"),
    "masked arms": (dict(arms=np.ma.masked_array([0, 1], [0, 1]), rewards=[1, 2]), "arms is a masked array"),
    "masked rewards": (
        dict(arms=[0, 1], rewards=np.ma.masked_array([1, 2], [0, 1])),
        r"1 masked entries, the first at \(1,\)",
    ),
    "a set of rewards": (dict(arms=[0, 1], rewards={1, 2}), "got a set"),
    "text": (dict(arms=[0, 1], rewards=["1", "2"]), "text; convert"),
    "ragged arms": (dict(arms=[[0], [1, 2]], rewards=[1, 2]), "arms must be a sequence of arms"),
    "both": (dict(arms=[0], decisions=["x"], rewards=[1]), "not both"),
    "neither": (dict(rewards=[1]), "give decisions= or arms="),
    "one id for many": (dict(decisions="abc", rewards=[1]), "decisions must be a sequence"),
    "a decision twice": (dict(decisions=["a", "a"], rewards=[1, 1]), "has one decision twice"),
    "no decision at all": (dict(decisions=[3], rewards=[1]), "must be a decision or its id, got 3"),
    "a text for a flag": (dict(decisions=["a"], rewards=[1], correct="no"), "correct must be True or False, got 'no'"),
    "a correction without one": (dict(arms=[0], rewards=[1], correct=True), "needs decisions="),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_is_no_batch_is_refused(bandit, case):
    arguments, words = BATCHES[case]
    with pytest.raises(ValueError, match=words):
        bandit.update_many(**arguments)
    assert bandit.num_rewards == 0


def test_a_mask_in_numbers_is_asked_which_was_meant(bandit):
    with pytest.raises(ValueError, match=r"names an arm twice: .* for a mask, booleans: \[True, False, True\]"):
        bandit.select(allowed=[1, 0, 1])
    with pytest.raises(ValueError, match="allowed must be a list of arms or a mask"):
        bandit.select(allowed="012")
    assert bandit.select(allowed={2}).arm == 2
    with pytest.raises(ValueError, match="allowed must be a list of arms or a mask"):
        bandit.select(allowed=[[0], [1, 2]])
    with pytest.raises(ValueError, match="num_decisions must be an integer below"):
        bandit.select_many(num_decisions=10**400)
    for span in (-1, "1h", True, float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="older_than must be seconds"):
            bandit.expire(span)


def test_an_expired_reward_outside_the_support_is_refused_also_if_nothing_expires(bandit):
    bandit.select()
    for older_than in (0, 3600):
        with pytest.raises(ValueError, match=r"reward=-1 .*is outside the support of the outcome 'reward' on"):
            bandit.expire(older_than, reward=-1)
    assert bandit.expire(3600, reward=2) == bandit.num_rewards == 0


def test_ragged_contexts_are_refused():
    def slopes(arm, context):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2, 2]))
        numpyro.sample("reward", dist.Normal((slope[arm] * context).sum(-1), 1.0))

    model, ragged = RewardModel(slopes, 2, context=np.zeros(2)), [[1.0, 2.0], [3.0]]
    for num_rows in (None, count_rows(model, ragged)):
        with pytest.raises(ValueError, match=r"contexts holds \[\[1.0, 2.0\], \[3.0\]\], expected an array of shape"):
            check_contexts(model, ragged, num_rows, "contexts")


BUILT = {
    "arms in a set": (dict(arms={"a", "b", "c"}), "arms must be a sequence of names"),
    "a fraction of an arm": (dict(num_arms=2.7), "num_arms must be a positive integer, got 2.7"),
    "a bool for a count": (dict(num_arms=True), "num_arms must be a positive integer, got True"),
    "a bool for draws": (dict(num_arms=3, num_samples=True), "num_samples must be a positive integer"),
    "an engine's name": (dict(num_arms=3, engine="nuts"), r"pass the factory itself, as in engine=engines\.nuts"),
    "a selector's name": (dict(num_arms=3, selector="thompson"), r"as in selector=selectors\.thompson\(\)"),
    "a selector without allowed": (
        dict(num_arms=3, selector=lambda key, table, step: None),
        r"cannot be called as select\(key, table, step, .*'allowed'.*return a Selection",
    ),
    "an uncalled selector": (dict(num_arms=3, selector=selectors.thompson), r"call it, as in selectors\.thompson\(\)"),
    "an engine of something else": (dict(num_arms=3, engine=lambda model: 3), "it returned int"),
    "a module for an engine": (dict(num_arms=3, engine=engines), "engine must be a factory"),
    "a name without a journal": (dict(num_arms=3, name="x"), "give journal= too"),
    "a text for a flag": (dict(num_arms=3, draws="no"), "draws must be True or False, got 'no'"),
    "an empty name of an arm": (dict(arms=["a", "", "c"]), r"arms\[1\] must be a text that is not empty"),
    "half a character in a name": (dict(arms=["a", "b\ud800", "c"]), r"arms\[1\] holds half of a surrogate pair"),
    "a count beyond any number": (
        dict(num_arms=3, num_samples=10**400),
        r"num_samples must be an integer below 2\*\*63",
    ),
    "a negative burn-in": (dict(num_arms=3, burn_in=-1), "burn_in must be an integer of at least 0"),
}


@pytest.mark.parametrize("case", BUILT)
def test_a_bandit_that_cannot_be_meant_is_not_built(case):
    arguments, words = BUILT[case]
    with pytest.raises(ValueError, match=words):
        Bandit(counts, **arguments)


def test_an_engine_that_was_built_already_is_asked_for_its_factory():
    with pytest.raises(ValueError, match=r"was built already: pass its factory, as in engine=engines\.conjugate"):
        Bandit(counts, 3, engine=bernoulli_engine(3))


@pytest.mark.slow
def test_a_reward_too_large_to_learn_from_is_refused_and_the_engine_stays_exact():
    bandit = Bandit(means, 2, num_samples=20)
    bandit.update(arm=0, reward=1.0)
    for reward in (1e160, -1e300):
        with pytest.raises(ValueError, match="so large that the posterior would overflow"):
            bandit.update(arm=0, reward=reward)
    assert bandit.explanation.is_exact and bandit.num_rewards == 1
    bandit.update(arm=0, reward=2.0)


def test_a_truth_that_no_world_can_have_is_refused():
    model = RewardModel(counts, 3)
    for truth, words in (
        ([1.0, -1.0, 1.0], "outside the support of the site"),
        ([1.0, np.nan, 1.0], "expected finite numbers"),
        ([1.0, 2.0], r"has shape \(2,\), expected \(3,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            Environment(model, {"rate": truth})
        with pytest.raises(ValueError, match=r"changes\[5\]\['rate'\]"):
            Environment(model, {"rate": np.ones(3)}, changes={5: {"rate": truth}})


NO_NUMBERS = {
    "a dict of outcomes": (
        lambda: RewardModel(counts, 3, outcomes={"reward": [1]}),
        "outcomes must be a list or tuple",
    ),
    "a set of outcomes": (lambda: RewardModel(counts, 3, outcomes={"reward"}), "outcomes must be a list or tuple"),
    "a set of late entries": (lambda: Bandit(counts, 3, late={"days"}), "late must be a list or tuple"),
    "bools for shares": (lambda: selectors.fixed([True, False]), "probs must be nonnegative numbers"),
    "nested shares": (lambda: selectors.fixed([[0.5, 0.5]]), "probs must be nonnegative numbers"),
    "text for shares": (lambda: selectors.fixed(["0.5", "0.5"]), "probs must be nonnegative numbers"),
}


@pytest.mark.parametrize("case", NO_NUMBERS)
def test_what_holds_no_numbers_is_refused(case):
    build, words = NO_NUMBERS[case]
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    "propensity", [[True], [[0.5]], ["0.5"], {0: 0.5}, {0.5}, [None], 0.5, [0.0], [1.5], [float("nan")]]
)
def test_a_propensity_that_is_no_probability_is_refused(bandit, propensity):
    with pytest.raises(ValueError, match="propensity"):
        bandit.update_many(arms=[0], rewards=[1.0], propensity=propensity)
    assert bandit.num_rewards == 0
