"""CPU threads: programs that factorize matrices do not deadlock."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.runtime.compile_ahead import CompiledAhead, lower
from ppl_bandit.runtime.cpu_threads import needs_limit


def factorized(matrices, numbers):
    """Work for all threads of XLA's pool, so that what follows runs in one of them, and then a batch of factorizations."""
    scale = 1.0 + 1e-9 * jnp.sum(jnp.tanh(jnp.sin(numbers) + jnp.cos(numbers) * matrices[0, 0, 0]))
    return jnp.sum(jnp.linalg.cholesky(scale * matrices))


def test_threads_that_factorize_batches_do_not_wait_for_each_other_forever():
    """Without the limit every such run was stuck within a few calls, on two cores and jaxlib 0.10.2."""
    rng = np.random.default_rng(0)
    half = rng.normal(size=(64, 40, 40))
    matrices, numbers = half @ half.transpose(0, 2, 1) + np.eye(40), rng.normal(size=(256, 1000))
    run = CompiledAhead(factorized)
    with jax.enable_x64(True):
        expected, found = float(run(matrices, numbers)), []

    def work():
        with jax.enable_x64(True):
            for _ in range(20):
                found.append(float(run(matrices, numbers)))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60.0
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    assert not any(thread.is_alive() for thread in threads)
    np.testing.assert_allclose(found, [expected] * 80, rtol=1e-12)


def test_batches_of_one_program_do_not_wait_for_each_other_forever():
    """Side by side, as XLA schedules them, three were stuck within seconds, on two cores and jaxlib 0.10.2."""
    half = np.random.default_rng(0).normal(size=(500, 13, 13))
    matrices = half @ half.transpose(0, 2, 1) + np.eye(13)

    def factorize(matrices):
        return jnp.stack([jnp.sum(jnp.linalg.cholesky(matrices + i * jnp.eye(13))) for i in range(3)])

    done = []

    def work():
        with jax.enable_x64(True):
            run = lower(jax.jit(factorize).trace(matrices))()
            done.extend(np.asarray(run(matrices))[0] for _ in range(300))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()
    np.testing.assert_allclose(done, [np.linalg.cholesky(matrices).sum()] * 300, rtol=1e-12)


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (jnp.linalg.cholesky, (100, 100), False),  # one matrix
        (jnp.linalg.cholesky, (5, 10, 10), False),  # a batch that jaxlib does not split
        (jnp.linalg.cholesky, (64, 40, 40), True),
        (jax.vmap(lambda m: jnp.linalg.qr(m, mode="r")), (256, 50, 5), True),
        (lambda m: jax.lax.map(jnp.linalg.cholesky, m), (64, 40, 40), False),  # one after another
        (lambda m: jax.lax.scan(lambda c, _: (jnp.linalg.eigh(c)[1], None), m, None, 3), (64, 8, 8), True),
        (jnp.sum, (1000, 40, 40), False),
    ],
)
def test_programs_with_large_batches_of_matrices_are_limited(function, shape, expected):
    with jax.enable_x64(True):
        assert needs_limit(jax.make_jaxpr(function)(jnp.ones(shape))) == expected
