"""Whatever the route to a decision - law of p-hat, joint law of the arms, draws of all latents - its law is the same."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import bernoulli, learnt, normal, per_arm, rows_of
from shared_models import bernoulli_engine, bernoulli_model, bernoulli_program

from ppl_bandit import RewardModel, engines, selectors
from ppl_bandit.engines.decide import decision_function

NUM_SAMPLES, NUM_RUNS = 40, 3000
DOUBLE = selectors.double_sampling()


conversion = bernoulli_program(3)


def alike(arm, context):
    """Arms 1 and 2 are one and the same: they tie in every draw."""
    common = numpyro.sample("common", dist.Normal(0.0, 1.0))
    own = numpyro.sample("own", dist.Normal(jnp.zeros(2), 0.5).to_event(1))
    mean = common + jnp.concatenate([own, own[1:]])[arm] * context
    normal(mean)


def one_noise(arm):
    """All arms share one unknown variance, so that they are dependent."""
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0))
    mean = per_arm("mean", dist.Normal(0.0, jnp.sqrt(variance)), 3)
    normal(mean[arm], jnp.sqrt(variance))


def priced(arm):
    """Arm 0 is given away: what it earns is sure, and the others' laws differ by a factor."""
    rate = per_arm("rate", dist.Beta(1.0, 1.0), 3)
    numpyro.deterministic("expected_reward", jnp.array([0.0, 5.0, 3.0])[arm] * rate[arm])
    bernoulli(rate[arm])


@functools.cache
def proved(program, context=None):
    """A reward model of three arms and its exact engine; called in double precision."""
    if program is conversion:
        return bernoulli_model(3), bernoulli_engine(3)
    model = RewardModel(program, 3, context)
    return model, engines.conjugate(model)


def decisions(program, context, rewards, draws):
    """Return p-hat, arm and N of many decisions on the same posterior."""
    with jax.enable_x64(True):
        model, engine = proved(program, context)
        contexts = None if context is None else np.full(len(rewards), context)
        state, _ = learnt(engine, rows_of(np.arange(len(rewards)) % 3, rewards, contexts))
        marginals = engine.capabilities.marginals(state, context)

        def one(key):
            decide = decision_function(model.expected_rewards, engine, DOUBLE, NUM_SAMPLES, draws)
            chosen = decide(*jr.split(key), state, context, jnp.asarray(7))
            return chosen.best_arm_probs, chosen.arm, chosen.num_candidates

        found = jax.device_get(jax.jit(jax.vmap(one))(jr.split(jr.key(1 + draws), NUM_RUNS)))
    return marginals, found


@pytest.mark.slow  # statistical; test_selector_contract.py compares plays with propensities
@pytest.mark.parametrize(
    "program, context, rewards, route",
    [
        (conversion, None, [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0], "p-hat"),
        (priced, None, [1.0, 0.0, 1.0, 0.0, 1.0, 1.0], "p-hat"),
        (alike, 0.7, [0.3, -0.2, 0.1, 0.9, 0.4, 0.2], "table"),
        (one_noise, None, [0.3, -0.2, 0.1, 0.9, 0.4, 0.2], "table"),
    ],
)
def test_every_route_has_the_law_of_the_draws(program, context, rewards, route):
    marginals, short = decisions(program, context, rewards, False)
    _, long = decisions(program, context, rewards, True)
    assert (marginals.best_arm_probs is not None) == (route == "p-hat")
    assert (marginals.table is not None) == (route == "table")
    if program is alike:
        np.testing.assert_array_equal(short[0][:, 1], short[0][:, 2])

    # Means of the same quantity over independent runs differ by less than 4.5 standard errors of their difference, but for
    # one comparison in 150,000; the quadrature behind p-hat adds less than 1e-4.
    def compare(quantity):
        ours, theirs = quantity(*short), quantity(*long)
        error = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / NUM_RUNS)
        assert np.all(np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) <= 4.5 * error + 1e-4)

    compare(lambda probs, arm, num: probs)
    compare(lambda probs, arm, num: probs**2)
    compare(lambda probs, arm, num: probs[:, :1] * probs)
    compare(lambda probs, arm, num: (arm[:, None] == np.arange(3)).astype(float))
    compare(lambda probs, arm, num: (num[:, None] == np.arange(1, 4)).astype(float))
    compare(lambda probs, arm, num: np.log(num))


