"""Published figures of the Open Bandit sample; skipped where the package that carries the CSV files is not installed."""

import importlib.util
from pathlib import Path

import pandas
import pytest

from ppl_bandit import evaluate

PACKAGE = importlib.util.find_spec("obp")  # located, not imported: its dependencies are not needed
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="obp is not installed; python -m pip install --no-deps obp==0.4.1 brings the CSV files"
)


def uniform_policy(campaign):
    folder = Path(PACKAGE.origin).parent / "dataset" / "obd" / "bts" / campaign
    rows = pandas.read_csv(folder / f"{campaign}.csv", index_col=0)
    log = pandas.DataFrame({"arm": rows["item_id"], "reward": rows["click"], "propensity": rows["propensity_score"]})
    items = sorted(set(rows["item_id"].tolist()))
    return evaluate(log, {item: 1 / len(items) for item in items})


def test_the_value_of_the_uniform_policy_agrees_with_the_published_figures():
    found = uniform_policy("all")
    assert found.table().loc["ips", "estimate"] == pytest.approx(0.00235964, abs=5e-9)
    assert found.table().loc["snips", "estimate"] == pytest.approx(0.00233371, abs=5e-9)
    assert found.diagnostics["effective_sample_size"] == pytest.approx(340, abs=0.5)
    assert not found.is_refused


def test_a_campaign_without_overlap_is_refused():
    found = uniform_policy("women")
    assert found.is_refused and found.diagnostics["effective_sample_size"] == pytest.approx(2, abs=0.5)
