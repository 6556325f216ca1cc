"""Simulated realizations: results do not depend on chunks and devices, and have the law of the live bandit."""

import functools
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray
from shared_models import bernoulli_engine, bernoulli_model

from ppl_bandit import Bandit, Environment, RewardModel, engines, selectors, simulate
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.simulation import chunks


def drifting(arm):
    """A world whose program differs from the bandit's."""
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(0.5 * rate[arm] + 0.25))


@functools.cache
def world_of_two():
    return Environment(bernoulli_model(2), {"rate": jnp.array([0.4, 0.8])})


DOUBLE, THOMPSON = selectors.double_sampling(), selectors.thompson()


def run(selector=DOUBLE, world=None, engine=None, seed=0, **settings):
    world, engine = world or world_of_two(), engine or bernoulli_engine(2)
    settings = {"num_steps": 20, "num_realizations": 12, "num_samples": 50} | settings
    return simulate(seed, bernoulli_model(2), engine, selector, world, **settings)


@pytest.fixture(scope="module")
def whole():
    return run()


def test_every_step_is_labelled_and_consistent(whole):
    assert dict(whole.sizes) == {"realization": 12, "step": 20, "arm": 2}
    np.testing.assert_array_equal(whole.step, np.arange(1, 21))
    np.testing.assert_allclose(whole.regret, np.where(whole["arm"] == 0, 0.4, 0.0), atol=1e-7)
    np.testing.assert_allclose(whole.realised_regret, 0.8 - whole.reward, atol=1e-6)
    np.testing.assert_allclose(whole.best_arm_probs.sum("arm"), 1.0, atol=1e-6)
    assert set(np.unique(whole.reward)) == {0.0, 1.0} and bool(whole.is_trusted.all())
    assert int(whole.num_candidates.min()) >= 1 and whole.selector == "double_sampling"


def test_the_result_has_its_provenance_and_can_be_saved(whole, tmp_path):
    facts = whole.attrs
    assert facts["model"].endswith("conversion") and facts["engine"] == "conjugate" and facts["is_complete"] == 1
    assert json.loads(facts["truth"]) == {"1": {"rate": pytest.approx([0.4, 0.8])}}
    assert {"jax", "numpyro", "python"} <= set(json.loads(facts["versions"])) and facts["key"] == "[0, 0]"
    whole.to_netcdf(tmp_path / "runs.nc")
    with xarray.open_dataset(tmp_path / "runs.nc") as kept:
        np.testing.assert_array_equal(kept.regret, whole.regret)
        np.testing.assert_array_equal(kept["arm"], whole["arm"])
        assert kept.attrs["truth"] == facts["truth"]


ONE_AT_A_TIME = {"memory": 1}  # the smallest chunks


def test_the_same_seed_gives_the_same_result_whatever_the_chunks(whole):
    xarray.testing.assert_identical(run(**ONE_AT_A_TIME).drop_attrs(), whole.drop_attrs())
    assert not np.array_equal(run(seed=1)["arm"], whole["arm"])


