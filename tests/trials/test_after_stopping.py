"""Estimates after a trial that could stop early, and tables over several priors."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import bernoulli_engine, bernoulli_model

from ppl_bandit import (
    Design,
    RewardModel,
    adjusted_estimates,
    operating_characteristics,
    stopping,
    sweep_priors,
)


def priced(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))
    numpyro.deterministic("expected_reward", 10.0 * rate[arm])


DESIGN = Design(range(20, 201, 20), stopping=stopping.superiority(0.95))


@pytest.mark.slow  # the tutorial adjusts estimates, too
def test_the_adjusted_estimate_of_a_typical_trial_is_the_truth_and_its_mean_is_not():
    settings = {"num_trials": 2000, "engine": bernoulli_engine(2)}
    truth = np.array([0.4, 0.6])
    own = operating_characteristics(bernoulli_model(2), DESIGN, {"t": truth}, seed=9, **settings).dataset.isel(
        scenario=0
    )
    means = (own.sums / own.outcomes).values  # no arm is without an outcome: 10 decisions each before the first look
    typical = np.median(means, axis=0)
    found = adjusted_estimates(bernoulli_model(2), DESIGN, typical, arms=["old", "new"], **settings)
    assert list(found.index) == ["old", "new"]
    np.testing.assert_allclose(found["mean"], typical)
    # Two independent medians of 2,000, and the tolerance of a tenth of an error: 4.2 errors are 3 joint ones.
    assert np.all(np.abs(found.adjusted - truth) <= 3 * np.sqrt(2) * found.simulation_error)
    assert np.all(np.abs(typical - truth) > 4 * found.simulation_error)  # stopping made the difference larger


@pytest.mark.slow
def test_where_few_means_are_possible_the_search_ends_where_the_median_jumps(recwarn):
    design, settings = Design([20], stopping=stopping.superiority(0.95)), {"engine": bernoulli_engine(2)}
    found = adjusted_estimates(bernoulli_model(2), design, [0.45, 0.52], num_trials=400, **settings)
    around = [found.adjusted.values + move * np.array([0.0, 0.01]) for move in (-1, 1)]  # of the second arm
    table = operating_characteristics(
        bernoulli_model(2), design, {"low": around[0], "high": around[1]}, num_trials=400, **settings
    )
    means = np.nanmedian((table.dataset.sums / table.dataset.outcomes)[..., 1], axis=1)
    assert means[0] < 0.52 < means[1] and not recwarn.list


def test_estimates_that_cannot_be_adjusted_are_refused_in_words():
    def same(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate + 0.0 * arm))

    with pytest.raises(ValueError, match="one latent per arm and no context.*report the confidence sequence"):
        adjusted_estimates(RewardModel(same, 2), DESIGN, [0.4, 0.5])
    with pytest.raises(ValueError, match="means are .*1.5.*cannot be these"):
        adjusted_estimates(bernoulli_model(2), DESIGN, [0.4, 1.5])
    with pytest.raises(ValueError, match="maximises the mean of its only outcome"):
        adjusted_estimates(RewardModel(priced, 2), DESIGN, [0.4, 0.5])
    with pytest.raises(ValueError, match="means must be 2 finite numbers"):
        adjusted_estimates(bernoulli_model(2), DESIGN, [0.4, np.nan])


@pytest.mark.slow
def test_a_table_over_priors_has_a_row_for_each_prior_and_scenario():
    def doubtful(arm):
        with numpyro.plate("arms", 2):
            rate = numpyro.sample("rate", dist.Beta(50.0, 50.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    models = {"flat": bernoulli_model(2), "doubtful": RewardModel(doubtful, 2)}
    table = sweep_priors(models, DESIGN, {"null": 0.5, "better": [0.4, 0.6]}, num_trials=200)
    assert list(table.index) == [(prior, name) for prior in models for name in ("null", "better")]
    assert table.loc[("doubtful", "null"), "type_i_error"] < table.loc[("flat", "null"), "type_i_error"]
    with pytest.raises(ValueError, match="models must be {name: RewardModel}"):
        sweep_priors(bernoulli_model(2), DESIGN, {"null": 0.5})


def test_a_reward_that_is_not_the_outcome_has_no_figures_of_confidence_sequences():
    settings = {"scenarios": {"t": [0.3, 0.5]}, "num_trials": 8}
    table = operating_characteristics(RewardModel(priced, 2), Design([20]), **settings).table()
    assert not [name for name in table if name.startswith("sequence_")] and abs(table.bias["t"]) < 10.0
