"""Programs whose latents move: which sites move, the density of a step, and what is refused."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import normal, per_arm

from ppl_bandit import RewardModel
from ppl_bandit.types import InvalidProgram


def drifting(arm, *, previous=None, elapsed=1.0):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    step = 0.1 * jnp.sqrt(elapsed)
    law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(0.9 * previous["level"], step)
    normal(per_arm("level", law, 3)[arm], spread)


def test_a_site_sampled_from_previous_moves_and_the_others_are_static():
    model = RewardModel(drifting, 3)
    assert model.moving_sites == ("level",)
    assert not model.has_clock
    previous = {"level": jnp.array([0.1, 0.2, 0.3]), "spread": jnp.array(0.7)}
    level = jnp.array([0.0, 0.3, 0.2])
    own = model.log_transition({"level": level}, previous, 4.0)
    expected = dist.Normal(0.9 * previous["level"], 0.2).log_prob(level).sum()
    np.testing.assert_allclose(own, expected, rtol=1e-6)
    drawn = model.draw_transition(jr.key(1), previous, 1e-12)
    np.testing.assert_allclose(drawn["level"], 0.9 * previous["level"], atol=1e-5)
    assert drawn["spread"] == previous["spread"]


def test_the_likelihood_and_the_table_need_no_previous():
    model = RewardModel(drifting, 3)
    draws = {"level": jnp.arange(6.0).reshape(2, 3), "spread": jnp.ones(2)}
    np.testing.assert_allclose(model.expected_rewards(draws), draws["level"])


def test_a_time_in_the_context_is_the_clock():
    def program(arm, context, *, previous=None, elapsed=1.0):
        normal(
            numpyro.sample("level", dist.Normal(0.0 if previous is None else previous["level"], elapsed)) + 0.0 * arm
        )

    assert RewardModel(program, 2, context={"time": 0.0}).has_clock
    assert not RewardModel(program, 2, context={"age": 0.0}).has_clock


def test_the_fingerprint_depends_on_the_step_alone():
    def at(scale):
        def program(arm, *, previous=None):
            law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(previous["level"], scale)
            normal(numpyro.sample("level", law) + 0.0 * arm)

        return RewardModel(program, 2).artefact.fingerprint

    assert at(0.1) == at(0.1) != at(0.2)


REWARD = 'numpyro.sample("reward", dist.Normal(level + 0.0 * arm, 1.0))'


def level_of(law):
    return f'level = numpyro.sample("level", {law})'


LEVEL = level_of('dist.Normal(0.0 if previous is None else previous["level"], 1.0)')
REFUSED = [  # words of the refusal, a program but for its last line, and its keywords if they are others
    ("after a star", LEVEL, "previous=None"),
    ("after a star", LEVEL, "*, previous=()"),
    ("but not `previous`", level_of("dist.Normal(0.0, elapsed)"), "*, elapsed=1.0"),
    ("no latent is sampled", level_of("dist.Normal(0.0, 1.0)")),
    ("KeyError: 'lvl'", level_of('dist.Normal(0.0 if previous is None else previous["lvl"], 1.0)')),
    ("same sites", f'{LEVEL}\nif previous is not None:\n    numpyro.sample("b", dist.Normal())'),
    (
        "shape (2,) at the first step and ()",
        'mean = jnp.zeros(2) if previous is None else previous["level"].sum()\n'
        + level_of("dist.Normal(mean, 1.0)")
        + ".sum()",
    ),
    ("one support", level_of('dist.Normal() if previous is None else dist.LogNormal(previous["level"])')),
    (
        "'reward' depends on previous",
        f'{LEVEL}\nback = 0.0 if previous is None else previous["level"]\nlevel = level + back',
    ),
    ("is static, but", f'{LEVEL}\nnumpyro.sample("child", dist.Normal(level, 1.0))'),
    (
        "'b' has one distribution at the first step and another",
        f'{LEVEL}\nnumpyro.sample("b", dist.Normal(0.0, 1.0 if previous is None else 2.0))',
    ),
    (
        "'f' depends on previous",
        f'{LEVEL}\nnumpyro.factor("f", 0.0 if previous is None else level - previous["level"])',
    ),
    (
        "depends on arm",
        'mean = 0.0 if previous is None else previous["level"] + 0.0 * arm.sum()\n'
        + level_of("dist.Normal(mean, 1.0)"),
    ),
    (
        "no finite density",
        'scale = 1.0 if previous is None else 0.0\nmean = 0.0 if previous is None else previous["level"]\n'
        + level_of("dist.Normal(mean, scale)"),
    ),
]


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_cannot_be_read_is_refused_with_the_reason(case):
    message, body, keywords = (*case, "*, previous=None")[:3]
    scope: dict = {}
    lines = "\n".join(f"    {line}" for line in [*body.splitlines(), REWARD])
    setup = "import jax.numpy as jnp, numpyro, numpyro.distributions as dist"
    exec(f"{setup}\ndef program(arm, {keywords}):\n{lines}", scope)  # noqa: S102 - one short program per case
    with pytest.raises(InvalidProgram) as refusal:
        RewardModel(scope["program"], 2)
    assert message in str(refusal.value)