def test_summaries_are_those_of_the_steps(whole):
    summary = run(summary=True, **ONE_AT_A_TIME)
    regret = whole.regret.astype(float).cumsum("step")
    np.testing.assert_allclose(summary.cumulative_regret_mean, regret.mean("realization"), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(summary.cumulative_regret_sd, regret.std("realization", ddof=1), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(summary.final_regret, regret[:, -1], rtol=1e-6)
    np.testing.assert_allclose(summary.play_share.sel(step=7), [(whole["arm"][:, 6] == a).mean() for a in (0, 1)])
    np.testing.assert_allclose(summary.optimal_share, (whole.regret <= 0).mean("realization"))
    np.testing.assert_array_equal(summary.is_stuck, (whole.regret[:, -5:] > 0).all("step"))
    last = summary.cumulative_regret_quantiles.sel(checkpoint=20, quantile=0.5)
    assert float(last) == pytest.approx(float(regret[:, -1].median()), rel=1e-6)


@pytest.mark.slow
def test_several_selectors_see_the_same_realizations(whole):
    both = run({"ds": DOUBLE, "ts": THOMPSON})
    assert dict(both.sizes) == {"selector": 2, "realization": 12, "step": 20, "arm": 2}
    np.testing.assert_array_equal(both.sel(selector="ds").regret, whole.regret)


@pytest.mark.slow
def test_the_law_of_p_hat_has_the_law_of_its_draws():
    # Mean regret of 600 runs each way: they agree within 4 standard errors of their difference.
    fast = run(THOMPSON, num_steps=30, num_realizations=600, num_samples=20)
    slow = run(THOMPSON, num_steps=30, num_realizations=600, num_samples=20, draws=True, seed=1)
    totals = [np.asarray(found.regret.sum("step")) for found in (fast, slow)]
    error = np.sqrt(sum(total.var(ddof=1) / total.size for total in totals))
    assert abs(totals[0].mean() - totals[1].mean()) < 4 * error
    # p-hat at the first step is Binomial(20, 1/2) / 20 in both: variance 1/80, with standard error sqrt(2/600)/80.
    for found in (fast, slow):
        variance = float(found.best_arm_probs[:, 0, 0].var())
        assert variance == pytest.approx(1 / 80, abs=4 * np.sqrt(2 / 600) / 80)


def test_a_world_may_be_another_program_and_may_change():
    other = RewardModel(drifting, 2)
    world = Environment(other, {"rate": jnp.array([0.1, 0.9])}, changes={11: {"rate": jnp.array([0.9, 0.1])}})
    found = run(THOMPSON, world)
    early, late = found.sel(step=slice(1, 10)), found.sel(step=slice(11, 20))
    np.testing.assert_allclose(early.regret, np.where(early["arm"] == 0, 0.4, 0.0), atol=1e-6)
    np.testing.assert_allclose(late.regret, np.where(late["arm"] == 1, 0.4, 0.0), atol=1e-6)
    assert found.attrs["world"].endswith("drifting") and "11" in json.loads(found.attrs["truth"])


@pytest.mark.slow
def test_contexts_are_fresh_in_every_step():
    file = load_model("linear_gaussian")
    model = RewardModel(file.program, file.num_arms, file.context)
    world = Environment(model, file.truth, file.contexts)
    found = simulate(0, model, engines.conjugate, THOMPSON, world, num_steps=4, num_realizations=3, num_samples=10)
    gaps = np.asarray(found.regret)[np.asarray(found.regret) > 0]
    assert gaps.size and np.unique(gaps).size == gaps.size  # with a fixed context there would be one gap


def two_outcomes(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.deterministic("expected_reward", rate[arm] * mean[arm])
    numpyro.sample("bought", dist.Bernoulli(rate[arm]))
    numpyro.sample("spend", dist.Normal(mean[arm], 1.0))


@pytest.mark.slow
def test_several_outcomes_and_an_approximate_engine_with_capacity_for_all_steps(capsys):
    model = RewardModel(two_outcomes, 2, outcomes=("bought", "spend"))
    world = Environment(model, {"rate": jnp.array([0.4, 0.8]), "mean": jnp.array([1.0, 2.0])})
    engine = engines.laplace(model, capacity=4)
    found = simulate(0, model, engine, THOMPSON, world, num_steps=10, num_realizations=2, num_samples=10, progress=True)
    reported = capsys.readouterr().err
    assert "thompson: compiling (1 of 1 selectors)" in reported
    assert "thompson: 1 of 2 realizations, about" in reported and "s left for this selector" in reported
    assert found.bought.shape == found.spend.shape == (2, 10)
    assert "reward" not in found and "realised_regret" not in found
    assert bool(np.isfinite(found.best_arm_probs).all()) and found.attrs["engine"] == "laplace"


def interrupt_third_realization(monkeypatch):
    """Interrupt when the third realization is done; return the list of realizations, to be cleared before a run."""
    monkeypatch.setattr(chunks, "num_cores", lambda: 1)

    def interrupt(num):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(num)

    calls = []
    monkeypatch.setattr("ppl_bandit.simulation.simulate.progress_reporter", lambda *arguments: interrupt)
    return calls


def test_an_interrupted_run_keeps_finished_realizations(monkeypatch, capsys):
    calls = interrupt_third_realization(monkeypatch)
    found = run(num_realizations=3, progress=True, **ONE_AT_A_TIME)
    assert found.sizes["realization"] == 3 and found.attrs["is_complete"] == 1  # the third was done
    calls.clear()
    found = run(num_realizations=4, progress=True, **ONE_AT_A_TIME)
    assert found.sizes["realization"] == 3 and found.attrs["is_complete"] == 0
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.slow  # the same interruption of a run with several selectors
def test_an_interrupted_comparison_keeps_finished_realizations_of_each_selector(monkeypatch):
    interrupt_third_realization(monkeypatch)
    # Of two selectors the first was done with two realizations, and the second with one.
    both = {"first": THOMPSON, "second": THOMPSON}
    found = run(both, num_realizations=2, summary=True, progress=True, **ONE_AT_A_TIME)
    assert found.num_runs.to_series().to_dict() == {"first": 2, "second": 1}
    assert found.sizes["realization"] == 1 and found.attrs["is_complete"] == 0


@pytest.mark.slow
def test_steps_compile_once_whatever_the_number_of_chunks(count_compilations):
    with count_compilations() as compiled:
        run(num_realizations=5, **ONE_AT_A_TIME)
    assert compiled.count("jit(run)") == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_steps": 0}, "num_steps must be a positive integer, got 0"),
        ({"num_realizations": 2.5}, "num_realizations must be a positive integer, got 2.5"),
        ({"selector": {}}, "selector is empty"),
    ],
)
def test_bad_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        run(**settings)


def test_a_world_with_other_arms_is_refused():
    file = load_model("bernoulli")
    world = Environment(RewardModel(file.program, 3), file.truth)
    with pytest.raises(ValueError, match="environment has 3 arms and reward_model 2"):
        run(world=world)


@pytest.mark.parametrize(
    "truth, changes, message",
    [
        ({"rat": [0.4, 0.8]}, None, r"truth has the sites \['rat'\], expected \['rate'\]"),
        ({"rate": [0.4]}, None, r"truth\['rate'\] has shape \(1,\), expected \(2,\)"),
        ({"rate": [0.4, 0.8]}, {1: {"rate": [0.4, 0.8]}}, "changes has the step 1, expected integers of at least 2"),
        ({"rate": [0.4, 0.8]}, {5: {"rate": [0.4]}}, r"changes\[5\]\['rate'\] has shape \(1,\)"),
    ],
)
def test_a_truth_that_does_not_fit_is_refused(truth, changes, message):
    with pytest.raises(ValueError, match=message):
        Environment(bernoulli_model(2), truth, changes=changes)


SHARDED = """
import sys, jax
if len(sys.argv) > 2:
    jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
import jax.numpy as jnp, numpy as np
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]  # the second holds shared_models
from test_simulation import run
mesh = jax.make_mesh((len(jax.devices()),), ("realization",))
found = run(mesh=mesh)
summary = run(mesh=mesh, summary=True)
if jax.process_index() == 0:
    print("RESULT", len(jax.devices()), float(summary.cumulative_regret_mean[-1]), *np.asarray(found["arm"]).ravel())
"""


def sharded(arguments, devices):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-c", SHARDED, os.path.dirname(__file__), *arguments],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_sharded(process, whole, num_devices):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result = next(line.split()[1:] for line in out.splitlines() if line.startswith("RESULT"))
    assert int(result[0]) == num_devices
    assert float(result[1]) == pytest.approx(float(whole.regret.sum("step").mean()), rel=1e-6)
    np.testing.assert_array_equal(np.array(result[2:], int).reshape(12, 20), whole["arm"])


@pytest.mark.slow
def test_eight_devices_give_the_same_results(whole):
    check_sharded(sharded([], 8), whole, 8)


@pytest.mark.slow
def test_two_processes_give_the_same_results(whole):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = (sharded([f"127.0.0.1:{port}", str(number)], 2) for number in (0, 1))
    check_sharded(first, whole, 4)
    assert second.communicate(timeout=300) and second.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("factory, num_realizations", [(engines.reweight, 60), (engines.nuts, 30)])
def test_approximate_engines_have_the_regret_of_the_exact_one(factory, num_realizations):
    # Both have the same law if the draws are right, so the standard error comes from the exact engine's many runs: a few
    # runs of a skewed law, without one of the rare bad ones, underestimate it.
    exact = run(THOMPSON, num_steps=40, num_realizations=100 * num_realizations, summary=True)
    found = run(
        THOMPSON,
        engine=factory(bernoulli_model(2)),
        num_steps=40,
        num_realizations=num_realizations,
        num_samples=200,
        summary=True,
    )
    error = float(exact.final_regret.std()) * np.sqrt(1.01 / num_realizations)
    assert abs(float(found.final_regret.mean()) - float(exact.final_regret.mean())) < 3 * error


@pytest.mark.slow
def test_the_engine_of_a_bandit_simulates_in_single_precision():
    model, engine = bernoulli_model(2), engines.conjugate(bernoulli_model(2))
    bandit = Bandit(model, engine=lambda _: engine)
    bandit.update(bandit.select(), reward=1.0)
    sizes = {"num_steps": 5, "num_realizations": 8, "precision": "float32"}
    runs = simulate(jr.key(0), model, engine, selectors.thompson(), Environment.from_prior(model), **sizes)
    assert runs.regret.dtype == np.float32 and bool(np.isfinite(runs.regret).all())
