"""Looks at a live experiment: verdicts that are recorded, the same after a restart, and right by an independent quadrature."""

import numpy as np
import pytest
from scipy import stats
from shared_models import THOMPSON, bernoulli_bandit, bernoulli_parts

from ppl_bandit import Bandit, ExperimentStopped, selectors
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.replay import replay
from ppl_bandit.journal.stores.store import JournalError
from ppl_bandit.trials import stopping
from ppl_bandit.trials.design import Design, design_from_settings, design_settings

ARMS = ["control", "low", "high"]
NODES, WEIGHTS = (0.5 * own for own in np.polynomial.legendre.leggauss(100))  # from 0 to 1
NODES = NODES + 0.5
DESIGN = Design(
    [20, 40, 60],
    selector=selectors.with_limits(THOMPSON, floors=0.1),
    stopping=[stopping.superiority(0.99), stopping.inferiority(0.02), stopping.equivalence(0.9, 0.05)],
    allocation="looks",
)


def spread(look):
    return look.posterior.mean().max() - look.posterior.mean().min()


def build(**settings):
    return bernoulli_bandit(arms=ARMS, **settings)


def best_arm_probs(alphas, betas):
    """P(best) of independent Beta laws with integer parameters: Gauss-Legendre quadrature of their polynomials is exact."""
    assert np.sum(alphas) + np.sum(betas) < 2 * NODES.size  # at least the degree of the polynomials
    below = stats.beta.cdf(NODES, np.array(alphas)[:, None], np.array(betas)[:, None])
    density = stats.beta.pdf(NODES, np.array(alphas)[:, None], np.array(betas)[:, None])
    others = [np.prod(np.delete(below, arm, axis=0), axis=0) for arm in range(len(below))]
    return (density * others) @ WEIGHTS


def play(bandit, num_decisions, rates, seed=0):
    world = np.random.default_rng(seed)
    for _ in range(num_decisions):
        decision = bandit.select()
        bandit.update(decision, float(world.random() < rates[decision.arm]))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """An experiment in a journal, reopened before every look, that stops for superiority, and its verdicts."""
    path = tmp_path_factory.mktemp("looks") / "trial.db"
    verdicts = []
    for number in range(3):
        bandit = build(design=DESIGN, journal=path)
        play(bandit, 20, {"control": 0.3, "low": 0.4, "high": 0.75}, seed=number)
        verdicts.append(bandit.look())
        if verdicts[-1].is_stop:
            break
    return path, verdicts, bandit


def test_the_evidence_of_a_look_is_an_independent_quadrature(stopped):
    path, verdicts, _ = stopped
    first = verdicts[0]
    rows = build(design=DESIGN, journal=path).history().iloc[: first.num_rewards]
    wins = [rows.reward[rows.arm == arm].sum() for arm in ARMS]
    losses = [(1 - rows.reward[rows.arm == arm]).sum() for arm in ARMS]
    expected = best_arm_probs(1.0 + np.array(wins), 1.0 + np.array(losses))
    assert not first.is_stop and not first.dropped  # so P(best) is over all arms
    # The probabilities of a look are right to 1e-3 for any counts (`numerics.joint_events`), and better where arms are similar.
    np.testing.assert_allclose([first.best_arm_probs[arm] for arm in ARMS], expected, atol=5e-4)
    np.testing.assert_allclose(first.evidence["superiority"], max(expected), atol=5e-4)


def test_an_experiment_stops_says_why_and_refuses_further_decisions(stopped):
    path, verdicts, bandit = stopped
    last = verdicts[-1]
    assert last.is_stop and last.ending == "superiority" and last.arm == "high"
    assert last.verdict.startswith(f"Stop at look {last.look} of 3")
    for again in (bandit, build(design=DESIGN, journal=path)):
        with pytest.raises(ValueError, match=r"stopped at look .*play 'high' without the bandit"):
            again.select()
        with pytest.raises(ValueError, match="stopped at look"):
            again.select_many(num_decisions=2)
        repeated = again.look()
        assert not repeated.is_due and repeated.to_dict() | {"is_due": True} == last.to_dict()


