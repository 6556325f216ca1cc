"""Linear algebra on one thread: while programs that factorize large matrices run, and no longer."""

import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from ppl_bandit.runtime import blas_threads
from ppl_bandit.runtime.compile_ahead import Ahead
from ppl_bandit.runtime.cpu_threads import needs_of


class Library:
    """Stands for a library of linear algebra, and remembers on how many threads it was told to run."""

    def __init__(self):
        self.num_threads, self.told = 4, []

    def set_num_threads(self, number):
        self.num_threads = number
        self.told.append(number)


@pytest.fixture
def library(monkeypatch):
    found = Library()
    monkeypatch.setattr(blas_threads, "_libraries", lambda: [found])
    return found


def test_threads_that_come_and_go_leave_it_as_it_was(library):
    inside, may_leave = threading.Event(), threading.Event()

    def other():
        with blas_threads.one_thread():
            inside.set()
            may_leave.wait(10)

    thread = threading.Thread(target=other)
    with blas_threads.one_thread():
        thread.start()
        assert inside.wait(10)
    assert library.num_threads == 1  # the other is still at it
    may_leave.set()
    thread.join(10)
    assert library.told == [1, 4]
    with pytest.raises(ZeroDivisionError), blas_threads.one_thread():
        raise ZeroDivisionError
    assert library.told == [1, 4, 1, 4]


@pytest.mark.parametrize(("size", "expected"), [(10, []), (40, [1, 4])])
def test_a_program_runs_on_one_thread_where_its_matrices_are_large(library, size, expected):
    run = Ahead(jnp.linalg.cholesky)
    with jax.enable_x64(True):
        matrix = 4.0 * jnp.eye(size)
        assert needs_of(jax.make_jaxpr(jnp.linalg.cholesky)(matrix)) == (False, bool(expected))
        assert jnp.all(run(matrix) == 2.0 * jnp.eye(size))
    assert library.told == expected


def test_the_environment_decides_first(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    blas_threads._libraries.cache_clear()
    try:
        assert blas_threads._libraries() == []
    finally:
        blas_threads._libraries.cache_clear()


def test_what_jax_calls_is_found(monkeypatch):
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    blas_threads._libraries.cache_clear()
    try:
        libraries = blas_threads._libraries()
        assert libraries or sys.platform != "linux"
        before = [library.num_threads for library in libraries]
        with blas_threads.one_thread():
            assert [library.num_threads for library in libraries] == [1] * len(libraries)
        assert [library.num_threads for library in libraries] == before
    finally:
        blas_threads._libraries.cache_clear()
