"""What a bandit does before its first decision and update, counted and not timed: operations traced."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, Capabilities, Interaction, RewardModel, engines
from ppl_bandit.engines.exact.proof.assignment import find_scales, read_supports
from ppl_bandit.engines.exact.proof.examination import measure
from ppl_bandit.engines.exact.proof.gaussian_blocks import tie
from ppl_bandit.runtime.compile_ahead import Ahead
from ppl_bandit.runtime.jax_adapter import all_equations


def conversion(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def linear(arm, context):
    with numpyro.plate("arms", 2):
        variance = numpyro.sample("variance", dist.InverseGamma(1.0, 1.0))
        prior = dist.Normal(jnp.ones(3), jnp.sqrt(variance)[:, None])
        weights = numpyro.sample("weights", prior.to_event(1))
    mean = jnp.sum(weights[arm] * context, axis=-1)
    numpyro.sample("reward", dist.Normal(mean, jnp.sqrt(variance[arm])))


@pytest.mark.parametrize(
    "program, num_arms, context, most_examined, most_learnt",
    [(conversion, 3, None, 1600, 930), (linear, 2, np.full(3, 0.5), 3370, 1800)],
)
def test_an_examination_and_an_update_are_small_programs(program, num_arms, context, most_examined, most_learnt):
    """A quarter of a millisecond of a start is one operation, traced, lowered and compiled; families that a program does not
    have add none. A tenth above what there were when this was written.
    """
    with jax.enable_x64(True):
        model = RewardModel(program, num_arms, context)
        layout = tie(model, find_scales(model, read_supports(model)))
        examined = jax.make_jaxpr(lambda: measure(model, layout, []))()
        engine = engines.conjugate(model)
        row = Interaction(jnp.zeros(1, int), jnp.ones(1), model.context_rows(1))
        learnt = jax.make_jaxpr(engine.update)(jr.key(0), engine.init(jr.key(0)), row)
    assert len(list(all_equations(examined.jaxpr))) <= most_examined
    assert len(list(all_equations(learnt.jaxpr))) <= most_learnt


def bent(arm):
    """A textbook pair by its distributions, and not conjugate."""
    with numpyro.plate("arms", 2):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(jnp.exp(level[arm]), 1.0))


def hierarchy(arm):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("arms", 2):
        level = numpyro.sample("level", dist.Normal(0.0, spread))
    numpyro.sample("reward", dist.Normal(level[arm], 1.0))


@pytest.mark.parametrize(
    "program, num_traced, engine",
    [
        (conversion, 1, "conjugate"),
        pytest.param(bent, 2, "reweight", marks=pytest.mark.slow),
        pytest.param(hierarchy, 1, "collapsed", marks=pytest.mark.slow),
    ],
)
def test_a_decision_is_traced_while_its_engine_is_proved_and_compiled_only_if_it_is(
    program, num_traced, engine, monkeypatch
):
    said = []

    def noted(step):
        original = getattr(Ahead, step)

        def call(self, *given):
            if self._function.__name__ == "select":
                said.append(step)
            return original(self, *given)

        return call

    for step in ("_lower", "_compile"):
        monkeypatch.setattr(Ahead, step, noted(step))
    proofs = []

    def factory(model):
        found = engines.choose(model)
        proofs.append(list(said))
        return found

    bandit = Bandit(program, 3 if program is conversion else 2, engine=factory, num_samples=16)
    bandit.select()
    assert bandit.explanation.engine == engine
    # Before the engine was there: traced where it looked conjugate. Never twice for one engine, and compiled once.
    assert ("_lower" in proofs[0]) == (program is not hierarchy)
    assert said.count("_lower") == num_traced and said.count("_compile") == 1


@pytest.mark.slow
def test_an_engine_that_decides_otherwise_than_the_one_that_was_proved_is_traced_itself():
    without_law = Bandit(
        conversion,
        3,
        engine=lambda model: engines.conjugate(model)._replace(capabilities=Capabilities()),
        num_samples=16,
    )
    by_draws = Bandit(conversion, 3, engine=engines.conjugate, num_samples=16, draws=True)
    # By the law of p-hat other random numbers would be spent, and 20 of these arms be others.
    arms = ([bandit.select().arm for _ in range(30)] for bandit in (without_law, by_draws))
    np.testing.assert_array_equal(*arms)
