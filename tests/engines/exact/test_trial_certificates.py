"""Certificates of many trial rows: sums of rows in place of single ones."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import NotConjugate, RewardModel
from ppl_bandit.engines.proof import examination
from ppl_bandit.engines.proof.certificate import is_affine
from ppl_bandit.engines.proof.examination import examine, prove


@pytest.fixture(autouse=True)
def sums(monkeypatch):
    """Certify sums with few rows too: programs of more than 256 arms take longer to test."""
    monkeypatch.setattr(examination, "MAX_SINGLE_ROWS", 16)


def examine_in_float64(model):
    with jax.enable_x64(True):
        return examine(model, prove(model))


def test_sums_of_rows_certify_a_conjugate_program():
    def visits(arm):
        with numpyro.plate("arms", 3):
            rate = numpyro.sample("rate", dist.Beta(2.0, 3.0))
        numpyro.sample("reward", dist.Binomial(2, rate[arm]))

    prior, evidence = examine_in_float64(RewardModel(visits, 3))
    assert evidence.num_summed == 16 and evidence.num_rows == 24  # 8 rows of each arm
    assert is_affine(evidence.prior) and is_affine(evidence.likelihood)
    (group,) = prior.elements
    np.testing.assert_allclose(prior.elements[group], [[2.0, 3.0]] * 3)
    added = {rewards["reward"]: own[group].tolist() for rewards, own in evidence.examples}
    assert added == {count: [[count, 2.0 - count], [0.0, 0.0], [0.0, 0.0]] for count in (0.0, 1.0, 2.0)}


def test_one_arm_that_is_not_conjugate_is_found_in_the_sums_and_named():
    def visits(arm):
        with numpyro.plate("arms", 3):
            rate = numpyro.sample("rate", dist.Beta(2.0, 3.0))
        power = jnp.array([1.0, 1.0, 2.0])[arm]
        numpyro.sample("reward", dist.Bernoulli(rate[arm] ** power))

    with pytest.raises(NotConjugate, match="reward 0 on arm 2"):
        examine_in_float64(RewardModel(visits, 3))
