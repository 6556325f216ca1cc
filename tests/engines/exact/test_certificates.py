"""What certificates see: bends where data take the posterior, matrices that cancel, infinite expectations, one row of many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import (
    KEY,
    assert_not_learnt,
    bernoulli,
    latents,
    learnt,
    normal,
    of_one_latent,
    per_arm,
    rates,
    reals,
    reward,
    rows_of,
    slow,
)

from ppl_bandit import NotConjugate, RewardModel
from ppl_bandit.engines import conjugate
from ppl_bandit.engines.proof import examination
from ppl_bandit.engines.proof.certificate import is_affine
from ppl_bandit.engines.proof.examination import examine, prove
from ppl_bandit.types import Interaction


def prior_bends_far_away(arm):
    """Rounding hides everything of a cube near 1, where the prior has its mass, but not at 400,000."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.factor("bend", -1e-19 * rate**3)
    reward(dist.Poisson(rate + 0.0 * arm))


def test_a_bend_of_the_prior_is_seen_where_the_data_take_the_posterior():
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(prior_bends_far_away, 1))
        _, info = learnt(engine, rows_of([0], [30]))
        assert bool(info.is_trusted)
        _, info = learnt(engine, rows_of([0], [400_000]))
    # The likelihood is conjugate everywhere: it is the prior that is not.
    assert not bool(info.is_trusted) and not bool(is_affine(info.prior_residual)) and bool(info.is_certified.all())


def test_an_update_is_not_traced_again_after_the_examination():
    runs = []

    def program(arm):
        runs.append(1)
        bernoulli(latents("rate", dist.Beta(1.0, 1.0))[arm])

    with jax.enable_x64(True):
        engine = conjugate(RewardModel(program, 2))
        num_runs = len(runs)
        jax.jit(engine.update).trace(KEY, engine.init(KEY), Interaction(jnp.zeros(1, int), jnp.ones(1)))
    assert len(runs) == num_runs


def line(arm, context):
    weight = numpyro.sample("weight", dist.Normal(0.0, 100.0).expand([2]).to_event(1))
    normal(context @ weight + 0.0 * arm)


@pytest.mark.slow
def test_single_precision_is_not_trusted_with_features_that_nearly_repeat_each_other():
    engine, rng = conjugate(RewardModel(line, 1, np.ones(2))), np.random.default_rng(0)
    assert not jax.config.jax_enable_x64
    # The intercept's variance is offset^2 / 512, so terms of 4 offset^2 nats cancel, times 1.2e-7 sqrt(512).
    for offset, is_trusted in ((0.0, True), (1000.0, False)):
        features = np.column_stack([np.ones(512), offset + rng.normal(size=512)])
        rewards = features @ [0.3, 0.5] + rng.normal(size=512)
        _, info = learnt(engine, rows_of(np.zeros(512, int), rewards, features))
        assert bool(info.is_trusted) == is_trusted, (offset, info.checks)


def coin(arm, context):
    reward(dist.Binomial(context, numpyro.sample("rate", dist.Beta(1.0, 1.0)) + 0.0 * arm))


@pytest.mark.slow
def test_a_count_that_stops_growing_is_not_trusted():
    engine = conjugate(RewardModel(coin, 1, 1))
    # In float32 the next number after 2^25 is 4 larger.
    for count, is_trusted in ((2.0**20, True), (2.0**25, False)):
        state = engine.init(KEY)._replace(elements={"unit": jnp.full((1, 2), count)})
        _, info = learnt(engine, rows_of([0], [1], [1]), state)
        assert bool(info.is_trusted) == is_trusted


def spend(arm):
    variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    level = numpyro.sample("level", dist.Normal(0.0, jnp.sqrt(variance)))
    reward(dist.LogNormal(level + 0.0 * arm, jnp.sqrt(variance)))


def waiting_time(shape):
    return of_one_latent("rate", dist.Gamma(shape, 1.0), lambda rate, arm: dist.Exponential(rate + 0.0 * arm))


@pytest.mark.parametrize(
    ("program", "is_infinite"), [slow(spend, True), (waiting_time(0.9), True), (waiting_time(1.1), False)]
)
def test_an_expected_reward_without_an_expectation_is_named(program, is_infinite):
    # E exp(m + v / 2) under a power tail of v; E 1 / rate under Gamma(a, 1) is 1 / (a - 1), infinite for a up to 1.
    report = conjugate(RewardModel(program, 1)).explanation.report
    assert ("expectation over the latents is infinite" in report) == is_infinite


# Sums of trial rows in place of single ones


def visits(power, arm):
    rate = per_arm("rate", dist.Beta(2.0, 3.0), 3)
    reward(dist.Binomial(2, rate[arm]) if power is None else dist.Bernoulli(rate[arm] ** jnp.array(power)[arm]))


def examined(power, monkeypatch):
    """Certify sums with few rows too: programs of more than 256 arms take longer to test."""
    monkeypatch.setattr(examination, "MAX_SINGLE_ROWS", 16)
    model = RewardModel(functools.partial(visits, power), 3)
    with jax.enable_x64(True):
        return examine(model, prove(model))


