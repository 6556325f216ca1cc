"""Outcomes that are reported one at a time: a sale, the spend of a buyer, and whether it was returned."""

import functools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, Journal, RewardModel, engines, evaluate, selectors
from ppl_bandit.journal.replay import replay
from ppl_bandit.posterior.task import why_not_in_part
from ppl_bandit.program.outcomes import separable_outcomes

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


SELECTOR = selectors.with_floor(selectors.thompson(), 0.2)  # shared, so that bandits share its compiled functions


@functools.cache
def model():
    return RewardModel(shop, 2, outcomes=OUTCOMES)


def make(**settings):
    return Bandit(model(), num_samples=50, selector=SELECTOR, **settings)


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


@pytest.mark.slow
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
    log = bandit.logged_decisions()  # an outcome that the program masks counts as 0, unless it was reported
    assert log.outcomes["spend"].tolist() == [4.0, 0.0]


@pytest.mark.slow
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


@pytest.mark.slow
def test_each_outcome_is_learnt_as_soon_as_its_own_factor_is_known():
    bandit = make()
    first, second, third, fourth = bandit.select_many(num_decisions=4)
    bandit.update(first, {"sale": 1, "spend": 2.0, "returned": 0})
    bandit.update(second, {"sale": 1})
    rows = [(first.arm, 1, 2.0, 0), (second.arm, 1, None, None)]
    assert_posterior(bandit, rows)
    assert bandit.explanation.is_exact and bandit.num_rewards == 2
    table = bandit.pending().set_index("decision")
    assert table.loc[second.id, "learnt"] == "sale" and table.loc[second.id, "waiting_for"] == "spend, returned"
    bandit.update(second, {"returned": 1})
    assert_posterior(bandit, [rows[0], (second.arm, 1, None, 1)])
    bandit.update(second, {"spend": 5.0})
    rows[1] = (second.arm, 1, 5.0, 1)
    assert_posterior(bandit, rows)
    bandit.update(third, {"spend": 4.0})  # its density depends on the sale, which is not known
    assert_posterior(bandit, rows)
    assert bandit.pending().set_index("decision").loc[third.id, "waiting_for"] == "sale, returned"
    bandit.update(third, {"sale": 1})
    assert_posterior(bandit, [*rows, (third.arm, 1, 4.0, None)])
    bandit.update(third, {"sale": 0}, correct=True)  # the return does not matter any more
    rows.append((third.arm, 0, None, None))
    assert_posterior(bandit, rows)
    bandit.update(fourth, {"sale": 1})
    bandit.discard(fourth)  # no further outcome: the sale stays
    assert_posterior(bandit, [*rows, (fourth.arm, 1, None, None)])
    assert len(bandit.pending()) == 0 and bandit.num_rewards == 4
    bandit.discard(fourth, correct=True)
    bandit.update(fourth, {"sale": 1, "spend": 1.0, "returned": 0}, correct=True)
    assert_posterior(bandit, [*rows, (fourth.arm, 1, 1.0, 0)])


@pytest.mark.slow
def test_later_rewards_in_part_compile_nothing(count_compilations):
    bandit = make()
    decisions = bandit.select_many(num_decisions=8)

    def report(decision, spend):
        bandit.update(decision, {"sale": 1})
        bandit.update(decision, {"returned": 0})
        bandit.update(decision, {"spend": spend})
        bandit.select()

    report(decisions[0], 3.0)
    with count_compilations() as compiled:
        for i, decision in enumerate(decisions[1:]):
            report(decision, 3.0 + 0.1 * i)
    assert compiled == []


