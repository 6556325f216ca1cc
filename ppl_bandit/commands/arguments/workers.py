"""The executor that `--workers` or `--dask` names."""

import argparse
import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor


@contextlib.contextmanager
def executor_of(arguments: argparse.Namespace) -> Iterator[Executor | None]:
    """Start the executor that the arguments name, and end it afterwards; None computes in this process.

    Raises:
        ValueError: if the package for it is missing, or no scheduler answers.
    """
    if arguments.dask is not None:
        try:
            from distributed import Client
        except ImportError:
            raise ValueError("--dask needs the package distributed: pip install 'ppl_bandit[dask]'") from None
        try:
            client = Client(arguments.dask)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--dask {arguments.dask}: no scheduler answers ({error}): start `dask scheduler`"
            ) from None
        with client:
            yield client.get_executor()
    elif arguments.workers:
        # Ctrl-C reaches every process of a terminal: only this one acts on it.
        pool = ProcessPoolExecutor(
            arguments.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),
        )
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    else:
        yield None