def test_probabilities_are_fixed_between_looks_and_recorded(stopped):
    path, verdicts, bandit = stopped
    with Journal(path) as journal:
        decided = [
            record.decided for record in journal.store.decisions("default") if record.decided.body.get("propensities")
        ]
    probs = np.array([event.body["propensities"] for event in decided])
    np.testing.assert_allclose(probs[:20], 1 / 3)
    expected = [verdicts[0].allocation[arm] for arm in ARMS]
    np.testing.assert_allclose(probs[20:40], np.tile(expected, (20, 1)), rtol=1e-12)
    assert min(expected) >= 0.1 - 1e-12 and abs(sum(expected) - 1.0) < 1e-12
    raw = np.array([verdicts[0].best_arm_probs[arm] for arm in ARMS])
    assert (np.argsort(expected) == np.argsort(raw)).all()


def test_a_replay_takes_the_looks_again(stopped):
    path, _, _ = stopped
    bandit = build(design=DESIGN)
    with Journal(path) as journal:
        header = read_header(journal.store, "default")
        task, prior = bandit._build(ARMS)
        settings = (journal.store, "default", header.last_change, task, prior, bandit._build)
        found = replay(*settings, look_difference=bandit._look_difference)
        assert found.position is None and found.num_checked == found.num_decisions
        other = build(design=DESIGN.with_threshold("superiority", 0.5))
        differs = replay(*settings, look_difference=other._look_difference)
    assert differs.position is not None and "the replayed one is 'superiority'" in differs.difference


def test_a_saved_bandit_keeps_its_looks(stopped, tmp_path):
    _, verdicts, bandit = stopped
    bandit.save(tmp_path / "trial.bandit")
    model, engine = bernoulli_parts(3)
    loaded = Bandit.load(tmp_path / "trial.bandit", model, engine=engine)
    assert loaded.look().to_dict() | {"is_due": True} == verdicts[-1].to_dict()


def test_another_design_is_another_experiment(stopped):
    path, _, _ = stopped
    with pytest.raises(JournalError, match="design: it was"):
        build(design=DESIGN.with_threshold("superiority", 0.95), journal=path)


def test_no_look_is_due_before_its_number_of_decisions():
    bandit = build(design=DESIGN)
    play(bandit, 3, dict.fromkeys(ARMS, 0.5))
    found = bandit.look()
    assert not found.is_due and found.look == 0 and found.next_look == 20 and "20 decisions, and 3" in str(found)
    for asked in ({}, {"units": [f"unit {number}" for number in range(18)]}):
        with pytest.raises(
            ValueError, match="a look after 20 decisions, of which 17 are left: ask for at most 17, then call"
        ):
            bandit.select_many(num_decisions=18, **asked)
    assert len(bandit.select_many(num_decisions=17)) == 17


@pytest.mark.parametrize("lag", [0, 2])
def test_no_decision_passes_a_look_that_is_due(lag, tmp_path):
    bandit = build(design=Design([4, 8], stopping=stopping.superiority(0.9999), lag=lag), journal=tmp_path / "trial.db")
    decisions = bandit.select_many(num_decisions=4)
    for again in (bandit, build(design=bandit._design, journal=tmp_path / "trial.db")):
        for call in (
            again.select,
            lambda again=again: again.select(request_id="one"),
            lambda again=again: again.select_many(num_decisions=4),
            lambda again=again: again.select_many(num_decisions=2, units=["a", "b"]),
        ):
            with pytest.raises(ExperimentStopped, match=r"look 1 of 2 is due since 4 decisions: call look\(\)"):
                call()
    bandit.update(decisions[0], 1.0)  # rewards are taken at any time
    found = bandit.look()  # and the look does not wait for them
    assert found.is_due and (found.num_rewards, found.num_pending) == (1, 3)
    assert len(bandit.select_many(num_decisions=4)) == 4 and bandit.look().look == 2


