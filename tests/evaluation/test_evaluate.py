"""`evaluate` on bandits, journals and DataFrames: the same answer, refusals in words, bad input refused."""

import sqlite3

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest
from shared_models import FLOORED, bernoulli_bandit, bernoulli_engine, bernoulli_model, bernoulli_parts

from ppl_bandit import Bandit, Journal, JournalError, RewardModel, evaluate, evaluate_arms, selectors
from ppl_bandit.display.figure_style import figure_tools
from ppl_bandit.evaluation.evaluation import evaluate_decisions
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.evaluation.posterior_path import follow_posterior

RATES = {"control": 0.1, "low": 0.15, "high": 0.35}


def linear(arm, context):
    weight = numpyro.sample("weight", dist.Normal(np.zeros((2, 2)), 1.0).to_event(2))
    numpyro.sample("reward", dist.Normal((weight[arm] * context).sum(-1), 0.5))


def frame(num_rows=600, seed=0):
    rng = np.random.default_rng(seed)
    arms = rng.choice(list(RATES), num_rows)
    return pandas.DataFrame(
        {
            "arm": arms,
            "reward": [float(rng.random() < RATES[arm]) for arm in arms],
            "propensity": 1 / 3,
            **{f"propensity_{name}": 1 / 3 for name in RATES},
        }
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A bandit with a journal: 300 decisions, one of them pending, one discarded, one corrected, two imported plays."""
    path = tmp_path_factory.mktemp("evaluation") / "journal.db"
    bandit = bernoulli_bandit(arms=list(RATES), selector=FLOORED, journal=path)
    rng = np.random.default_rng(0)
    for number in range(300):
        decision = bandit.select()
        if number == 10:
            bandit.discard(decision)
        elif number != 20:
            bandit.update(decision, float(rng.random() < RATES[decision.arm]))
        if number == 30:
            bandit.update(decision, 1.0, correct=True)
    bandit.update_many(arms=["low", "high"], rewards=[0, 1])
    return bandit, path


def test_the_answer_is_the_same_from_a_bandit_a_journal_and_a_frame(played):
    bandit, path = played
    found = bandit.evaluate(("high", "control"))
    assert found.diagnostics["num_decisions"] == 300
    assert found.diagnostics["share_of_unrewarded_decisions"] == pytest.approx(2 / 300)
    assert found.diagnostics["num_without_propensity"] == 2
    log = bandit.logged_decisions()
    with Journal(path) as journal:
        again = evaluate(journal, ("high", "control"), model=bandit.model)
    columns = {f"propensity_{name}": log.propensities[:, index] for index, name in enumerate(log.names)}
    names = np.array(log.names)[log.arm]
    table = pandas.DataFrame({"arm": names, "reward": log.reward, "propensity": log.propensity, **columns})
    third = evaluate(table, ("high", "control"), model=bandit.model)
    assert again.table().equals(found.table())
    # A frame's arms are sorted by name, so that draws of the outcome model differ.
    assert third.estimate == pytest.approx(found.estimate, abs=found.standard_error / 4)
    assert found.verdict.startswith("high beats control by") or "No difference" in found.verdict
    assert found.posterior[0] < found.estimate < found.posterior[1]


def test_an_edited_journal_is_refused_before_anything_is_estimated(played, tmp_path):
    _, path = played
    copy = tmp_path / "edited.db"
    source, target = sqlite3.connect(path), sqlite3.connect(copy)
    source.backup(target)
    source.close()
    target.execute("update ppl_bandit_events set time = time + 1 where position = 5")
    target.commit()
    target.close()
    with Journal(copy) as journal, pytest.raises(JournalError, match="position 5"):
        evaluate(journal, "high")


def test_every_kind_of_target_is_near_the_truth():
    # Standard errors are part of the answer: four of them.
    log = frame(2000)
    for target, truth in (
        ("high", 0.35),
        (("high", "control"), 0.25),
        ({"control": 0.5, "high": 0.5}, 0.225),
    ):
        found = evaluate(log, target)
        assert abs(found.estimate - truth) < 4 * found.standard_error
        assert not found.is_refused and found.interval[0] < truth < found.interval[1]
        last = found.sequence.iloc[-1]
        assert last["lower"] < truth < last["upper"]
        assert list(found.table().index) == ["ips", "snips", "dm", "dr", "dr_stabilised"]
        assert np.isnan(found.table().loc["dm", ["standard_error", "lower", "upper"]].astype(float)).all()
    difference = evaluate(log, "high", baseline="control")
    assert difference.estimate == pytest.approx(evaluate(log, ("high", "control")).estimate)


def test_intervals_of_all_arms_hold_together():
    log = frame(2000)
    found = evaluate_arms(log, level=0.94)
    assert list(found.index) == ["control", "high", "low"]
    for arm, row in found.iterrows():
        alone = evaluate(log, arm, level=0.98)  # 1 - .06 / 3
        assert row["estimate"] == alone.estimate and (row["lower"], row["upper"]) == pytest.approx(alone.interval)
        last = alone.sequence.iloc[-1]
        assert (row["sequence_lower"], row["sequence_upper"]) == pytest.approx((last["lower"], last["upper"]))
    truth = np.array([RATES[arm] for arm in found.index])
    assert np.all((found.lower < truth) & (truth < found.upper)) and not found.is_refused.any()


@pytest.mark.slow
def test_the_error_of_a_difference_is_that_of_the_scores_of_both_arms():
    rng = np.random.default_rng(2)
    arm, reward = rng.integers(0, 2, 400), (rng.random(400) < 0.9).astype(float)
    found = evaluate(pandas.DataFrame({"arm": arm, "reward": reward, "propensity": 0.5}), (0, 1)).table()
    # A row counts for one arm or the other: scores of IPS are less alike than those of two independent logs.
    scores = np.where(arm == 0, 2.0, -2.0)[1:] * reward[1:]  # nothing was known before the first row
    np.testing.assert_allclose(found.loc["ips"].iloc[:2], [scores.mean(), scores.std() / np.sqrt(399)])


def test_a_selector_is_evaluated_on_the_logged_path():
    model = bernoulli_model(3)
    found = evaluate(frame(900), selectors.thompson(), model=model, baseline={name: 1 / 3 for name in RATES})
    # Thompson sampling soon plays the arm that earns .35 and not .2 on average.
    assert found.estimate > 3 * found.standard_error


def test_a_log_without_overlap_is_refused_with_the_reason_and_what_remains_valid():
    log = frame(400)
    log.loc[:, ["propensity_control", "propensity"]] = 0.0, 1.0
    log.loc[:, "propensity_low"] = 0.0
    log.loc[:, "propensity_high"] = 1.0
    log.loc[:, "arm"] = "high"
    log.loc[1, ["arm", "propensity", "propensity_low", "propensity_high"]] = "low", 0.001, 0.001, 0.999
    log.loc[2, ["arm", "propensity", "propensity_control", "propensity_high"]] = "control", 0.001, 0.001, 0.999
    found = evaluate(log, "low")
    assert found.is_refused and np.isnan(found.interval).all()
    assert "effective sample size" in found.verdict and "confidence sequence" in found.verdict
    assert "with_floor" in found.verdict


def test_wrong_propensities_are_noticed():
    log = frame(2000)
    log["propensity"] = 0.2
    log = log.drop(columns=[column for column in log if column.startswith("propensity_")])
    found = evaluate(log, "high")
    assert found.is_refused and "mean importance weight" in found.verdict
    # Each refusal names its own remedy. Of the sequences, that of an arm's binary rewards needs no propensities.
    assert "Remedy: give every row the probability" in found.verdict and "with_floor" not in found.verdict
    assert "What remains valid" in found.verdict
    log["reward"] += np.linspace(0.0, 1e-3, 2000)
    other = evaluate(log, "high").verdict
    assert "What remains valid" not in other and "Remedy: give every row the probability" in other


def test_a_small_log_is_refused_with_the_number_of_decisions_that_is_needed():
    found = evaluate(frame(60), "low")
    assert "has an effective sample size of" in found.verdict and " more decisions like these; or, " in found.verdict


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (lambda log: log.drop(columns="reward"), {}, "no column 'reward'"),
        (lambda log: log.assign(propensity=1.5), {}, "expected a probability"),
        (lambda log: log, {"bounds": (0.0, 0.5)}, "reward"),
        (lambda log: log, {"bounds": (1.0, 0.0)}, "bounds must be"),
        (lambda log: log, {"level": 95}, "level must lie"),
        (lambda log: log.assign(propensity_low=0.5), {}, "add up to 1"),
        (lambda log: log.drop(columns="propensity_low"), {}, "one for every arm"),
        (lambda log: log.assign(reward=np.nan), {}, "nothing to evaluate"),
        (lambda log: log.assign(reward="yes"), {}, "column 'reward', row 0: 'yes' is not a number"),
        (lambda log: log.assign(reward=np.datetime64("2020-01-01", "ns")), {}, "is not a number"),
        (lambda log: log.assign(propensity="0.5"), {}, "column 'propensity', row 0: '0.5' is not a number"),
        (lambda log: log.assign(arm=[None, *log.arm[1:]]), {}, "row 0 has no arm"),
        (lambda log: log, {"bounds": (0.0, np.inf)}, "two finite numbers"),
        (lambda log: log, {"bounds": 1.0}, "bounds must be"),
        (lambda log: log, {"arms": {"low", "middle", "high"}}, "arms must be a sequence"),
        (lambda log: log, {"arms": ["low", "low", "high"]}, "arms must be different"),
        (lambda log: log, {"baseline": "high"}, "two different ones"),
        (lambda log: 7, {}, "log must be"),
    ],
)
def test_bad_logs_and_settings_are_refused_in_words(change, settings, words):
    with pytest.raises(ValueError, match=words):
        evaluate(change(frame(20)), "high", **settings)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nobody", "expected one of"),
        (("high", "high"), "two different arms"),
        ({"high": 0.7}, "add up to 1"),
        ({"high": "most"}, "must be a number"),
        ({"high": np.array([1.0])}, "must be a number"),
        (np.array([0.5, 0.5, 0.0]), "give the probabilities by arm"),
        ({"nobody": 1.0}, "expected some of"),
        (lambda context: [1, 0, 0], "no contexts"),
        (selectors.thompson(), "give model="),
    ],
)
def test_bad_targets_are_refused_in_words(target, words):
    with pytest.raises(ValueError, match=words):
        evaluate(frame(20), target)


@pytest.mark.slow
def test_an_answer_that_is_told_the_other_way_round_turns_its_sequence_too():
    log = frame(2000)
    one, other = evaluate(log, ("high", "low")), evaluate(log, ("low", "high"))
    assert one.verdict.startswith("high beats low") and other.verdict == one.verdict


def test_a_log_whose_decisions_followed_a_context_is_evaluated_so_without_the_context():
    # Arm a earns .9 or .1 and is played with these probabilities, so that it earns .82 where it is played, and .5 elsewhere.
    rng = np.random.default_rng(0)
    prob = rng.choice([0.1, 0.9], 4000)
    is_first = rng.random(4000) < prob
    reward = (rng.random(4000) < np.where(is_first, prob, 0.5)).astype(float)
    log = {"arm": np.where(is_first, "a", "b"), "reward": reward, "propensity": np.where(is_first, prob, 1 - prob)}
    found = evaluate(pandas.DataFrame(log | {"propensity_a": prob, "propensity_b": 1 - prob}), "a")
    last = found.sequence.iloc[-1]
    assert "empirical Bernstein" in found.sequence_kind and last.lower < 0.5 < last.upper
    assert abs(found.estimate - 0.5) < 3 * found.standard_error
    shuffled = log | {"reward": rng.permutation(reward)}  # rewards that have nothing to do with the context
    assert "beta-binomial" in evaluate(pandas.DataFrame(shuffled), "a").sequence_kind
    known = LoggedDecisions(("a", "b"), (~is_first).astype(int), rng.permutation(reward), log["propensity"])
    kinds = [evaluate_decisions(known._replace(is_varying=own), "a").sequence_kind for own in (False, True)]
    assert "beta-binomial" in kinds[0] and "empirical Bernstein" in kinds[1]


def test_context_dependent_policies_and_the_models_outcome_model_narrow_the_interval():
    # Arm 0 earns x, arm 1 earns -x: playing by the sign of x earns E|x| = .798, which no fixed arm does.
    rng = np.random.default_rng(2)
    x = rng.normal(size=(1500, 2))
    arms = rng.integers(0, 2, 1500)
    rewards = np.where(arms == 0, x[:, 0], -x[:, 0]) + 0.5 * rng.normal(size=1500)
    log = LoggedDecisions((0, 1), arms, rewards, np.full(1500, 0.5), np.full((1500, 2), 0.5), x)

    def by_sign(context):
        return [1.0, 0.0] if context[0] > 0 else [0.0, 1.0]

    model = RewardModel(linear, 2, context=np.zeros(2))
    plain = evaluate_decisions(log, by_sign)
    with_model = evaluate(log, by_sign, model=model)
    for found in (plain, with_model):
        assert abs(found.estimate - np.sqrt(2 / np.pi)) < 4 * found.standard_error
    assert with_model.standard_error < 0.8 * plain.standard_error


def test_outcome_models_along_the_log_know_earlier_blocks_only():
    log = evaluate_log(300)
    model, engine = bernoulli_model(3), bernoulli_engine(3)
    before = follow_posterior(model, engine, log).means
    changed = log._replace(reward=np.concatenate([log.reward[:200], 1 - log.reward[200:]]))
    after = follow_posterior(model, engine, changed).means
    assert (before[:201] == after[:201]).all() and (before[201:] != after[201:]).any()


def evaluate_log(num_rows):
    table = frame(num_rows)
    names = tuple(RATES)
    index = np.array([names.index(arm) for arm in table["arm"]])
    return LoggedDecisions(
        names, index, table["reward"].to_numpy(), np.full(num_rows, 1 / 3), np.full((num_rows, 3), 1 / 3)
    )


def test_the_figure_and_the_html_state_the_answer():
    found = evaluate(frame(300), ("high", "control"))
    assert "high minus control" in found.plot().get_suptitle()
    assert found.verdict.split(".")[0] in found._repr_html_()


def test_a_deterministic_selector_is_named_when_the_bandit_is_built_and_its_log_is_refused_with_the_remedy():
    model, engine = bernoulli_parts(3)
    with pytest.warns(UserWarning, match="decisions of greedy are deterministic.*with_floor") as warned:
        bandit = Bandit(model, arms=list(RATES), engine=engine, selector=selectors.greedy(), num_samples=200)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert str(warned[0].message) in bandit.explain()
    for _ in range(5):
        bandit.update(bandit.select(), 1.0)
    found = bandit.evaluate("high")
    assert found.is_refused and "selectors.with_floor" in found.verdict


def test_the_figures_sequence_is_shown_near_its_answer():
    rng = np.random.default_rng(0)
    arm = rng.integers(2, size=2000)
    reward = 17.0 * (rng.random(2000) < np.where(arm == 1, 0.4, 0.2)) + rng.normal(size=2000)
    found = evaluate(pandas.DataFrame({"arm": arm, "reward": reward, "propensity": 0.5}), (1, 0))
    figure = found.plot()
    low, high = figure.axes[1].get_ylim()
    last = found.sequence.iloc[-1]
    assert low < last["lower"] and high > last["upper"]
    assert high - low < 10 * (last["upper"] - last["lower"])  # the bounds after ten decisions are wider than that
    figure_tools().close(figure)
