"""Errors have classes that a caller can tell apart, and arguments are checked before any work begins."""

import pickle

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from shared_models import bernoulli_bandit, bernoulli_model, prior_engine

import ppl_bandit as pb
from ppl_bandit import Bandit, Design, Journal, RewardModel, evaluate, selectors, stopping
from ppl_bandit.evaluation import evaluate as evaluate_module
from ppl_bandit.journal.audit import decision_details


def clicks(arm, *, num_arms):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([num_arms]))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def visits(arm, context):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Normal(slope[arm] * context["age"] + context["site"].sum(-1), 1.0))


EXAMPLE = {"age": 1.0, "site": np.zeros(2)}
CLASSES = ["UnknownDecision", "AlreadyRewarded", "UnknownArm", "InvalidContext", "ExperimentStopped"]


@pytest.fixture(scope="module")
def bandit():
    return bernoulli_bandit(2)


@pytest.fixture(scope="module")
def contextual():
    return Bandit(visits, 2, context=EXAMPLE, engine=prior_engine, num_samples=20)


def test_every_class_is_a_bandit_error_and_a_value_error_and_is_pickled_whole():
    for name in [*CLASSES, "InvalidProgram", "NotConjugate", "NotCertified"]:
        assert issubclass(getattr(pb, name), pb.BanditError) and issubclass(getattr(pb, name), ValueError)
    error = pickle.loads(pickle.dumps(pb.InvalidContext("context['age'] is wrong", "['age']")))
    assert str(error) == "context['age'] is wrong" and error.entry == "['age']"


def test_a_decision_that_does_not_exist_or_has_its_reward(bandit):
    for call in (
        lambda: bandit.update("no such", 1.0),
        lambda: bandit.update_many(decisions=["no such"], rewards=[1.0]),
        lambda: bandit.discard("no such"),
    ):
        with pytest.raises(pb.UnknownDecision, match="'no such' was not made by this bandit"):
            call()
    decision = bandit.select()
    bandit.update(decision, 1.0)
    for call in (
        lambda: bandit.update(decision, 0.0),
        lambda: bandit.update_many(decisions=[decision], rewards=[0.0]),
        lambda: bandit.discard(decision),
    ):
        with pytest.raises(pb.AlreadyRewarded, match="pass correct=True"):
            call()


def test_a_journal_names_an_unknown_decision(tmp_path):
    with Journal(tmp_path / "e.db") as journal:
        bernoulli_bandit(2, journal=journal)
        with pytest.raises(pb.UnknownDecision, match="has no decision 'x'"):
            decision_details(journal.store, "default", "x")


def test_an_arm_that_does_not_exist(bandit):
    log = pd.DataFrame({"arm": [0, 1] * 10, "reward": [0.0, 1.0] * 10, "propensity": 0.5})
    for call in (
        lambda: bandit.update(arm=2, reward=1.0),
        lambda: bandit.update_many(arms=[0, 2], rewards=[1.0, 1.0]),
        lambda: bandit.update_many(arms=["a"], rewards=[1.0]),
        lambda: bandit.select(allowed=[5]),
        lambda: bandit.retire_arm("a"),
        lambda: evaluate(log, 5),
        lambda: evaluate(log, (0, 5)),
        lambda: evaluate(log, {5: 1.0}),
    ):
        with pytest.raises(pb.UnknownArm):
            call()


