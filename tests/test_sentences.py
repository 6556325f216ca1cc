"""What the library prints is understood at first reading: the conclusion first, then the remedy, and measures on request."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, NotConjugate, RewardModel, engines, selectors
from ppl_bandit.commands.cli import main

PRIVATE_WORDS = ("silent arm", "ladder", "rival", "log can carry", " moves ")


def logistic(arm):
    with numpyro.plate("arms", 2):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        tilt = numpyro.sample("tilt", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(logits=level[arm] + tilt[arm] ** 3))


@pytest.fixture(scope="module")
def explained():
    bandit = Bandit(logistic, num_arms=2, num_samples=50)
    return bandit.explain(), bandit.explain(details=True)


def test_a_program_without_closed_form_says_so_before_what_was_tried(explained):
    short, long = explained
    assert short.startswith("logistic: APPROXIMATE (reweight).")
    assert "it has no closed-form posterior: the likelihood of reward" in short
    assert "it is approximate: no closed form was found, even with up to 3 sites sampled" in short
    assert short.endswith("`explain(details=True)` adds the measures, and what was tried")
    assert "tried: " not in short and " nats" not in short
    assert "sets of at most 16 dimensions were tried: " in long and " nats" in long


def test_no_private_word_is_printed(explained):
    for text in explained:
        assert not [word for word in PRIVATE_WORDS if word in text]


def test_a_refusal_ends_with_its_details():
    with pytest.raises(NotConjugate) as caught:
        engines.conjugate(RewardModel(logistic, 2))
    conclusion, remedy, details = (str(caught.value).index(part) for part in ("no closed-form", "; ", "(details: "))
    assert conclusion < remedy < details
    assert " nats" not in caught.value.explanation.reason


def test_check_prints_the_conclusion_without_measures(capsys):
    assert main(["check", "logistic"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "has no closed-form posterior" in line and " nats" not in line


def test_a_verdict_says_whether_the_data_support_it(warm_starts):
    def rates(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    bandit = Bandit(rates, num_arms=2, selector=selectors.fixed(), num_samples=50)
    rng = np.random.default_rng(0)
    for decision in bandit.select_many(num_decisions=200):
        bandit.update(decision, float(rng.random() < (0.2, 0.6)[decision.arm]))
    answer, support = bandit.evaluate((1, 0)).verdict.splitlines()
    assert answer.startswith("1 beats 0 by") and "95% interval" in answer
    assert support.startswith("The data support this: the effective sample size is")


def test_an_arm_whose_outcome_teaches_nothing_is_named_with_the_remedy():
    def hidden(arm):
        value = numpyro.sample("value", dist.Normal(0.0, 1.0).expand([2]))
        numpyro.sample("reward", dist.Normal(0.0, 1.0))
        numpyro.deterministic("expected_reward", value[arm])

    with pytest.warns(UserWarning, match="does not depend on any latent.*leave such arms out with allowed="):
        Bandit(hidden, num_arms=2, engine=engines.reweight, num_samples=50)
