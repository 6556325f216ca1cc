"""Programs whose outcomes leave their domains, laws far in a tail, and numbers that change behind a program's back."""

import re
import types

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import bernoulli, of_one_latent, rates, slow_but

from ppl_bandit import Bandit, RewardModel, engines
from ppl_bandit.program.closed_over import changed_name, numbers_closed_over
from ppl_bandit.program.model.tracing import stable
from ppl_bandit.types import Interaction, InvalidProgram

A = 2


def normals(loc=0.0, scale=1.0):
    return numpyro.sample("z", dist.Normal(loc, scale).expand([A]))


LEAVES = {
    "a real probability": (
        lambda arm: dist.Bernoulli(normals(0.5, 0.2)[arm]),
        r"probs of 'reward' \(Bernoulli\).*\[0, 1\]",
    ),
    "a real scale": (lambda arm: dist.Normal(0.0, normals(2.0, 1.0)[arm]), r"scale of 'reward' \(Normal\).*positive"),
    "a real rate": (lambda arm: dist.Poisson(1.0 + normals()[arm]), r"rate of 'reward' \(Poisson\)"),
    "a rate by a square": (lambda arm: dist.Poisson(normals()[arm] ** 2 - 0.01), r"rate of 'reward' \(Poisson\)"),
    "a concentration": (lambda arm: dist.Beta(normals(3.0)[arm], 1.0), r"concentration1 of 'reward' \(Beta\)"),
    "inside a transform": (lambda arm: dist.LogNormal(0.0, normals(2.0, 1.0)[arm]), r"scale of 'reward'"),
    "an interval upside down": (
        lambda arm: dist.Uniform(0.0, normals()[arm]),
        r"width of the support of 'reward' \(Uniform\)",
    ),
    "a latent's scale": (
        lambda arm: dist.Normal(normals(0.0, numpyro.sample("scale", dist.Normal(1.0, 0.5)))[arm], 1.0),
        r"scale of 'z' \(Normal\)",
    ),
    "twice a probability": (
        lambda arm: dist.Bernoulli(2.0 * numpyro.sample("u", dist.Beta(1.0, 1.0).expand([A]))[arm]),
        r"probs of 'reward'.* in 7\d\.\d% of 1,000 draws",
    ),
}


def program_of(outcome):
    def program(arm):
        numpyro.sample("reward", outcome(arm))

    return program


@pytest.mark.parametrize("name", slow_but(LEAVES, "a real probability"))
def test_an_outcome_that_leaves_its_domain_is_refused_with_the_share_of_draws(name):
    outcome, words = LEAVES[name]
    with pytest.raises(InvalidProgram, match=words):
        RewardModel(program_of(outcome), A)


STAYS = {
    "a sigmoid": lambda arm: dist.Bernoulli(jax.nn.sigmoid(normals())[arm]),
    "an exponential": lambda arm: dist.Poisson(jnp.exp(normals())[arm]),
    "a softplus scale": lambda arm: dist.Normal(0.0, jax.nn.softplus(normals())[arm]),
    "logits": lambda arm: dist.Bernoulli(logits=normals()[arm]),
    "a square": lambda arm: dist.Poisson(normals()[arm] ** 2),
    "masked rows": lambda arm: dist.Poisson(normals()[arm]).mask(jnp.zeros(arm.shape, bool)),
}


@pytest.mark.parametrize("name", slow_but(STAYS, "an exponential"))
def test_an_outcome_inside_its_domain_is_accepted(name):
    assert not RewardModel(program_of(STAYS[name]), A).may_leave_domains


def test_a_domain_that_no_prior_draw_leaves_is_checked_on_posterior_draws():
    model = RewardModel(program_of(lambda arm: dist.Normal(0.0, normals(10.0, 0.5)[arm])), A)
    assert model.may_leave_domains
    draws = {"z": jnp.array([[1.0, 2.0], [1.0, -0.1], [-1.0, 1.0], [3.0, 4.0]])}
    assert float(model.share_outside_domains(draws)) == 0.5


@pytest.mark.slow
def test_a_posterior_that_leaves_a_domain_is_doubted_in_the_report_and_the_explanation(warm_starts):
    """No draw of the prior is 5 sd away, but after 40 successes some draws are above 1."""
    model = RewardModel(program_of(lambda arm: dist.Bernoulli(normals(0.5, 0.1)[arm])), A)
    bandit = Bandit(model, engine=engines.reweight, num_samples=200)
    bandit.update_many(arms=[0] * 40, rewards=[1] * 40)
    words = r"NOT TRUSTED.*at \d+\.\d% of the posterior draws an argument of an outcome is outside of its domain"
    assert re.search(words, str(bandit.report(more=[10]))) and re.search(words, bandit.explain())
    assert "outside of its domain" in bandit.select().notes[-1]


