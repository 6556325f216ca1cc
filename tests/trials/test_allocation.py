"""Allocation between looks equals an independent version on random inputs, to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_rules import reallocated

from ppl_bandit.trials.allocation import allocation_probs
from ppl_bandit.trials.design import Design

NUM_ARMS, NUM_CASES = 5, 1000
DESIGNS = [
    {},
    {"softening": 0.5},
    {"floors": 0.1, "softening": 0.5},
    {"caps": 0.4},
    {"floors": (0.05, 0.2, 0.0, 0.1, 0.15), "caps": (0.3, 1.0, 0.5, 0.9, 0.6), "softening": 0.7},
    {"control": 1, "control_share": 0.3, "floors": 0.05},
    {"control": 1, "control_share": "sqrt"},
    {"control": 1, "control_share": "sqrt", "floors": 0.1, "caps": 0.5, "softening": 0.3},
    {"control": 1, "control_share": "match", "softening": 0.5},
    {"control": 1, "control_share": "match", "floors": 0.12, "rescale": True},
]


def reference(settings, probs, active):
    arms = np.flatnonzero(active)
    place = {arm: index for index, arm in enumerate(arms)}
    factor = NUM_ARMS / arms.size if settings.get("rescale") else 1.0
    low = np.broadcast_to(settings.get("floors", 0.0), NUM_ARMS)[arms] * factor
    high = 1.0 - (1.0 - np.broadcast_to(settings.get("caps", 1.0), NUM_ARMS)[arms]) * factor
    fixed, share = np.full(arms.size, np.nan), settings.get("control_share")
    if share not in (None, "match") and arms.size > 1:
        others = arms.size - 1
        fixed[place[1]] = np.sqrt(others) / (np.sqrt(others) + others) if share == "sqrt" else share
    match = place[1] if share == "match" and arms.size > 1 else None
    found = np.zeros(NUM_ARMS)
    found[arms] = reallocated(probs[arms], fixed, low, high, settings.get("softening", 1.0), match)
    return found


@pytest.mark.parametrize("settings", DESIGNS, ids=str)
def test_allocation_equals_an_independent_version(settings):
    rng = np.random.default_rng(5)
    probs = rng.dirichlet(np.full(NUM_ARMS, 0.5), NUM_CASES)
    active = rng.random((NUM_CASES, NUM_ARMS)) < 0.7
    active[:, 1] = True
    probs = np.where(active, probs, 0.0)
    probs = probs / probs.sum(axis=1, keepdims=True)
    design = Design([10], allocation="looks", **settings)
    with jax.enable_x64(True):
        found = np.asarray(
            jax.jit(jax.vmap(lambda p, a: allocation_probs(design, p, a, 1)))(jnp.asarray(probs), jnp.asarray(active))
        )
    expected = np.stack([reference(settings, *case) for case in zip(probs, active, strict=True)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)  # 10 designs x 1,000 inputs
