"""Functions that are compiled in the background before they are called."""

import contextlib
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.runtime.compile_ahead import CompiledAhead


def test_each_form_is_compiled_once_and_prepared_forms_before_the_call(count_compilations):
    def double(x):
        return 2 * x

    ahead = CompiledAhead(double)
    with jax.enable_x64(True), count_compilations() as compiled:
        ahead.prepare(np.zeros(3))
        ahead.wait()
        assert compiled.count("jit(double)") == 1
        for size in (3, 4, 3, 4):
            np.testing.assert_array_equal(ahead(np.ones(size)), 2 * np.ones(size))
    assert compiled.count("jit(double)") == 2


def test_an_error_while_tracing_is_raised_to_the_caller():
    wrong = CompiledAhead(lambda x: jnp.reshape(x, (2,)))
    with jax.enable_x64(True):
        for _ in range(2):
            with pytest.raises(TypeError, match="reshape"):
                wrong(np.ones(3))


def test_a_function_that_cannot_be_traced_in_the_background_is_traced_by_its_caller():
    threads = []

    def double(x):
        threads.append(threading.current_thread().name)
        if x.size == 4 and threads[-1] != "MainThread":
            raise RuntimeError("cannot be traced in this thread")
        return 2 * x

    ahead = CompiledAhead(double)
    with jax.enable_x64(True):
        for size in (3, 4):
            ahead.prepare(np.zeros(size), is_traced_later=True)
        ahead.wait()
        assert len(threads) == 2 and "MainThread" not in threads
        for size in (3, 4, 3, 4):
            np.testing.assert_array_equal(ahead(np.ones(size)), 2 * np.ones(size))
    assert threads[2:] == ["MainThread"]


def test_settings_of_the_callers_thread_are_those_of_the_trace():
    threads = []

    def product(x):
        threads.append(threading.current_thread().name)
        return x @ x

    ahead = CompiledAhead(product)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        ahead.prepare(np.zeros((3, 3)), is_traced_later=True)
        ahead.wait()
        ahead(np.zeros((3, 3)))
        text = jax.jit(product).lower(np.zeros((3, 3))).as_text()
        assert "HIGHEST" in text and set(threads) == {"MainThread"}


def test_what_a_context_forbids_in_the_background_is_traced_by_the_caller():
    @contextlib.contextmanager
    def forbidding():
        allowed[0] = False
        yield
        allowed[0] = True

    def halved(x):
        if not allowed[0]:
            raise RuntimeError("not here")
        return x / 2

    allowed = [True]
    ahead = CompiledAhead(halved, background=forbidding)
    with jax.enable_x64(True):
        ahead.prepare(np.ones(3), is_traced_later=True)
        ahead.wait()
        allowed[0] = True
        np.testing.assert_array_equal(ahead(np.ones(3)), 0.5)


@pytest.mark.parametrize("program", [b"", b"garbled"])
def test_an_exported_function_that_cannot_be_read_is_traced_instead(program):
    first, second = CompiledAhead(jnp.sin, is_exported=True), CompiledAhead(jnp.sin)
    with jax.enable_x64(True):
        first.prepare(np.ones(3))
        second.exported = first.exported._replace(program=program)
        second.prepare(np.ones(3))
        np.testing.assert_array_equal(second(np.ones(3)), first(np.ones(3)))
    assert first.exported is not None and second.exported is None


def test_threads_that_call_an_uncompiled_function_at_once_all_get_its_value():
    begun, found = threading.Barrier(4), []

    def slow(x):
        for _ in range(300):  # tracing takes long enough for the others to arrive
            x = jnp.sin(x)
        return x

    ahead = CompiledAhead(slow)

    def call():
        begun.wait()
        with jax.enable_x64(True):
            found.append(np.asarray(ahead(np.zeros(3))))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and not np.any(found)


@pytest.mark.parametrize(
    "settings, expected",
    [({}, "ppl_bandit/jax"), ({"PPL_BANDIT_CACHE": "off"}, "None"), ({"JAX_COMPILATION_CACHE_DIR": "mine"}, "mine")],
)
def test_compiled_programs_are_kept_in_the_users_cache_unless_the_user_set_another_folder(settings, expected, tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PPL_BANDIT"))}
    script = "import ppl_bandit.runtime.compile_ahead, jax; print(jax.config.jax_compilation_cache_dir)"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=clean | {"XDG_CACHE_HOME": str(tmp_path)} | settings,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.strip().endswith(expected), ended.stderr
