"""`--workers` and `--dask`: the same results as in one process."""

import json
import sys

import pytest

from ppl_bandit.commands.cli import main

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
