"""Linear forms of one Gaussian block: whether the arms' are independent is proved, and then P(best) has a closed form."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import KEY, bernoulli, normal, per_arm, rows_of
from scipy import stats

from ppl_bandit import Bandit, RewardModel, engines
from ppl_bandit.engines.inner.density import coordinates_at, standard_posterior
from ppl_bandit.engines.proof.assignment import find_scales, read_supports, split_gaussian_blocks


def weights_of(arms=3):
    with numpyro.plate("arms", arms):
        return numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def forms(weights, arm, context):
    return jnp.sum(weights[arm] * context, axis=-1)


def own_weights(arm, context):
    normal(forms(weights_of(), arm, context))


def shared_level(arm, context):
    normal(numpyro.sample("level", dist.Normal(0.0, 1.0)) + forms(weights_of(), arm, context))


def common_mean(arm, context):
    centre = numpyro.sample("centre", dist.Normal(0.0, 1.0))
    normal(forms(per_arm("weights", dist.Normal(centre, 1.0).expand([2]).to_event(1), 3), arm, context))


def spills_over(arm, context):
    """A reward of one arm speaks of the next one too, though no expected reward reads another arm's weights."""
    means = jnp.sum(weights_of()[None] * context[:, None], axis=-1)
    own, beside = (jnp.take_along_axis(means, (arm + k)[:, None] % 3, axis=1)[:, 0] for k in (0, 1))
    normal(own + 0.1 * beside)
    numpyro.deterministic("expected_reward", own)


def tied(arm, context):
    weights = weights_of()
    numpyro.factor("alike", -jnp.sum((weights[0] - weights[1]) ** 2))
    normal(forms(weights, arm, context))


def scaled_by_one_noise(arm, context):
    noise = jnp.sqrt(numpyro.sample("variance", dist.InverseGamma(2.0, 1.0)))
    normal(forms(per_arm("weights", dist.Normal(jnp.zeros(2), noise).to_event(1), 3), arm, context), noise)


def layout_of(program):
    model = RewardModel(program, 3, jnp.ones(2))
    return split_gaussian_blocks(model, find_scales(model, read_supports(model)))


def read(engine, rows, context, measure):
    """Return what is measured of the marginals of expected rewards after rows."""

    @jax.jit
    def found():
        state = engine.init(KEY) if rows is None else engine.update(KEY, engine.init(KEY), rows)[0]
        return measure(engine.capabilities.marginals(state, None if context is None else jnp.asarray(context)))

    return jax.device_get(found())


@pytest.mark.parametrize(
    ("program", "blocks"),
    [
        (own_weights, [[0, 1], [2, 3], [4, 5]]),
        (scaled_by_one_noise, [[0, 1], [2, 3], [4, 5]]),
        (shared_level, [[0, 1, 2, 3, 4, 5, 6]]),
        (common_mean, [[0, 1, 2, 3, 4, 5, 6]]),
        (spills_over, [[0, 1, 2, 3, 4, 5]]),
        (tied, [[0, 1, 2, 3], [4, 5]]),
    ],
)
def test_reals_are_apart_only_where_no_datum_and_no_prior_ties_them(program, blocks):
    with jax.enable_x64(True):
        layout = layout_of(program)
    found = [own[mask].tolist() for own, mask in zip(layout.members, layout.is_member, strict=True)]
    assert found == blocks
    assert set(layout.owner.tolist()) == ({0} if program is scaled_by_one_noise else {-1})


def test_the_probability_of_being_best_is_that_of_independent_normals():
    """Two arms: the difference of their forms is normal, with the sum of their variances, by the textbook's regression."""

    def program(arm, context):
        normal(forms(weights_of(2), arm, context), 0.5)

    rng = np.random.default_rng(0)
    arms, contexts = rng.integers(0, 2, 12), rng.normal(size=(12, 2))
    rewards, here = rng.normal(size=12), np.array([0.7, -0.4])
    means, variances = [], []
    for arm in range(2):
        x, y = contexts[arms == arm], rewards[arms == arm]
        covariance = np.linalg.inv(np.eye(2) + x.T @ x / 0.25)
        means.append(here @ covariance @ x.T @ y / 0.25)
        variances.append(here @ covariance @ here)
    exact = stats.norm.cdf((means[0] - means[1]) / np.sqrt(sum(variances)))
    with jax.enable_x64(True):
        engine = engines.conjugate(RewardModel(program, 2, jnp.zeros(2)))
        found = read(engine, rows_of(arms, rewards, contexts), here, lambda marginals: marginals.best_arm_probs())
    np.testing.assert_allclose(found, [exact, 1.0 - exact], atol=1e-4)


