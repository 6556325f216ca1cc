"""Outcomes that are reported one at a time: a sale, the spend of a buyer, and whether it was returned."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, selectors

OUTCOMES = ("sale", "spend", "returned")


def shop(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        amount = numpyro.sample("amount", dist.Normal(3.0, 1.0))
        back = numpyro.sample("back", dist.Beta(1.0, 4.0))
    sale = numpyro.sample("sale", dist.Bernoulli(rate[arm]))
    numpyro.sample("spend", dist.Normal(amount[arm], 0.5).mask(sale == 1))
    numpyro.sample("returned", dist.Bernoulli(back[arm]).mask(sale == 1))
    numpyro.deterministic("expected_reward", rate[arm] * amount[arm] * (1.0 - back[arm]))


def make(**settings):
    return Bandit(shop, 2, outcomes=OUTCOMES, num_samples=50, selector=selectors.thompson(), **settings)


def posterior(rows):
    """Closed form: {parameter: (2,)} from rows of (arm, sale, spend, returned), None where not known."""
    sales, spends, returns = np.ones((2, 2)), [[], []], np.array([[1.0, 4.0]] * 2)
    for arm, sale, spend, returned in rows:
        sales[arm, 1 - sale] += 1
        if sale and spend is not None:
            spends[arm].append(spend)
        if sale and returned is not None:
            returns[arm, 1 - returned] += 1
    precision = 1.0 + np.array([len(own) for own in spends]) / 0.25
    mean = (3.0 + np.array([sum(own) for own in spends]) / 0.25) / precision
    return sales, mean, returns


def assert_posterior(bandit, rows):
    found = bandit.posterior_parameters()
    sales, mean, returns = posterior(rows)
    for site, right in (("rate", sales), ("back", returns)):
        shown = np.stack([found[site]["concentration1"], found[site]["concentration0"]], axis=1)
        np.testing.assert_allclose(shown, right, rtol=1e-9)  # roundings of float64
    np.testing.assert_allclose(found["amount"]["mean"], mean, rtol=1e-9)


def test_no_sale_is_learnt_at_once_and_settles_the_decision(tmp_path):
    bandit = make(journal=tmp_path / "journal.db")
    first, second = bandit.select_many(num_decisions=2)
    bandit.update(first, {"sale": 0})
    rows = [(first.arm, 0, None, None)]
    assert_posterior(bandit, rows)
    assert bandit.pending()["decision"].tolist() == [second.id]
    assert bandit.update(first, {"sale": 0}) is None
    with pytest.raises(ValueError, match=r"give all of its outcomes that matter at once; \['spend', 'returned'\]"):
        bandit.update(first, {"sale": 1}, correct=True)
    bandit.update(first, {"sale": 1, "spend": 4.0, "returned": 0}, correct=True)
    assert_posterior(bandit, [(first.arm, 1, 4.0, 0)])
    bandit.update(first, {"sale": 0}, correct=True)
    assert_posterior(bandit, [(first.arm, 0, None, None)])
    bandit.update(second, {"sale": 0})
    assert_posterior(make(journal=tmp_path / "journal.db"), [(d.arm, 0, None, None) for d in (first, second)])
    log = bandit.logged_decisions("spend")  # an outcome that the program masks counts as 0, unless it was reported
    assert log.reward.tolist() == [4.0, 0.0]


def test_batches_and_corrections_keep_each_outcome_whatever_the_order_of_the_names():
    bandit = make()
    rng = np.random.default_rng(0)
    arms, sales, spends, returns = (
        rng.integers(0, 2, 40),
        rng.integers(0, 2, 40),
        rng.normal(3, 1, 40),
        rng.integers(0, 2, 40),
    )
    bandit.update_many(arms=arms, rewards={"sale": sales, "spend": spends, "returned": returns})
    assert_posterior(bandit, zip(arms, sales, spends, returns, strict=True))