def masses(a, b):
    """Return mean and variance of Normal(0, 1) on (a, b) by a fine grid in float64, for a > 0."""
    step = np.linspace(0.0, min(b - a, 60.0 / a), 200_001)
    density = np.exp(-step * (2.0 * a + step) / 2.0)
    mean = np.trapezoid(density * step, step) / np.trapezoid(density, step)
    return a + mean, np.trapezoid(density * (step - mean) ** 2, step) / np.trapezoid(density, step)


@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (60.0, np.inf),
        (10.0, 10.5),
        *[pytest.param(a, b, marks=pytest.mark.slow) for a, b in ((8.0, np.inf), (300.0, np.inf), (30.0, 90.0))],
    ],
)
def test_a_truncated_normal_far_in_its_tail_has_a_mean_and_a_density(a, b, is_double):
    # Float32 keeps 7 digits of a bound of 450, and the density's log is a difference of numbers of size a^2 / 2.
    tolerance = 1e-9 if is_double else 2e-6
    mean, variance = masses(a, b)
    with jax.enable_x64(is_double):
        for sign in (1.0, -1.0):
            ends = sorted([sign * 1.5 * a, sign * 1.5 * b])
            low, high = (None if np.isinf(end) else end for end in ends)
            law = stable(dist.TruncatedNormal(0.0, 1.5, low=low, high=high))
            np.testing.assert_allclose(law.mean, sign * 1.5 * mean, rtol=tolerance)
            np.testing.assert_allclose(law.variance, 2.25 * variance, rtol=1e3 * tolerance)
            edge = law.log_prob(sign * 1.5 * a)
            grid = sign * 1.5 * (a + np.linspace(0.0, min(b - a, 60.0 / a), 4001))
            mass = np.trapezoid(np.exp(np.asarray(law.log_prob(jnp.asarray(grid)), float)), sign * grid)
            assert np.isfinite(edge) and abs(mass - 1.0) < (1e-4 if is_double else a**2 * 1e-6 + 1e-4)


