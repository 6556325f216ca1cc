"""Which split is found, what is refused and why, and that a wrong claim is not made."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import engines
from ppl_bandit.engines.proof.split import find_split
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, NotConjugate


def logistic(arm):
    with numpyro.plate("arms", 2):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(logits=(level + offset)[arm]))


def branching(arm):
    """Conjugate given `spread` on one side of 1 only: the noise's law changes there."""
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, spread))
    scale = jnp.where(spread < 3.0, 1.0, 1.0 + mean[arm] ** 2)
    numpyro.sample("reward", dist.Normal(mean[arm], scale))


def branching_far_out(arm):
    """Conjugate given `shift` above -3 only, where hardly any value is tried."""
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(mean[arm] + jnp.where(shift < -3.0, mean[arm] ** 2, shift), 1.0))


def changing_power(arm):
    """A Weibull of unknown shape: given it, the scale is Gamma in a power that depends on it."""
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("arms", 2):
        scale = numpyro.sample("scale", dist.InverseGamma(3.0, 2.0))
    numpyro.sample("reward", dist.Weibull(scale[arm], shape))


def unit_spread(arm):
    """Normal given `variance`, or InverseGamma given `mean`: the means are what decisions need."""
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))


@pytest.mark.parametrize(
    ("program", "outer", "words"),
    [
        (logistic, None, "'level' (not quadratic)"),
        (branching_far_out, ("shift",), "a comparison with a latent|a choice"),
        pytest.param(branching, ("spread",), "comparison|choice|polynomial", marks=pytest.mark.slow, id="branching"),
        pytest.param(
            changing_power,
            ("shape",),
            "not conjugate given shape|not affine|not proved to be a sum of powers",
            marks=pytest.mark.slow,
            id="changing_power",
        ),
    ],
)
def test_what_is_not_conjugate_for_every_outer_value_is_refused_with_the_reason(program, outer, words):
    with pytest.raises(NotConjugate, match=words.replace("(", r"\(").replace(")", r"\)")):
        engines.collapsed(RewardModel(program, 2), outer)


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        (("nothing",), "outer must name some of the latent sites"),
        ((), "outer must name some"),
        (("mean", "variance"), "outer names every latent site"),
    ],
)
def test_outer_sites_that_cannot_be_are_refused(outer, message):
    with pytest.raises(ValueError, match=message):
        engines.collapsed(RewardModel(unit_spread, 2), outer)


@pytest.mark.slow
def test_a_datum_that_is_not_conjugate_is_not_absorbed():
    def sometimes(arm):
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("arms", 2):
            mean = numpyro.sample("mean", dist.Normal(0.0, spread))
        numpyro.sample("reward", _Odd(mean[arm], 1.0))

    engine = engines.collapsed(RewardModel(sometimes, 2), ("spread",), num_particles=50)
    state = engine.init(jr.key(0))
    after, info = jax.jit(engine.update)(jr.key(1), state, Interaction(jnp.array([0, 1]), jnp.array([0.3, 31.4159])))
    assert not bool(info.is_trusted)
    assert info.is_certified.tolist() == [True, False]
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.slow
def test_a_datum_that_the_exact_engine_refuses_shows_which_site_is_outer():
    """Conjugate in all sites, and sent to the exact engine, but for one reward, whose density bends in `shift`."""

    def program(arm):
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        with numpyro.plate("arms", 2):
            mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        numpyro.sample("reward", _Bent(mean[arm] + shift, 1.0, shift))

    model = RewardModel(program, 2)
    with jax.enable_x64(True):
        with pytest.raises(NotConjugate, match="use engines.conjugate"):
            find_split(model, None)
        refused = Interaction(np.array([1]), {"reward": np.array([31.4159])})
        assert find_split(model, None, refused).space.names == ("shift",)


class _Bent(dist.Normal):
    """A Normal law with one reward that tells of `shift` in another way."""

    def __init__(self, loc, scale, shift):
        self.shift = shift
        super().__init__(loc, scale)

    def log_prob(self, value):
        plain = super().log_prob(value)
        return jnp.where(jnp.abs(value - 31.4159) < 1e-3, plain - self.shift**4, plain)


class _Odd(dist.Normal):
    """A Normal law whose density is another for one reward that no examination tries."""

    def log_prob(self, value):
        plain = super().log_prob(value)
        return jnp.where(jnp.abs(value - 31.4159) < 1e-3, plain - self.loc**4, plain)


def test_sites_that_are_most_of_a_program_are_outer_only_where_that_is_asked_for():
    """Given the log rates and the spread, their mean alone is Gaussian: particles would hold 5 dimensions of 6."""

    def program(arm):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("arms", 4):
            log_rate = numpyro.sample("log_rate", dist.Normal(mean, spread))
        numpyro.sample("reward", dist.Poisson(jnp.exp(log_rate[arm])))

    model = RewardModel(program, 4)
    with pytest.raises(NotConjugate, match="spread, log_rate: 5 of 6 dimensions would be outer"):
        engines.collapsed(model, is_selective=True)
    assert engines.choose(model).explanation.engine == "reweight"