@pytest.mark.slow
def test_rewards_in_part_survive_a_crash_a_file_and_a_replay(tmp_path):
    path = tmp_path / "journal.db"
    bandit = make(journal=path)
    first, second = bandit.select_many(num_decisions=2)
    bandit.update(first, {"sale": 1})
    bandit.update(second, {"sale": 1, "spend": 2.0})
    third = bandit.select()
    bandit.update(first, {"spend": 4.0})
    rows = [(first.arm, 1, 4.0, None), (second.arm, 1, 2.0, None)]
    bandit.save(tmp_path / "bandit.bin")
    del bandit  # nothing is flushed at the end: what a killed process leaves
    again = make(journal=path)
    assert_posterior(again, rows)
    again.update(second.id, {"returned": 1})
    again.update(third.id, {"sale": 1})
    rows = [rows[0], (second.arm, 1, 2.0, 1), (third.arm, 1, None, None)]
    assert_posterior(again, rows)
    again.close()
    again, read = make(journal=path), []
    load = again._experiment.history._load
    again._experiment.history._load = lambda: read.append(True) or load()
    again.update(third.id, {"spend": 1.0})  # a row from before the checkpoint, which is not read for it
    rows[2] = (third.arm, 1, 1.0, None)
    assert_posterior(again, rows)
    assert not read and again._experiment.history.rows()[1]["spend"].tolist() == [4.0, 2.0, 1.0] and read
    again.select()
    projection = make(journal=tmp_path / "other.db")._experiment.projection
    replayed = replay(again._experiment.store, "default", 0, projection.task, projection.prior, again._build)
    assert replayed.position is None and replayed.num_checked == 4
    loaded = Bandit.load(tmp_path / "bandit.bin", model())
    loaded.update(second.id, {"returned": 1})
    assert_posterior(loaded, rows[:2])
    log = again.logged_decisions()  # decisions that wait for an outcome are left out
    assert log.outcomes["sale"].tolist() == [1.0] and log.num_unrewarded == 3
    assert evaluate(Journal(path), second.arm, outcome="sale", model=model()).is_refused  # a single reward


def test_an_outcome_waits_for_those_that_its_density_depends_on():
    assert separable_outcomes(model(), frozenset({"sale", "returned"})) == ("sale", "returned")
    assert separable_outcomes(model(), frozenset({"spend", "returned"})) == ()

    def churn(arm):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 40.0).expand([2]))
        days = numpyro.sample("days", dist.Exponential(0.1 + 0.0 * arm))
        numpyro.sample("left", dist.Poisson(rate[arm] * days))
        numpyro.deterministic("expected_reward", rate[arm])

    censored = RewardModel(churn, 2, outcomes=("days", "left"))
    assert separable_outcomes(censored, frozenset({"days"})) == ()  # it tells about no latent


@pytest.mark.slow
def test_an_engine_that_cannot_learn_in_part_waits_and_says_why():
    bandit = make(engine=functools.partial(engines.conjugate, discount=0.9))
    decision = bandit.select()
    assert bandit.update(decision, {"sale": 1}) is None and bandit.num_rewards == 0
    assert "the engine discounts old rewards" in bandit.pending().attrs["note"]
    task = bandit._experiment.projection.task
    with jax.enable_x64(True):
        approximate = engines.svi(model())
    own = task._replace(factory=lambda model: engines.svi(model))
    assert why_not_in_part(own, approximate) == "the engine is not one of this library's"
    factory = functools.partial(engines.svi, guide="mvn")
    assert why_not_in_part(task._replace(factory=factory), approximate) == ""


@pytest.mark.slow
def test_an_approximate_engine_learns_in_part():
    bandit = make(engine=engines.reweight)
    rng, rows = np.random.default_rng(1), []
    for decision in bandit.select_many(num_decisions=12):
        sale, spend, returned = int(rng.random() < 0.7), float(rng.normal(3.0, 0.5)), int(rng.random() < 0.3)
        rows.append((decision.arm, sale, spend, returned))
        bandit.update(decision, {"sale": sale})
        if sale:
            bandit.update(decision, {"spend": spend})
            bandit.update(decision, {"returned": returned})
    assert len(bandit.pending()) == 0 and bandit.num_rewards == 12
    sales, mean, returns = posterior(rows)
    draws = bandit.posterior(4000)
    for site, counts in (("rate", sales), ("back", returns)):
        right = counts[:, 0] / counts.sum(axis=1)
        sd = np.sqrt(right * (1.0 - right) / (counts.sum(axis=1) + 1.0))
        # At least 400 effective draws: 4 standard errors are .2 sd.
        assert np.all(np.abs(draws[site].mean(axis=0) - right) < 0.2 * sd)
    precision = 1.0 + 4.0 * np.array([sum(arm == own and sale for own, sale, _, _ in rows) for arm in range(2)])
    assert np.all(np.abs(draws["amount"].mean(axis=0) - mean) < 0.2 / np.sqrt(precision))