@pytest.mark.parametrize("ends", [(60.0, None), (None, -60.0), (900.0, 901.0), (-1.0, 2.0), (None, 0.5), (-0.25, 0.25)])
def test_a_truncated_laplace_law_has_a_mean_and_a_density_also_far_in_its_tail(ends):
    low, high = ends
    build = dist.TruncatedDistribution
    with jax.enable_x64(True):
        law = stable(
            build(dist.Laplace(0.0, 1.5), **{k: 1.5 * v for k, v in (("low", low), ("high", high)) if v is not None})
        )
        first = max(-80.0, low) if low is not None else high - 80.0 if high < 0 else -80.0
        last = first + 80.0 if high is None else high
        grid = np.linspace(first, last, 400_001)
        density = np.exp(-np.abs(grid) + np.abs(grid).min())
        mass = np.trapezoid(density, grid)
        mean = np.trapezoid(density * grid, grid) / mass
        variance = np.trapezoid(density * (grid - mean) ** 2, grid) / mass
        # The grid's error is step^2 / 12 of a density with slope 1, and that of its kink at 0.
        np.testing.assert_allclose(law.mean, 1.5 * mean, rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(law.variance, 2.25 * variance, rtol=1e-6)
        np.testing.assert_allclose(law.log_prob(1.5 * grid[::5000]), np.log(density[::5000] / mass / 1.5), atol=1e-6)


@pytest.mark.parametrize("base", [dist.Normal, dist.Laplace])
@pytest.mark.parametrize("ends", [(1.0, 2.0), (-1.0, 2.0), (-5.0, -4.0)])
def test_the_mean_of_a_truncated_law_moves_with_its_ends(base, ends):
    slopes = jax.grad(lambda low, high: stable(dist.TruncatedDistribution(base(), low, high)).mean, (0, 1))(*ends)
    assert all(0.0 < slope < 1.0 for slope in slopes)


def test_wrapped_laws_are_stable_too_and_others_are_as_they_were():
    law = dist.TruncatedNormal(jnp.zeros((2, 3)), 1.0, low=70.0).to_event(1).mask(True)
    assert np.all(np.isfinite(stable(law).log_prob(jnp.full((2, 3), 71.0))))
    other = dist.Normal(0.0, 1.0)
    assert stable(other) is other and type(stable(law)) is type(law)


def test_a_model_of_a_truncated_outcome_reads_the_stable_forms():
    model = RewardModel(program_of(lambda arm: dist.TruncatedNormal(normals(-90.0)[arm], 1.0, low=0.0)), A)
    latents = {"z": jnp.array([-90.0, -100.0])}
    means = model.expected_rewards({"z": latents["z"][None]})[0]
    # 1 / a - 2 / a^3, the mean distance from a bound a standard deviations out
    np.testing.assert_allclose(means, [1 / 90 - 2 / 90**3, 1 / 100 - 2 / 100**3], rtol=1e-4)
    assert np.isfinite(model.log_likelihood(latents, Interaction(jnp.zeros(1, int), jnp.full(1, 0.01)))).all()


def by_shape(law):
    return of_one_latent("shape", dist.Gamma(4.0, 1.0).expand([A]), lambda shape, arm: law(shape[arm], 2.0))


@pytest.mark.parametrize("law", [dist.Beta, dist.Kumaraswamy])
def test_an_outcome_at_0_or_1_is_outside_the_support_of_a_law_inside(law):
    rows = Interaction(jnp.zeros(4, int), jnp.array([0.0, 0.5, 1.0, 1e-6]))
    found = RewardModel(by_shape(law), A).in_support({"shape": jnp.ones(A) * 3.0}, rows)["reward"]
    assert found.tolist() == [False, True, False, True]


@pytest.mark.slow
def test_a_bandit_names_the_row_of_a_beta_outcome_at_1():
    bandit = Bandit(by_shape(dist.Beta), num_arms=A, engine=engines.laplace, num_samples=20)
    with pytest.raises(ValueError, match=r"reward=1 in row 2 is outside the support.*on arm 1"):
        bandit.update_many(arms=[0, 1, 1], rewards=[0.2, 0.3, 1.0])


def test_a_plate_with_more_entries_than_arms_is_refused():
    def program(arm):
        bernoulli(rates(num_arms=3)[arm])

    with pytest.raises(InvalidProgram, match="indexes an axis of 3 latents by arm.*num_arms=3 for instance"):
        RewardModel(program, 2)
    RewardModel(program, 3)

    def priced(arm):  # a table of constants may have more entries than arms, and latents fewer
        bernoulli(rates()[jnp.array([0, 1, 0, 1, 1])[arm]])

    RewardModel(priced, 3)


def test_a_program_without_its_arm_is_noted():
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(jnp.full(arm.shape, rate)))

    assert "does not use `arm`" in RewardModel(program, 2).expected_reward_note
    assert RewardModel(program, 1).expected_reward_note == ""