CONTEXTS = {
    "none": (None, "", "context is missing"),
    "an absent entry": ({"site": np.zeros(2)}, "['age']", r"context has no entry \['age'\]"),
    "an unknown entry": (EXAMPLE | {"sex": 1.0}, "['sex']", r"context has the unknown entry \['sex'\]"),
    "a wrong shape": (EXAMPLE | {"site": np.zeros(3)}, "['site']", r"context\['site'\] has shape \(3,\), expected"),
    "text": (EXAMPLE | {"age": "old"}, "['age']", r"context\['age'\] has dtype"),
    "not finite": (EXAMPLE | {"age": np.nan}, "['age']", r"context\['age'\] holds nan"),
    "masked": (
        EXAMPLE | {"age": np.ma.masked_array(1.0, mask=True)},
        "['age']",
        r"context\['age'\] is a masked array",
    ),
    "a list for a number": (EXAMPLE | {"age": [1.0]}, "['age']", r"context\['age'\] has shape \(1,\), expected \(\)"),
    "ragged": (EXAMPLE | {"site": [[1.0], [1.0, 2.0]]}, "['site']", r"context\['site'\] holds"),
    "beyond 2**53": (EXAMPLE | {"age": 2**60}, "['age']", r"context\['age'\] holds .* not exact"),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_a_wrong_context_names_its_entry(contextual, case):
    context, entry, words = CONTEXTS[case]
    for call in (
        lambda: contextual.select(context),
        lambda: contextual.update(arm=0, reward=1.0, context=context),
        lambda: contextual.expected_rewards(context),
    ):
        with pytest.raises(pb.InvalidContext, match=words) as raised:
            call()
        assert raised.value.entry == entry


def test_a_frame_of_contexts_names_its_column(contextual):
    with pytest.raises(pb.InvalidContext, match="no column 'site_1'"):
        contextual.select_many(pd.DataFrame({"age": [1.0], "site_0": [1.0]}))
    with pytest.raises(pb.InvalidContext, match="row 0, column 'age'") as raised:
        contextual.select_many(pd.DataFrame({"age": ["x"], "site_0": [1.0], "site_1": [1.0]}))
    assert raised.value.entry == "age"


def test_a_stopped_experiment_says_so():
    design = Design([2, 4], selector=selectors.fixed(), stopping=[stopping.superiority(0.99)])
    bandit = bernoulli_bandit(2, design=design)
    with pytest.raises(ValueError, match="are left: ask for at most 2"):
        bandit.select_many(num_decisions=5)
    for _ in range(2):
        bandit.look()
        for decision in bandit.select_many(num_decisions=2):
            bandit.update(decision, 1.0)
    with pytest.raises(pb.ExperimentStopped, match="0 are left: call look"):
        bandit.select()


@pytest.mark.slow
def test_a_program_takes_num_arms_in_a_reward_model_too():
    model = RewardModel(clicks, 3)
    assert model.latent_shapes == {"rate": (3,)} and repr(model).startswith("RewardModel(clicks, num_arms=3")
    bandit = Bandit(model, num_samples=20)
    bandit.add_arm()
    assert len(bandit.select().propensities) == 4


@pytest.fixture
def no_work(monkeypatch):
    """Fail as soon as anything costly begins."""

    def refuse(*args, **kwargs):
        raise AssertionError("work began before the arguments were checked")

    monkeypatch.setattr(evaluate_module, "follow_posterior", refuse)
    monkeypatch.setattr(evaluate_module, "engine_of", refuse)
    monkeypatch.setattr(Bandit, "_overview", refuse)


@pytest.mark.parametrize("more", [(-3,), (0,), (1.5,), (True,), ("100",), "100", 2.5, [10, None]])
def test_a_report_checks_its_arguments_first(bandit, no_work, more):
    with pytest.raises(ValueError, match="more must be"):
        bandit.report(more=more)


EVALUATIONS = {
    "an unknown arm": (("zz",), {}, "target names the arm 'zz'"),
    "an unknown arm in a pair": (((0, "zz"),), {}, "target names the arm 'zz'"),
    "a share of an unknown arm": (({"zz": 1.0},), {}, "target names the arms"),
    "shares that do not add up": (({0: 0.3},), {}, "add up to 1"),
    "an unknown baseline": ((0,), {"baseline": "zz"}, "baseline names the arm 'zz'"),
    "a baseline beside a pair": (((0, 1),), {"baseline": 1}, "baseline was given with a pair"),
    "a level": ((0,), {"level": 95}, "level must lie strictly inside"),
    "a level as text": ((0,), {"level": "95%"}, "level must lie strictly inside"),
    "bounds in the wrong order": ((0,), {"bounds": (1.0, 0.0)}, "bounds must be"),
    "bounds that a reward exceeds": ((0,), {"bounds": (0.0, 0.5)}, "row 1 has the reward 1"),
    "a baseline for a selector": ((selectors.thompson(),), {"baseline": "zz"}, "baseline names the arm 'zz'"),
}


@pytest.mark.parametrize("case", EVALUATIONS)
def test_an_evaluation_checks_its_arguments_first(no_work, case):
    arguments, settings, words = EVALUATIONS[case]
    log = pd.DataFrame({"arm": [0, 1] * 10, "reward": [0.0, 1.0] * 10, "propensity": 0.5})
    with pytest.raises(ValueError, match=words):
        evaluate(log, *arguments, model=bernoulli_model(2), **settings)


@pytest.mark.slow
def test_an_arm_that_another_process_adds_during_a_decision_is_not_played_by_it(tmp_path, monkeypatch):
    def make():
        return Bandit(clicks, 2, num_samples=20, journal=tmp_path / "e.db")

    first, second = make(), make()
    second.add_arm()
    second.select()
    with monkeypatch.context() as patched:
        patched.setattr(first._experiment, "catch_up", lambda wait=True: first._experiment.projection)
        decision = first.select()
    assert decision.arm in (0, 1) and len(decision.propensities) == 2
    assert len(first.select().propensities) == 3