@pytest.mark.slow  # statistical; test_selector_contract.py compares plays with propensities
@pytest.mark.parametrize("floor", [0.0, 0.05])
def test_thompson_sampling_records_the_probability_of_each_arm_before_the_draws(floor):
    """An arm that wins none of the M draws has a positive propensity: that of the arm's law over all draws."""
    with jax.enable_x64(True):
        model, engine = proved(conversion)
        state, _ = learnt(engine, rows_of([0, 0, 0, 0, 1, 1, 2], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))
        exact = np.asarray(engine.capabilities.marginals(state, None).best_arm_probs(None))
        exact = floor + (1.0 - 3 * floor) * exact
        thompson = selectors.thompson()
        selector = selectors.with_floor(thompson, floor) if floor else thompson

        def one(key):
            decide = decision_function(model.expected_rewards, engine, selector, NUM_SAMPLES)
            return decide(*jr.split(key), state, None, jnp.asarray(7))

        found = jax.device_get(jax.jit(jax.vmap(one))(jr.split(jr.key(1), NUM_RUNS)))
    np.testing.assert_allclose(found.propensities, np.broadcast_to(exact, (NUM_RUNS, 3)), atol=1e-12)
    assert (found.best_arm_probs[:, 1] == 0).any() and exact[1] > 0
    shares = np.mean(found.arm[:, None] == np.arange(3), axis=0)
    # 4.5 standard errors of a share.
    assert np.all(np.abs(shares - exact) < 4.5 * np.sqrt(exact * (1 - exact) / NUM_RUNS))


@pytest.mark.parametrize("rule", [selectors.information_directed(), selectors.optimistic_gittins(100)], ids=str)
@pytest.mark.slow
def test_an_engine_that_knows_less_than_a_selector_reads_draws_its_table(rule):
    """Such as one that offers a mixture's P(best) but not its tails: the selector reads the table then."""
    with jax.enable_x64(True):
        model, engine = proved(conversion)
        state, _ = learnt(engine, rows_of([0, 0, 0, 0, 1, 2], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))

        def fewer(state, context):
            return engine.capabilities.marginals(state, context)._replace(tail=None, best_arm_moments=None)

        knows_less = engine._replace(capabilities=engine.capabilities._replace(marginals=fewer))

        def propensities(engine, key):
            decide = decision_function(model.expected_rewards, engine, rule, 2000)
            return decide(key, key, state, None, jnp.asarray(95)).propensities

        whole = jax.jit(lambda key: propensities(engine, key))(jr.key(1))
        many = jax.jit(jax.vmap(lambda key: propensities(knows_less, key)))(jr.split(jr.key(2), 100))
        # What 2,000 draws leave open: the mean of 100 such decisions, to four standard errors, and the quadrature's 1%.
        error = 4.0 * jnp.std(many, axis=0) / 100**0.5 + 0.01
        assert jnp.all(jnp.abs(jnp.mean(many, axis=0) - whole) <= error)
        assert jnp.allclose(jnp.sum(many, axis=1), 1.0)


def test_a_mixture_is_asked_for_its_probabilities_only_by_selectors_that_want_them():
    """Averaged over particles they take longer than draws, which other selectors do as well with."""
    with jax.enable_x64(True):
        model, exact = proved(conversion)

        def averaged(state, context):
            return exact.capabilities.marginals(state, context)._replace(is_mixture=True)

        mixture = exact._replace(capabilities=exact.capabilities._replace(marginals=averaged))
        state, _ = learnt(exact, rows_of([0, 0, 0, 0, 1, 2], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))

        def p_hat(engine, rule, draws):
            decide = decision_function(model.expected_rewards, engine, rule, 100, draws)
            return decide(jr.key(1), jr.key(2), state, None, jnp.asarray(7)).best_arm_probs

        drawn, asked, wanted = jax.jit(
            lambda: (
                p_hat(exact, DOUBLE, True),
                p_hat(mixture, DOUBLE, False),
                p_hat(mixture, selectors.double_sampling(exact=True), False),
            )
        )()
        np.testing.assert_array_equal(asked, drawn)
        expected = jax.jit(lambda: exact.capabilities.marginals(state, None).best_arm_probs(None))()
        # Compiled otherwise, densities in single precision round otherwise, by 1e-7 each; p-hat is a multiple of .01.
        np.testing.assert_allclose(wanted, expected, atol=1e-7)


def test_a_selector_that_returns_an_arm_is_told_what_to_return():
    engine, rule = bernoulli_engine(3), selectors.selector_contract.as_selector(lambda key, table, step, **more: 0)
    decide = decision_function(bernoulli_model(3).expected_rewards, engine, rule, NUM_SAMPLES)
    with pytest.raises(ValueError, match="returned int, expected a Selection"):
        decide(jr.key(0), jr.key(1), engine.init(jr.key(2)), None, jnp.asarray(1))