SHARED = {
    "zero times the arm": lambda rate, arm: rate[0 * arm],
    "an index that all arms round to": lambda rate, arm: rate[arm // 10],
    "a table with one value": lambda rate, arm: rate[jnp.array([1, 1, 1])[arm]],
    "a weight of zero": lambda rate, arm: rate[0] + 0.0 * arm * rate[1],
    "a one_hot of one entry from the second arm on": lambda rate, arm: rate[0] * jax.nn.one_hot(0 * arm, 1)[..., 0],
}
APART = {
    "own rates": lambda rate, arm: rate[arm],
    "two arms that share": lambda rate, arm: rate[jnp.array([0, 0, 1])[arm]],
    "a one_hot": lambda rate, arm: jax.nn.one_hot(arm, 3) @ rate,
    "a real function of the arm": lambda rate, arm: jax.nn.sigmoid(rate[0] * jnp.sin(1.0 + arm)),
    "a choice": lambda rate, arm: jnp.where(arm == 0, rate[0], rate[1]),
    "an offset": lambda rate, arm: 0.5 * rate[0] + 0.1 * arm,
    "an arm whose rate is known": lambda rate, arm: jnp.where(arm == 2, 0.5, rate[arm]),
    "a one_hot with a reference arm": lambda rate, arm: 0.5 * (rate[2] + jax.nn.one_hot(arm, 2) @ rate[:2]),
}


def rates_by(value):
    prior = dist.Beta(2.0, 2.0).expand([3])
    return of_one_latent("rate", prior, lambda rate, arm: dist.Bernoulli(value(rate, arm)))


@pytest.mark.parametrize("case", slow_but(SHARED, "an index that all arms round to", "a weight of zero"))
def test_arms_that_share_one_rate_are_noted(case):
    assert "the same expected reward" in RewardModel(rates_by(SHARED[case]), 3).expected_reward_note


@pytest.mark.parametrize("case", slow_but(APART, "two arms that share", "a choice", "an offset"))
def test_arms_with_rates_of_their_own_are_not(case):
    assert RewardModel(rates_by(APART[case]), 3).expected_reward_note == ""


def test_an_arm_beyond_a_one_hot_is_noted():
    note = RewardModel(rates_by(lambda rate, arm: jax.nn.one_hot(arm, 2) @ rate[:2]), 3).expected_reward_note
    assert "nothing can be learnt about arm 2" in note


def test_a_model_takes_a_program_for_any_number_of_arms():
    def program(arm, *, num_arms):
        bernoulli(rates(num_arms=num_arms)[arm])

    model = RewardModel(program, 4)
    assert model.latent_shapes == {"rate": (4,)}
    assert RewardModel(model.program, 4).latent_shapes == {"rate": (4,)}
    assert RewardModel(program, 4).program is model.program  # bandits of the same program share a start
    assert model.sample_prior(jr.key(0), 3)["rate"].shape == (3, 4)


PRICES = np.array([1.0, 2.0])
SETTINGS = {"offset": 0.5, "runs": 0}


def helper(arm):
    return jnp.asarray(PRICES)[arm] + SETTINGS["offset"]


def test_an_array_that_changes_after_a_model_was_built_is_named():
    own, count = np.zeros(2), [0]

    def program(arm):
        SETTINGS["runs"] += 1  # counting runs is no change of a number that matters
        count[0] += 1
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([A]))
        numpyro.sample("reward", dist.Normal(mean[arm] * helper(arm) + jnp.asarray(own)[arm], 1.0))

    model = RewardModel(program, A)
    draws = {"mean": jnp.zeros((1, A))}
    for change, restore, name in (
        (lambda: PRICES.__setitem__(0, 7.0), lambda: PRICES.__setitem__(0, 1.0), "PRICES"),
        (lambda: SETTINGS.update(offset=1.0), lambda: SETTINGS.update(offset=0.5), "SETTINGS"),
        (lambda: own.__setitem__(1, 3.0), lambda: own.__setitem__(1, 0.0), "own"),
    ):
        model.expected_rewards(draws)
        change()
        with pytest.raises(InvalidProgram, match=f"{name}.*has changed since the model was built"):
            model.expected_rewards(draws)
        restore()
    model.expected_rewards(draws)


@pytest.mark.slow  # compiles a program of its own
def test_what_a_bandit_compiles_after_a_change_is_refused_and_what_it_compiled_before_is_as_it_was():
    own = np.ones(A)

    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([A]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))
        numpyro.deterministic("expected_reward", rate[arm] * jnp.asarray(own)[arm])

    bandit = Bandit(program, A, num_samples=20)
    bandit.select()
    own[0] = 1e3
    probs = [bandit.select().best_arm_probs for _ in range(20)]
    assert np.mean(probs, axis=0).max() < 0.8  # arm 0 would be the best in 399 of 400 draws
    with pytest.raises(InvalidProgram, match="own.*has changed since the model was built"):
        bandit.expected_rewards()
    probs = [decision.best_arm_probs for decision in bandit.select_many(num_decisions=64)]
    assert np.mean(probs, axis=0).max() < 0.8


class Settings:
    def __init__(self):
        self.scale, self.prior, self.runs = 1.0, types.SimpleNamespace(width=np.ones(2)), 0.0

    def __call__(self, arm):
        self.runs += 1.0
        return self.scale * self.prior.width

    def read(self, arm):
        return self.scale


@pytest.mark.parametrize("read", [lambda own: own, lambda own: own.read, lambda own: lambda arm: own.scale])
def test_attributes_of_own_objects_count_as_far_as_a_program_reads_them(read):
    own = Settings()
    program = read(own)
    before = numbers_closed_over(program)
    program(0)
    own.unread = 2.0
    assert changed_name(program, before) is None
    own.scale = 2.0
    assert changed_name(program, before).endswith(".scale")


def test_attributes_of_attributes_count():
    own = Settings()
    before = numbers_closed_over(own)
    own.prior.width[0] = 3.0
    assert changed_name(own, before) == "Settings.prior.width"


def test_names_that_a_program_assigns_itself_do_not_count():
    number = 0.0

    def program(arm):
        nonlocal number
        number += 1.0
        return number

    before = numbers_closed_over(program)
    program(0)
    assert changed_name(program, before) is None
