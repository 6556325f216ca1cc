"""What the library prints is understood at first reading: the conclusion first, then the remedy, and measures on request."""

from typing import NamedTuple

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest
from shared_models import bernoulli_engine, bernoulli_model

from ppl_bandit import Bandit, NotConjugate, RewardModel, engines, evaluate, selectors
from ppl_bandit.engines.checks import checks_text
from ppl_bandit.engines.explanation import explain_approximate
from ppl_bandit.live.looks import LookVerdict, _words as verdict_words
from ppl_bandit.live.overview import Overview
from ppl_bandit.live.rendering import explanation_text
from ppl_bandit.live.report import evidence_text
from ppl_bandit.posterior.fallback import _doubts
from ppl_bandit.program.outcomes import uninformative_arms_note
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.stopping import expected_loss, superiority
from ppl_bandit.types import DETAILS, Explanation, with_remedy, without_details

OVERVIEW = Overview(["a"], np.zeros(1, int), *np.zeros((6, 1)), draws=np.zeros((1, 1)), num_contexts=0)
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
    report = f"f: NOT EXACT.\n  reason: it is approximate\n{DETAILS}residual 2\n    nats\n  more: no"
    shown = [
        explanation_text(
            Explanation("reweight", False, "", {}, report), OVERVIEW, selectors.thompson(), details=details
        )
        for details in (False, True)
    ]
    assert "nats" not in shown[0] and shown[0].endswith("`explain(details=True)` adds the measures, and what was tried")
    assert "  details: residual 2\n    nats\n  more: no" in shown[1] and "details=True" not in shown[1]


MEASURES = (" nats", "k-hat", "real-analytic", "residual", "affine", "sufficient statistics", "autocorrelation")


def test_measures_are_left_to_the_details():
    exact = bernoulli_engine(2).explanation
    facts = {
        "approximated": "the posterior",
        "checks": checks_text(("k_hat", "path_autocorrelation")),
        "not seen": "far modes",
    }
    drawn = explain_approximate(bernoulli_model(2), "reweight", "draws are weighted", "1000 draws", 1.0, facts)
    for explanation in (exact, drawn):
        assert not [word for word in MEASURES if word in explanation.summary]
        assert explanation.summary.endswith("`explain(details=True)` adds the measures, and what was tried")
        assert "  checked: " in explanation.summary
    assert all(word in str(exact) for word in MEASURES[:1] + MEASURES[2:6])
    assert "Pareto k-hat of the weights, at most 0.7" in str(drawn)


def test_draws_that_are_not_trusted_are_told_with_the_consequence_and_the_remedy():
    class Info(NamedTuple):
        def failed_checks(self):
            return ["Pareto k-hat of the weights is 0.83 and must be at most 0.7"]

    text = _doubts("nuts", Info())
    assert text.startswith(
        "the draws of the nuts engine are not trusted: intervals and P(best) may be wrong (details: Pareto"
    )
    doubts = with_remedy(text, "try another prior")
    assert doubts.index("may be wrong") < doubts.index("; try another prior") < doubts.index("(details: ")
    shown = evidence_text("f", Explanation("nuts", False, "", {}), OVERVIEW, doubts)
    assert shown.endswith("NOT TRUSTED: " + without_details(doubts)) and "k-hat" not in shown


def test_a_verdict_of_a_look_says_what_each_rule_compares():
    design = Design((100, 200), stopping=(superiority(0.99), expected_loss(0.01)))
    arms = {"dropped": [], "active": ["a", "b"], "control": None, "best_arm_probs": {"a": 0.973, "b": 0.027}}
    evidence = {"superiority": 0.973, "expected_loss": 0.02}
    counts = {"num_decisions": 100, "num_rewards": 100, "num_pending": 0, "next_look": 200}
    rest = {"arm": None, "evidence": evidence, "allocation": None, "verdict": ""}
    looked = LookVerdict(look=1, is_due=True, ending="continue", **arms, **counts, **rest)
    lines = verdict_words(looked, design, 0).splitlines()
    assert lines[0] == "Continue after look 1 of 2 (100 decisions, 100 rewards); the next look is at 200 decisions."
    assert lines[2] == "The largest probability that an arm is best is 0.973, and 0.99 or more stops."
    assert lines[3] == "The expected loss of the best choice is 0.02, and 0.01 or less stops."


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