def test_sums_of_rows_certify_a_conjugate_program(monkeypatch):
    prior, evidence = examined(None, monkeypatch)
    assert evidence.num_summed == 16 and evidence.num_rows == 24  # 8 rows of each arm
    assert is_affine(evidence.prior) and is_affine(evidence.likelihood)
    (group,) = prior.elements
    np.testing.assert_allclose(prior.elements[group], [[2.0, 3.0]] * 3)
    added = {rewards["reward"]: own[group].tolist() for rewards, own in evidence.examples}
    assert added == {count: [[count, 2.0 - count], [0.0, 0.0], [0.0, 0.0]] for count in (0.0, 1.0, 2.0)}


def test_one_arm_that_is_not_conjugate_is_found_in_the_sums_and_named(monkeypatch):
    with pytest.raises(NotConjugate, match="reward 0 on arm 2"):
        examined([1.0, 1.0, 2.0], monkeypatch)


# Many rows at once, certified by the sums of chunks

N, ARMS = 300, 2  # more than a chunk of 256 rows


def bent(arm, context):
    """Linear in the weight where the context is positive, which is all that is tried when the engine is built."""
    weight = numpyro.sample("weight", dist.Normal(jnp.zeros(ARMS), 2.0))[arm]
    normal(jnp.where(context > 0, weight * context, weight**2), 0.5)


@pytest.fixture(scope="module")
def engine():
    return conjugate(RewardModel(bent, ARMS, context=np.array(1.0)))


def many_rows(seed=0):
    rng = np.random.default_rng(seed)
    arm, context = rng.integers(0, ARMS, N), rng.uniform(0.2, 1.0, N)
    return Interaction(arm, rng.normal(np.array([1.0, -2.0])[arm] * context, 0.5), context, np.ones(N, bool))


def check_closed_form(after, rows):
    keep = np.asarray(rows.mask)
    sums = [
        np.bincount(rows.arm[keep], values[keep], ARMS) / 0.25
        for values in (rows.context**2, rows.context * rows.reward)
    ]
    np.testing.assert_allclose(after.precision[:, 0, 0], 0.25 + sums[0], rtol=1e-12)
    np.testing.assert_allclose(after.mean[:, 0], sums[1] / (0.25 + sums[0]), rtol=1e-10)


def test_many_rows_at_once_give_the_posterior_in_closed_form(engine):
    rows = many_rows()
    with jax.enable_x64(True):
        after, info = learnt(engine, rows)
    assert info.is_trusted and info.is_certified.all()
    check_closed_form(after, rows)
    residual, tolerance = (np.max(np.asarray(part)) for part in info.residual[:2])
    assert 0.0 < residual <= tolerance < 1e-6  # nats, of all rows of a chunk together


def test_one_row_that_is_not_conjugate_is_found_among_many_and_nothing_is_absorbed(engine):
    rows = many_rows()
    rows.context[57] = -0.5
    with jax.enable_x64(True):
        assert_not_learnt(engine, rows, (np.arange(N) != 57).tolist())


def test_rows_that_are_masked_may_hold_anything(engine):
    rows = many_rows(seed=1)
    rows.mask[::3] = False
    rows.reward[::3], rows.context[::3] = np.nan, -1.0
    with jax.enable_x64(True):
        after, info = learnt(engine, rows)
    assert info.is_trusted and int(after.num_rows) == rows.mask.sum()
    check_closed_form(after, rows._replace(reward=np.nan_to_num(rows.reward)))


@pytest.mark.slow
def test_the_noise_of_masked_rows_may_be_anything_too():
    def program(arm, context):
        normal(reals(num=3)[arm] * context, context)

    engine = conjugate(RewardModel(program, 3, 1.0))
    rows = rows_of([0, 99, 1, 0], [1.0, np.nan, np.inf, 2.0], [1.0, np.nan, 0.0, 2.0])
    state, info = learnt(engine, rows._replace(mask=jnp.array([True, False, False, True])))
    assert bool(info.is_trusted) and int(state.num_rows) == 2
    # Two observations of arm 0, 1.0 with sd 1 and 2.0 = 2 mean with sd 2: precision 1 + 1 + 1, mean (1 + 1) / 3.
    found = engine.capabilities.parameters(state)["mean"]["mean"]
    np.testing.assert_allclose(found, [2 / 3, 0, 0], rtol=1e-6, atol=1e-7)


def bent_in_rare_contexts(arm, context):
    rate = rates(num_arms=3)[arm]
    bernoulli(jnp.where(context > 100.0, rate**2, rate))


def table_of_rates(arm, context):
    bernoulli(numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([4, 3]))[context, arm])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "rewards", "contexts", "is_certified"),
    [
        (bent_in_rare_contexts, [1, 0, 0], [1.0, 500.0, 3.0], [True, False, True]),
        (table_of_rates, [1, 1, 0], [3, 4, -5], [True, False, False]),  # it indexes no entry
    ],
)
def test_a_row_in_a_context_for_which_nothing_is_proved_changes_nothing(program, rewards, contexts, is_certified):
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(program, 3, type(contexts[0])(1)))
        assert_not_learnt(engine, rows_of([0, 1, 2], rewards, contexts), is_certified)