def test_of_looks_that_a_slate_passes_only_the_last_is_taken():
    bandit = build(design=Design([2, 3, 8]))
    bandit.select()
    bandit.select(size=3, request_id="a request for more places than are left")
    with pytest.raises(ExperimentStopped, match="look 2 of 3 is due since 3 decisions"):
        bandit.select()
    found = bandit.look()
    assert (found.look, found.num_decisions) == (2, 4) and not bandit.look().is_due
    bandit.select()


def test_the_last_look_waits_for_pending_rewards():
    design = Design([8], stopping=stopping.superiority(0.9999), max_rows=12)
    bandit = build(design=design)
    play(bandit, 8, dict.fromkeys(ARMS, 0.5))
    assert bandit.look().is_due
    play(bandit, 3, dict.fromkeys(ARMS, 0.5))
    pending = bandit.select()
    middle = bandit.look()
    assert not middle.is_due and "The last look waits for 1 pending" in middle.verdict
    bandit.discard(pending)
    last = bandit.look()
    assert last.is_due and last.look == 2 and last.ending == "undecided" and last.num_rewards == 11
    with pytest.raises(ValueError, match="stopped at look 2"):
        bandit.select()


def test_designs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="has no design"):
        build(selector=DESIGN.selector).look()
    with pytest.raises(ValueError, match="control is 'placebo', which is no arm"):
        build(design=Design([10], control="placebo"))
    with pytest.raises(ValueError, match="give it to the design alone"):
        build(selector=selectors.greedy(), design=Design([10]))
    with pytest.raises(ValueError, match="delta is 5, but arms differ by at most"):
        build(design=Design([10], stopping=stopping.equivalence(0.9, delta=5.0)))
    with pytest.raises(ValueError, match="must be a Design"):
        build(design=[10, 20])


def test_a_design_is_restored_from_json_values():
    rules = [stopping.superiority([0.999, 0.99, 0.98]), stopping.expected_loss(0.05)]
    design = Design([10, 20], selector=THOMPSON, stopping=rules, lag=[0.5, 0.5], max_rows=30)
    settings = design_settings(design)
    assert design_settings(design_from_settings(settings)) == settings
    with pytest.raises(ValueError, match="a design has the arguments of Design"):
        design_from_settings({"look": [1]})
    own = Design([10, 20], stopping=stopping.rule(spread, "spread", at_most=0.1))
    other = Design([10, 20], stopping=stopping.rule(lambda look: 0.0, "spread", at_most=0.1))
    assert design_settings(own) != design_settings(other)  # another function is another experiment
    with pytest.raises(ValueError, match="the stopping rule 'spread' is a function, which the journal does not hold"):
        design_from_settings(design_settings(own))


def test_a_report_says_how_far_each_rule_is_from_its_threshold(warm_starts):
    rules = [
        stopping.superiority(0.99),
        stopping.inferiority(0.01),
        stopping.expected_loss(0.5),
        stopping.rule(spread, "spread", at_most=0.01),
    ]
    bandit = bernoulli_bandit(2, design=Design([100, 200], stopping=rules))
    bandit.update_many(arms=[0] * 40 + [1] * 40, rewards=[1] * 12 + [0] * 28 + [1] * 17 + [0] * 23)
    report = bandit.report(more=(100,))
    found = {rule.name: rule for rule in report.rules}
    assert found["superiority"].value == pytest.approx(report.best_prob, abs=1e-3) and not found["superiority"].is_met
    assert found["inferiority"].value == pytest.approx(
        1 - report.best_prob, abs=1e-3
    )  # both are within 1e-3 of quadrature
    assert found["expected_loss"].value == pytest.approx(report.loss, rel=1e-3) and found["expected_loss"].is_met
    (line,) = [line for line in str(report).splitlines() if line.startswith("Stopping rules at this posterior: ")]
    assert "the largest probability that an arm is best is 0.8" in line and ", and 0.99 or more stops;" in line
    assert "; spread is 0.1" in line and ", and 0.01 or less stops" in line
    assert "the expected loss of the best choice is" in line and "0.5 or less stops (met)" in line
    assert report.to_dict()["rules"][0]["name"] == "superiority" and bandit.look().look == 0  # nothing was recorded
