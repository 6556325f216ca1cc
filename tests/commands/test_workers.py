"""`--workers` and `--dask`: the same results as in one process."""

import contextlib
import json
import sys
from concurrent.futures import Executor, Future

import pytest

from ppl_bandit.commands.cli import main
from ppl_bandit.simulation.executors import WorkerFailed

DESIGN = ["design", "bernoulli", "--looks", "20:40:20", "--scenario", "null=.3", "--trials", "300"]


def table(options, folder, capsys):
    assert main([*DESIGN, *options, "--out", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["table"]


@pytest.mark.slow  # tests/simulation/test_executors.py compares the same executors
def test_workers_and_a_dask_scheduler_give_the_table_of_one_process(tmp_path, capsys):
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    alone = table([], tmp_path, capsys)
    assert table(["--workers", "2"], tmp_path, capsys) == alone
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        assert table(["--dask", cluster.scheduler_address], tmp_path, capsys) == alone


def test_a_scheduler_that_does_not_answer_and_a_missing_package_are_errors_in_words(tmp_path, capsys, monkeypatch):
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    monkeypatch.setattr(distributed, "Client", lambda address: (_ for _ in ()).throw(OSError("timed out")))
    command = [*DESIGN, "--dask", "tcp://127.0.0.1:1", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "--dask tcp://127.0.0.1:1: no scheduler answers (timed out)" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main(command) == 2
    assert "pip install 'ppl_bandit[dask]'" in capsys.readouterr().err


class Failing(Executor):
    """Runs some tasks at once, and fails in the others."""

    def __init__(self, error, num_done):
        self.error, self.left = error, num_done

    def submit(self, function, /, *arguments):
        future, self.left = Future(), self.left - 1
        if self.left >= 0:
            future.set_result(function(*arguments))
        else:
            future.set_exception(self.error)
        return future


@pytest.mark.parametrize(
    ("error", "num_done", "status", "said"),
    [
        pytest.param(KeyboardInterrupt(), 1, 130, "the finished trials are kept", marks=pytest.mark.slow),
        (ConnectionError("it is gone"), 0, 2, "the executor lost its workers or its scheduler"),
        (WorkerFailed("a worker cannot load the program"), 0, 2, "ppl-bandit design: a worker cannot load the program"),
    ],
)
def test_a_design_that_is_interrupted_says_so_and_workers_that_fail_are_errors_in_words(
    error, num_done, status, said, tmp_path, capsys, monkeypatch
):
    pool = contextlib.nullcontext(Failing(error, num_done))
    monkeypatch.setattr("ppl_bandit.commands.design.executor_of", lambda arguments: pool)
    monkeypatch.setattr("ppl_bandit.commands.cli.os._exit", lambda status: None)
    assert main([*DESIGN, "--out", str(tmp_path)]) == status
    assert said in capsys.readouterr().err
    if num_done:
        assert "256 (null), interrupted before all had finished" in (tmp_path / "report.html").read_text()
