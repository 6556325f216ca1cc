"""Propensities of imported plays: kept for evaluation, without an effect on what is learnt."""

import numpy as np
import pandas
import pytest
from shared_models import bernoulli_bandit, bernoulli_parts

from ppl_bandit import Bandit, Journal, evaluate
from ppl_bandit.journal.audit import decision_table

ARMS = ["a", "b"]
ROWS = pandas.DataFrame({"arm": ARMS * 20, "reward": [1, 0, 0, 1] * 10, "p": np.linspace(0.3, 0.7, 40)})


@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.slow), "journal"])
def test_logged_propensities_of_imported_rows_are_kept_for_evaluation(kind, tmp_path):
    place = {"journal": tmp_path / "j.db"} if kind == "journal" else {}
    bandit = bernoulli_bandit(2, arms=ARMS, **place)
    bandit.update_many(ROWS, propensity="p")
    bandit.update_many(arms=["a"], rewards=[1])  # of an unknown probability
    decision = bandit.select()
    bandit.update(decision, 1)
    if kind == "file":  # what memory keeps is saved and loaded
        bandit.save(tmp_path / "saved")
        model, engine = bernoulli_parts(2)
        bandit = Bandit.load(tmp_path / "saved", model, engine=engine)
    log = bandit.logged_decisions()
    np.testing.assert_allclose(log.propensity, [*ROWS.p, decision.propensity])
    assert log.num_without_propensity == 1 and log.propensities is None
    for table in (bandit.history(), decision_table(bandit._experiment.store, "default")):
        np.testing.assert_allclose(table.propensity.astype(float), [*ROWS.p, np.nan, decision.propensity])
    frame = pandas.DataFrame(
        {"arm": [*ROWS.arm, decision.arm], "reward": [*ROWS.reward, 1], "propensity": [*ROWS.p, decision.propensity]}
    )
    source = Journal(tmp_path / "j.db") if kind == "journal" else bandit
    model = bandit.model if kind == "file" else None  # which a bandit's own evaluation takes
    # A frame's decision was learnt before its rows, the bandit's after: draws of the outcome model differ.
    assert evaluate(source, "a").estimate == pytest.approx(evaluate(frame, "a", model=model).estimate, rel=0.05)
    assert bandit.posterior_parameters()["rate"]["concentration1"].sum() == 2 + 20 + 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"propensity": [0.5]}, "one probability for each of 2 rows"),
        ({"propensity": [0.5, 0.0]}, r"propensity\[1\]=0 must be in \(0, 1\]"),
        ({"propensity": [0.5, np.nan]}, r"propensity\[1\]=nan must be"),
        ({"propensity": "p"}, "give the name of its column"),
    ],
)
def test_numbers_that_are_no_propensities_are_refused(given, message):
    bandit = bernoulli_bandit(2)
    with pytest.raises(ValueError, match=message):
        bandit.update_many(arms=[0, 1], rewards=[0, 1], **given)
    assert bandit.num_rewards == 0