def shuffled(values):
    """Three numbers, moved about in every way that a program may do that; in the end they stand as they did."""
    low, middle, high = jnp.unstack(values)
    values = jnp.stack([high, middle, low])
    values = jnp.tile(values, 2)[1:4]  # middle, low, high
    values = jnp.concatenate(jnp.split(values, 3)[::-1])  # high, low, middle
    values = jnp.zeros(3).at[jnp.array([2, 0, 1])].set(values)  # low, middle, high
    values = jax.lax.dynamic_update_slice(jnp.zeros(3), values[::-1], (0,))  # high, middle, low
    jax.lax.map(lambda value: value, values)  # an operation that returns nothing
    return jnp.eye(3)[::-1] @ values


over_priors = pytest.mark.parametrize(
    ("prior", "law"), [(dist.Beta(1.0, 1.0), bernoulli), (dist.Normal(0.0, 1.0), normal)], ids=["beta", "normal"]
)


@pytest.mark.slow
@over_priors
def test_arms_that_are_moved_about_are_still_apart(prior, law):
    def program(arm):
        law(shuffled(per_arm("value", prior, 3))[arm])

    with jax.enable_x64(True):
        engine = engines.conjugate(RewardModel(program, 3))
        rows = rows_of([0, 0, 0, 1], [1.0, 1.0, 1.0, 0.0])
        found = read(engine, rows, None, lambda marginals: marginals.best_arm_probs())
    # By draws of the laws by hand, to four standard errors of a share of 200,000.
    rng = np.random.default_rng(0)
    if isinstance(prior, dist.Beta):
        draws = rng.beta([4.0, 1.0, 1.0], [1.0, 2.0, 1.0], size=(200_000, 3))
    else:
        draws = rng.normal([0.75, 0.0, 0.0], np.sqrt([0.25, 0.5, 1.0]), size=(200_000, 3))
    np.testing.assert_allclose(
        found, np.bincount(np.argmax(draws, axis=1), minlength=3) / 200_000, atol=4 * 0.5 / 200_000**0.5
    )


@pytest.mark.slow
def test_parts_of_unequal_size_have_the_variances_of_the_whole_block():
    """One arm has a level of its own, one a mean that its weights share: each part is solved by itself."""

    def program(arm, context):
        weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        mean = numpyro.sample("mean", dist.Normal(1.0, 1.0))
        third = numpyro.sample("third", dist.Normal(mean, 0.5).expand([2]).to_event(1))
        means = jnp.stack([context @ weights[0], context @ weights[1] + level, context @ third], axis=-1)
        normal(jnp.take_along_axis(means, arm[:, None], axis=1)[:, 0], 0.7)

    rng = np.random.default_rng(1)
    arms, contexts, rewards = rng.integers(0, 3, 20), rng.normal(size=(20, 2)), rng.normal(size=20)
    here = np.array([0.7, -1.3])
    # By the textbook, all eight reals at once, in the program's order: two pairs of weights, level, mean, third.
    slopes = np.zeros((3, 8))
    slopes[0, :2] = slopes[1, 2:4] = slopes[2, 6:] = here
    slopes[1, 4] = 1.0
    prior = np.diag([1.0, 1.0, 1.0, 1.0, 0.25, 1.0, 4.0, 4.0])
    prior[5, 5] += 2 * 4.0
    prior[5, 6:] = prior[6:, 5] = -4.0
    design = np.zeros((20, 8))
    for row, (arm, x) in enumerate(zip(arms, contexts, strict=True)):
        design[row, [0, 1] if arm == 0 else [2, 3] if arm == 1 else [6, 7]] = x
        design[row, 4] = arm == 1
    covariance = np.linalg.inv(prior + design.T @ design / 0.49)
    deviations = np.sqrt(np.diag(slopes @ covariance @ slopes.T))
    with jax.enable_x64(True):
        engine = engines.conjugate(RewardModel(program, 3, jnp.zeros(2)))

        def measure(offered):
            assert offered.best_arm_probs is not None  # proved apart
            one = stats.norm.cdf(1.0)
            return offered.quantile(one) - offered.quantile(0.5), offered.table(jr.key(1), 20_000)

        spread, table = read(engine, rows_of(arms, rewards, contexts), here, measure)
    np.testing.assert_allclose(spread, deviations, rtol=1e-4)
    # Of 20,000 draws a standard deviation has a relative error of 1 / sqrt(40,000), a correlation one of 1 / sqrt(20,000).
    np.testing.assert_allclose(np.std(table, axis=0), deviations, rtol=4 / 200)
    np.testing.assert_allclose(np.corrcoef(table.T), np.eye(3), atol=4 / 20_000**0.5)


