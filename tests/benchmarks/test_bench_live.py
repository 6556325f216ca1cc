"""The benchmark of live steps measures implementations that learn the same posterior, and writes the results."""

import json

import numpy as np
import pytest
from bench_live import run_bench
from live_players import CASES, case_players, case_program

from ppl_bandit import Bandit


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bernoulli", "linear"])
def test_numpy_loops_use_the_same_posterior_as_the_library(name):
    case, rng = CASES[name], np.random.default_rng(3)
    program, example = case_program(case)
    bandit = Bandit(program, case.num_arms, context=example, num_samples=4000)
    select, update = next(player for player in case_players(case, 10) if player.name == "NumPy, 1 draw").make(case, 0)
    num_rows = 12
    arms = rng.integers(0, case.num_arms, num_rows)
    contexts = rng.uniform(size=(num_rows, case.num_features)) if case.num_features else None
    rewards = rng.integers(0, 2, num_rows).astype(float) if contexts is None else rng.normal(5.0, 1.0, num_rows)
    for row in range(num_rows):
        update(int(arms[row]), float(rewards[row]), None if contexts is None else contexts[row])
    bandit.update_many(arms=arms, rewards=rewards, contexts=contexts)

    here = None if contexts is None else contexts[0]
    num_plays = 4000
    counts = np.bincount([select(here) for _ in range(num_plays)], minlength=case.num_arms)
    decision = bandit.select(here)
    # Both are shares of 4,000 independent draws: their difference has a standard deviation of at most sqrt(2 / 4 / 4000).
    np.testing.assert_allclose(counts / num_plays, decision.best_arm_probs, atol=4.5 * np.sqrt(0.5 / num_plays))
    assert np.ptp(decision.best_arm_probs) > 0.1  # unlike the prior, under which all arms are equally likely


@pytest.mark.slow
def test_a_small_run_writes_times_of_every_implementation(tmp_path):
    said = []
    found = run_bench(["bernoulli"], ["live"], 20, 100, tmp_path, said.append)
    names = [player.name for player in case_players(CASES["bernoulli"], 100)]
    rows = found["live"]["bernoulli"]
    assert [row["name"] for row in rows] == names and {"NumPy, 1 draw", "NumPy, 100 draws"} <= set(names)
    assert all(0 < row["median_us"] <= row["p99_us"] <= row["worst_us"] for row in rows)
    ours, other = rows[0], rows[2]
    assert ours["relative_to_ppl_bandit"] == 1.0
    np.testing.assert_allclose(
        other["relative_to_ppl_bandit"], other["median_us"] / ours["median_us"], atol=0.01
    )  # rounded to two digits
    assert json.loads((tmp_path / "bench.json").read_text())["live"]["bernoulli"] == rows
    assert all(f"| {name} |" in (tmp_path / "bench.md").read_text() for name in names)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert said and found["memory"] > 0


@pytest.mark.parametrize(
    ("cases", "parts", "words"), [(["bernouli"], ["live"], "--cases"), (["bernoulli"], ["life"], "--parts")]
)
def test_an_unknown_name_is_refused_before_anything_runs(cases, parts, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run_bench(cases, parts, 20, 100, tmp_path, print)
