"""Chunks on the workers of an executor: the same numbers as in this process, also after a worker's death."""

import multiprocessing
import os
import signal
import subprocess
import sys
import types
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray
from shared_models import bernoulli_engine, bernoulli_model, prior_engine

import ppl_bandit.trials.operating_characteristics as oc
from ppl_bandit import (
    Design,
    Environment,
    RewardModel,
    calibrate,
    operating_characteristics,
    rows_for_power,
    selectors,
    simulate,
    stopping,
    sweep_priors,
    tune,
)
from ppl_bandit.paper import runs as paper
from ppl_bandit.simulation import executors

DESIGN = Design([20, 40], selector=selectors.thompson(), allocation="looks", stopping=[stopping.superiority(0.9)])
SCENARIOS = {"null": 0.5, "gap": [0.4, 0.6]}


def simulated(executor=None, **settings):
    world = Environment(bernoulli_model(2), {"rate": np.array([0.4, 0.8])})
    settings = {"num_steps": 10, "num_realizations": 150, "num_samples": 20, "summary": True} | settings
    select = settings.pop("selector", selectors.thompson())
    return simulate(0, bernoulli_model(2), bernoulli_engine(2), select, world, executor=executor, **settings)


def trials(executor=None, **settings):
    settings = {"num_trials": 600, "engine": bernoulli_engine(2), "executor": executor} | settings
    return operating_characteristics(bernoulli_model(2), DESIGN, SCENARIOS, **settings)


def tuned(executor=None, **settings):
    candidates = [selectors.thompson(), selectors.greedy(), selectors.optimistic_gittins(10, 0.1)]
    settings = {"selectors": candidates, "engine": bernoulli_engine(2), "num_worlds": 20, "num_samples": 20} | settings
    return tune(bernoulli_model(2), 10, executor=executor, **settings)


def spawned(num_workers):
    return ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def here():
    return simulated().drop_attrs(), trials().dataset


def assert_same(executor, here):
    xarray.testing.assert_identical(simulated(executor).drop_attrs(), here[0])
    xarray.testing.assert_identical(trials(executor).dataset, here[1])


class Recorded(Executor):
    """Runs every task at once, and keeps what was sent."""

    def __init__(self):
        self.payloads, self.num = [], 0

    def submit(self, function, /, *arguments):
        self.payloads.append(arguments[0])
        self.num += 1
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def test_an_executor_gives_the_numbers_of_this_process_and_workers_compile_each_study_once(here):
    before = len(executors._COMPILED)
    assert_same(executor := Recorded(), here)
    assert len(set(executor.payloads)) == len(executors._COMPILED) - before == 2  # both scenarios are one study
    assert max(map(len, executor.payloads)) < 10_000


@pytest.mark.slow
def test_a_worker_that_is_killed_half_way_changes_nothing_and_is_replaced(here, monkeypatch):
    killed = []

    def kill_first(num):  # after the first chunk, while the others run
        if not killed:
            killed.append(next(iter(pool._processes)))
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(oc, "progress_reporter", lambda *arguments: kill_first)
    with spawned(2) as pool:
        xarray.testing.assert_identical(trials(pool, progress=True).dataset, here[1])
    assert killed


@pytest.mark.slow
def test_calibrate_tune_and_the_papers_grids_give_the_same_numbers_with_an_executor(monkeypatch):
    monkeypatch.setattr(paper, "_GRID_STEPS", 20)
    settings = {"num_trials": 600, "engine": bernoulli_engine(2)}
    alone = (
        calibrate(bernoulli_model(2), DESIGN, 0.5, **settings),
        tuned(),
        paper.bernoulli_grid(2, 2, 5, precision="float64"),
    )
    executor = Recorded()
    there = (
        calibrate(bernoulli_model(2), DESIGN, 0.5, executor=executor, **settings),
        tuned(executor),
        paper.bernoulli_grid(2, 2, 5, precision="float64", executor=executor),
    )
    assert there[0].calibration == alone[0].calibration and there[1].standings == alone[1].standings
    for found, expected in zip(jax.tree.leaves(there[2]), jax.tree.leaves(alone[2]), strict=True):
        np.testing.assert_array_equal(found, expected)


MESH = """
import sys, jax
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]  # the second holds shared_models
from test_executors import trials
mesh = jax.make_mesh((len(jax.devices()),), ("trial",))
trials(mesh=mesh).dataset.to_netcdf(sys.argv[2])
"""


