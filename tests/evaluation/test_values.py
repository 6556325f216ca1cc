"""What a row earned: the outcome, or a function of the outcomes, and the model's own word only where it means the same."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest

from ppl_bandit import RewardModel, evaluate
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.evaluation.targets import with_value

PRICE = np.array([10.0, 40.0])
RATES = np.array([0.5, 0.3])


def sales(arm):
    with numpyro.plate("prices", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("sale", dist.Bernoulli(rate[arm]))
    numpyro.deterministic("expected_reward", jnp.asarray(PRICE)[arm] * rate[arm])


def hurdle(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        mean = numpyro.sample("mean", dist.Gamma(5.0, 1.0))
    sale = numpyro.sample("sale", dist.Bernoulli(rate[arm]))
    numpyro.sample("spend", dist.Exponential(1.0 / mean[arm]).mask(sale == 1))
    numpyro.deterministic("expected_reward", rate[arm] * mean[arm])


@pytest.fixture(scope="module")
def model():
    return RewardModel(sales, 2, outcomes=("sale",))


@pytest.fixture(scope="module")
def log():
    rng = np.random.default_rng(0)
    arms = rng.integers(0, 2, 400)
    sold = (rng.random(400) < RATES[arms]).astype(float)
    return LoggedDecisions((0, 1), arms, sold, np.full(400, 0.5), np.full((400, 2), 0.5))


def revenue(sale, arm):
    return PRICE[arm] * sale


def test_a_program_that_maximises_another_quantity_needs_to_be_told_what_a_decision_earned(model, log):
    with pytest.raises(ValueError, match="maximises its own expected_reward.*value=.*outcome='sale'"):
        evaluate(log, 1, model=model)


def test_the_value_is_what_the_report_says_and_all_estimators_are_of_it(model, log):
    found = evaluate(log, (1, 0), model=model, value=revenue)
    truth = float((PRICE * RATES) @ [-1, 1])
    assert abs(found.estimate - truth) < 4 * found.standard_error and not found.cautions
    # The model's own word and its interval are of revenue too.
    assert abs(found.estimates["dm"].value - truth) < 4 * found.standard_error
    assert found.posterior[0] < truth < found.posterior[1]


def test_an_outcome_that_the_program_does_not_maximise_has_no_word_of_the_model(model, log):
    found = evaluate(log, (1, 0), model=model, outcome="sale")
    assert abs(found.estimate + 0.2) < 4 * found.standard_error
    assert found.posterior is None and "maximises another quantity" in found.verdict.splitlines()[1]
    assert abs(found.estimates["dm"].value + 0.2) < 0.2


def test_whether_a_program_maximises_a_value_is_found_by_simulation(log):
    both = RewardModel(hurdle, 2, outcomes=("sale", "spend"))
    given = log._replace(outcomes={"sale": log.reward, "spend": 7.0 * log.reward})
    assert with_value(given, both, None, "spend")[1]  # a masked outcome counts as 0
    assert with_value(given, both, lambda found: found["sale"] * found["spend"], None)[1]
    assert not with_value(given, both, None, "sale")[1]
    assert not with_value(given, both, lambda found: found["spend"] + found["sale"], None)[1]
    with pytest.raises(
        ValueError, match=r"\['sale', 'spend'\]: name the one to evaluate with outcome=, or give value="
    ):
        with_value(given, both, None, None)


def priced(arm, price):
    with numpyro.plate("prices", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("sale", dist.Bernoulli(rate[arm]))
    numpyro.deterministic("expected_reward", price * rate[arm])


def test_whether_a_program_maximises_a_value_is_judged_at_the_contexts_of_the_log(log):
    """At the example's price of 1 sales and revenue are the same; prices of .5 and 1.5 have the same mean."""
    model = RewardModel(priced, 2, outcomes=("sale",), context=1.0)
    prices = np.random.default_rng(1).choice([0.5, 1.5], 400)
    given = log._replace(contexts=prices, outcomes={"sale": log.reward})
    assert with_value(given, model, lambda sale, arm, context: context * sale, None)[1]
    assert not with_value(given, model, lambda sale: sale, None)[1]
    assert not with_value(given, model, None, "sale")[1]
    with pytest.raises(ValueError, match="maximises its own expected_reward"):
        with_value(given, model, None, None)
    same = given._replace(contexts=np.ones(400))
    assert with_value(same, model, None, None)[1]


def test_without_a_model_a_value_is_taken_as_it_is(log):
    frame = pandas.DataFrame({"arm": log.arm, "reward": log.reward, "propensity": 0.5})
    found = evaluate(frame, 1, value=lambda reward: 3.0 * reward)
    assert found.estimate == pytest.approx(3.0 * evaluate(frame, 1).estimate)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"value": revenue, "outcome": "sale"}, "both say what to evaluate"),
        ({"value": 3.0}, "must be a function of the outcomes"),
        ({"value": lambda sale: sale.sum()}, r"returned an array of shape \(\), expected \(400,\)"),
        ({"value": lambda sale: sale["sale"]}, "value= was called once with an array of 400 rows, and raised"),
        ({"value": lambda sale: sale / 0.0 * 0.0}, "returned nan for row"),
        ({"outcome": "spend"}, "outcome is 'spend', expected one of"),
    ],
)
def test_wrong_values_are_refused_in_words(model, log, settings, words):
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=words):
        evaluate(log, 1, model=model, **settings)