def spread_shop(arm):
    spread = numpyro.sample("spread", dist.Gamma(4.0, 4.0))
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        amount = numpyro.sample("amount", dist.Normal(3.0, 1.0))
    sale = numpyro.sample("sale", dist.Bernoulli(rate[arm]))
    numpyro.sample("spend", dist.Normal(amount[arm], spread).mask(sale == 1))
    numpyro.deterministic("expected_reward", rate[arm] * amount[arm])


def spread_posterior(spends):
    """Quadrature over the spread: its posterior mean and variance, and those of each arm's amount."""
    grid = np.linspace(1e-3, 8.0, 8001)
    log_density = 3.0 * np.log(grid) - 4.0 * grid
    means, variances = [], []
    for own in map(np.array, spends):
        precision = 1.0 + own.size / grid**2
        means.append((3.0 + own.sum() / grid**2) / precision)
        variances.append(1.0 / precision)
        # log p(own | spread), the amount integrated out, by its value at the amount's conditional mean
        errors = ((own[:, None] - means[-1]) ** 2).sum(axis=0)
        log_density += -own.size * np.log(grid) - 0.5 * (errors / grid**2 + (means[-1] - 3.0) ** 2 + np.log(precision))
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    found = []
    for mean, variance in [(grid, 0.0 * grid), *zip(means, variances, strict=True)]:
        middle = weights @ mean
        found.append((middle, weights @ (variance + (mean - middle) ** 2)))
    return np.array(found)


@pytest.mark.slow
def test_the_collapsed_engine_learns_in_part_and_equals_quadrature():
    engine = functools.partial(engines.collapsed, outer=("spread",))
    bandit = Bandit(spread_shop, 2, outcomes=("sale", "spend"), num_samples=50, selector=SELECTOR, engine=engine)
    assert bandit.explanation.engine == "collapsed"
    rng, spends, sales = np.random.default_rng(2), ([], []), np.ones((2, 2))
    decisions = [bandit.select() for _ in range(12)]
    for decision in decisions:
        sale = int(rng.random() < 0.7)
        bandit.update(decision, {"sale": sale})
        sales[decision.arm, 1 - sale] += 1
        if sale and rng.random() < 0.8:  # the others stay without a spend
            spends[decision.arm].append(rng.normal(3.0 + decision.arm, 0.6))
            bandit.update(decision, {"spend": spends[decision.arm][-1]})
    assert bandit.explanation.engine == "collapsed" and bandit.num_rewards == 12
    assert 0 < len(bandit.pending()) < 12 and "note" not in bandit.pending().attrs
    draws = bandit.posterior(4000)
    found = np.column_stack([draws["spread"], draws["amount"]])
    right = spread_posterior(spends)
    # At least 500 effective particles, half of 1,000: 4 standard errors of a mean are .18 sd.
    assert np.all(np.abs(found.mean(axis=0) - right[:, 0]) < 0.18 * np.sqrt(right[:, 1]))
    rates = sales[:, 0] / sales.sum(axis=1)
    sd = np.sqrt(rates * (1.0 - rates) / (sales.sum(axis=1) + 1.0))
    assert np.all(
        np.abs(draws["rate"].mean(axis=0) - rates) < 4.0 * sd / np.sqrt(4000.0)
    )  # exact and independent draws