def test_features_before_arms_are_blocks_all_the_same():
    """Weights of shape (features, arms): the reals of an arm lie apart, in a law that NumPy holds as in one that jax does."""

    def program(arm, context):
        weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        normal(jnp.sum(weights[:, arm].T * context, axis=-1))

    with jax.enable_x64(True):
        layout = layout_of(program)
        assert layout.members.tolist() == [[0, 3], [1, 4], [2, 5]]
        law = standard_posterior(layout)._replace(mean=jnp.arange(6.0).reshape(3, 2))
        for held in (law, jax.device_get(law)):
            np.testing.assert_array_equal(coordinates_at(layout, held).real, [0, 2, 4, 1, 3, 5])


@pytest.mark.slow
@over_priors
def test_an_arm_that_is_given_away_is_sure_and_independent(prior, law):
    def program(arm):
        value = numpyro.sample("value", prior.expand([3]).to_event(1))
        numpyro.deterministic("expected_reward", jnp.array([0.0, 5.0, 3.0])[arm] * value[arm])
        law(value[arm])

    with jax.enable_x64(True):
        engine = engines.conjugate(RewardModel(program, 3))
        probs = read(engine, None, None, lambda marginals: marginals.best_arm_probs())
    if isinstance(prior, dist.Beta):  # of two uniforms on (0, 5) and (0, 3), the second wins with probability 3 / 10
        exact = [0.0, 0.7, 0.3]
    else:  # a sector of the plane, of directions scaled by 5 and 3: both below 0 is a quarter
        angle = np.arctan2(5.0, 3.0) / (2 * np.pi)
        exact = [0.25, 0.25 + angle, 0.5 - angle]
    np.testing.assert_allclose(probs, exact, atol=2e-4)


@pytest.mark.slow  # a rare kind of program
def test_rewards_without_forward_mode_have_the_same_marginals():
    """A custom_vjp function has reverse mode alone: marginals are found by it, and a bandit decides with them."""

    @jax.custom_vjp
    def doubled(x):
        return 2.0 * x

    doubled.defvjp(lambda x: (2.0 * x, None), lambda _, g: (2.0 * g,))

    def custom(arm):
        mean = per_arm("mean", dist.Normal(0.0, 1.0), 3)
        normal(doubled(mean)[arm])

    model = RewardModel(custom, 3)
    engine = engines.conjugate(model)

    def measure(marginals):
        return marginals.best_arm_probs(), marginals.quantile(jnp.array(0.3)), marginals.pseudo_counts()

    probs, quantile, counts = read(engine, None, None, measure)
    # Expected rewards are Normal(0, 2), equal for all arms, and a reward has variance 1 about them: worth 1 / 4 reward.
    np.testing.assert_allclose(probs, 1 / 3, rtol=1e-5)
    np.testing.assert_allclose(quantile, 2.0 * stats.norm.ppf(0.3), rtol=1e-5)
    np.testing.assert_allclose(counts, 0.25, rtol=1e-4)
    bandit = Bandit(model, engine=lambda _: engine)
    bandit.update(bandit.select(), 1.0)
    assert "EXACT" in bandit.explain()