@pytest.mark.slow
def test_trials_spread_over_four_devices_are_the_same(here, tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MESH, os.path.dirname(__file__), str(tmp_path / "trials.nc")]
    subprocess.run(command, env=environment, check=True, timeout=300)
    with xarray.open_dataset(tmp_path / "trials.nc") as found:
        for name, expected in here[1].data_vars.items():  # chunks have another size there, which changes the last digit
            np.testing.assert_allclose(found[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_loky_gives_the_same_numbers(here):
    loky = pytest.importorskip("loky", reason="loky is not installed")
    pool = loky.ProcessPoolExecutor(2)
    assert_same(pool, here)
    expected = tuned().regret
    for name, regret in tuned(pool).regret.items():
        np.testing.assert_array_equal(regret, expected[name])
    pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL)
    xarray.testing.assert_identical(trials(pool).dataset, here[1])


@pytest.mark.slow  # above, an executor that sends what is pickled; test_workers.py has the command's errors
def test_two_workers_of_a_dask_cluster_give_the_same_numbers(here):
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        xarray.testing.assert_identical(trials(client.get_executor()).dataset, here[1])


class Interrupted(Recorded):
    """An executor whose third task, or that of another number, fails with an error."""

    def __init__(self, error, num_done=2):
        super().__init__()
        self.error, self.num_done = error, num_done

    def submit(self, function, /, *arguments):
        if self.num < self.num_done:
            return super().submit(function, *arguments)
        future = Future()
        future.set_exception(self.error)
        return future


class KilledWorker(Exception):
    """As Dask calls a task during which several workers died."""


KilledWorker.__module__ = "distributed.scheduler"


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), ConnectionError("the scheduler is gone"), KilledWorker("play")],
    ids=["Ctrl-C", "lost", "killed"],
)
def test_finished_chunks_are_kept_if_the_user_interrupts_or_the_scheduler_is_lost(error, here, capsys):
    runs = simulated(Interrupted(error))
    assert runs.sizes["realization"] == 100 and runs.attrs["is_complete"] == 0  # two of three chunks of 50
    np.testing.assert_array_equal(runs.final_regret, here[0].final_regret[:100])
    found = trials(Interrupted(error))
    assert not found.is_complete and found.dataset.sizes["trial"] == 512
    np.testing.assert_array_equal(found.dataset.arm[0], here[1].arm[0, :512])
    said = capsys.readouterr().err
    assert said.count("are kept") == 2 and ("scheduler" in said) == isinstance(error, Exception)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConnectionError])
def test_what_needs_all_trials_or_candidates_says_that_some_are_missing(error, capsys):
    model, engine = bernoulli_model(2), bernoulli_engine(2)
    settings = {"num_trials": 300, "engine": engine}  # two chunks each
    with pytest.raises((KeyboardInterrupt, executors.ExecutorLost)):  # one chunk of the first number of rows
        rows_for_power(model, DESIGN, [0.4, 0.6], executor=Interrupted(error(), 1), **settings)
    with pytest.raises((KeyboardInterrupt, executors.ExecutorLost)):
        calibrate(model, DESIGN, 0.5, executor=Interrupted(error(), 3), **settings)
    for num_done, rows in ((3, ["first", "second"]), (2, ["first"])):
        executor = Interrupted(error(), num_done)
        table = sweep_priors({"first": model, "second": model}, DESIGN, {"a": 0.5}, executor=executor, **settings)
        assert [prior for prior, _ in table.index] == rows and table.attrs["is_complete"] == 0
    capsys.readouterr()
    candidates = {"first": selectors.thompson(), "second": selectors.greedy()}
    found = tuned(Interrupted(error(), 2), selectors=candidates, engine=prior_engine(model))  # two chunks of the first
    assert list(found.regret) == ["first"] and not found.is_complete
    assert "the 1 candidates that have played are compared" in capsys.readouterr().err


def test_a_selector_of_which_no_realization_has_finished_is_missing():
    both = {"first": selectors.thompson(), "second": selectors.thompson()}
    found = simulated(Interrupted(KeyboardInterrupt(), 3), selector=both)  # the three chunks of the first
    assert found.selector.values.tolist() == ["first"] and found.attrs["is_complete"] == 0


def test_an_error_of_a_chunk_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError):
        simulated(Interrupted(ZeroDivisionError()))


def test_a_program_that_a_worker_cannot_load_is_named(monkeypatch):
    def program(arm):
        with numpyro.plate("arms", 2):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    module = types.ModuleType("only_here")  # a worker process does not have it
    program.__module__, program.__qualname__, module.program = "only_here", "program", program
    monkeypatch.setitem(sys.modules, "only_here", module)
    model = RewardModel(program, 2)

    class Elsewhere(Recorded):
        def submit(self, function, /, *arguments):
            monkeypatch.delitem(sys.modules, "only_here", raising=False)
            return super().submit(function, *arguments)

    with pytest.raises(executors.WorkerFailed, match="cannot load the program.*only_here"):
        operating_characteristics(model, DESIGN, 0.5, num_trials=10, engine=prior_engine(model), executor=Elsewhere())


def test_executors_that_cannot_work_are_refused_in_words():
    with pytest.raises(ValueError, match=r"client.get_executor\(\)"):
        simulated(3)
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool,
        pytest.raises(ValueError, match="spawn"),
    ):
        trials(pool)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="together with mesh"):
        simulated(pool, mesh="devices")


def test_a_scenario_with_bad_values_is_named_before_anything_runs():
    with pytest.raises(ValueError, match=r"scenario 'bad'.*\[0.4, nan\]"):
        operating_characteristics(bernoulli_model(2), DESIGN, {"good": 0.5, "bad": [0.4, np.nan]}, executor=Recorded())
