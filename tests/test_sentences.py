"""What the library prints is understood at first reading: the conclusion first, then the remedy, and measures on request."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest

from ppl_bandit import Bandit, NotConjugate, RewardModel, engines, evaluate, selectors
from ppl_bandit.live.show.overview import Overview
from ppl_bandit.live.show.rendering import explanation_text
from ppl_bandit.program.outcomes import uninformative_arms_note
from ppl_bandit.types import DETAILS, Explanation

PRIVATE_WORDS = ("silent arm", "ladder", "rival", "log can carry", " moves ")


def logistic(arm):
    with numpyro.plate("arms", 2):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        tilt = numpyro.sample("tilt", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(logits=level[arm] + tilt[arm] ** 3))


def halved(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm] / 2))


@pytest.fixture(scope="module")
def explained():
    bandit = Bandit(logistic, num_arms=2, num_samples=50)
    return bandit.explain(), bandit.explain(details=True)


@pytest.mark.slow  # below, the same with an explanation that is written by hand
def test_a_program_without_closed_form_says_so_before_what_was_tried(explained):
    short, long = explained
    assert short.startswith("logistic: APPROXIMATE (reweight).")
    assert "it cannot be proved conjugate: real latents reach the logits of 'reward' (Bernoulli)" in short
    assert "it is approximate: no closed form was found, even with up to 3 sites sampled" in short
    assert short.endswith("`explain(details=True)` adds the measures, and what was tried")
    assert "tried: " not in short and " nats" not in short
    assert "sets of at most 16 dimensions were tried: " in long


@pytest.mark.slow
def test_no_private_word_is_printed(explained):
    for text in explained:
        assert not [word for word in PRIVATE_WORDS if word in text]


def test_details_are_shown_on_request():
    report = f"f: NOT EXACT.\n  reason: it is approximate\n{DETAILS}residual 2 nats\n  more: no"
    found = Overview(["a"], np.zeros(1, int), *np.zeros((6, 1)), draws=np.zeros((1, 1)), num_contexts=0)
    shown = [
        explanation_text(Explanation("reweight", False, "", {}, report), found, selectors.thompson(), details=details)
        for details in (False, True)
    ]
    assert "nats" not in shown[0] and shown[0].endswith("`explain(details=True)` adds the measures, and what was tried")
    assert "  details: residual 2 nats\n  more: no" in shown[1] and "details=True" not in shown[1]


def test_a_refusal_ends_with_its_details():
    with pytest.raises(NotConjugate) as caught:
        engines.conjugate(RewardModel(halved, 2))
    conclusion, remedy, details = (str(caught.value).index(part) for part in ("no closed-form", "; ", "(details: "))
    assert conclusion < remedy < details
    assert " nats" not in caught.value.explanation.reason


def test_a_verdict_says_whether_the_data_support_it():
    rng = np.random.default_rng(0)
    arm = rng.integers(2, size=400)
    reward = (rng.random(400) < np.where(arm == 1, 0.6, 0.2)).astype(float)
    log = pandas.DataFrame({"arm": arm, "reward": reward, "propensity": 0.5})
    answer, support = evaluate(log, (1, 0)).verdict.splitlines()
    assert answer.startswith("1 beats 0 by") and "95% interval" in answer
    assert support.startswith("The data support this: the effective sample size is")


def test_an_arm_whose_outcome_teaches_nothing_is_named_with_the_remedy():
    note = uninformative_arms_note(["free"])
    assert note.startswith("the outcome of arm 'free' does not depend on any latent") and "leave such arms out" in note
    assert not [word for word in PRIVATE_WORDS if word in note]
