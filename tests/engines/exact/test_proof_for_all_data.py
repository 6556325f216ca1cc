"""The proof that a density is a generalised polynomial of low degree: what could hide between random points is refused.

Every program here is read once, without compiling anything. A certificate alone would accept the first table: the programs
deviate from a conjugate form by many nats, in a place too small to be met by chance.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from programs import bernoulli, latents, normal, of_one_latent, poisson, reals, reward, slow_but, with_term

from ppl_bandit.engines import collapsed, conjugate
from ppl_bandit.engines.proof.analyticity import not_conjugate
from ppl_bandit.engines.proof.assignment import find_scales, read_supports
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, InvalidProgram, NotConjugate

A = 2


def refusal_of(model):
    with jax.enable_x64(True):
        layout = find_scales(model, read_supports(model))
        gaps = [not_conjugate(model, layout, is_prior=is_prior) for is_prior in (True, False)]
    return next((gap.reason for gap in gaps if gap is not None), "")


def near(z):
    return (z - 3.7) / 0.002


def of_rates(term):
    return with_term(lambda: latents("rate", dist.Gamma(4.0, 1.0)), term, poisson)


def of_reals(term):
    """An observation or a factor depends on a real latent."""
    return with_term(reals, lambda z, _: term(z), normal)


def of_shares(term):
    """A Bernoulli program with an observation of the user's that depends on a share, or a factor."""
    return with_term(lambda: latents("rate", dist.Beta(2.0, 5.0)), term, bernoulli)


def with_pilot(term):
    return of_shares(lambda u, _: term(u))


def pilot(law, obs):
    numpyro.sample("pilot", law, obs=obs)


def covariance_of_a_real_latent(z):
    spread = 1e-30 + (z - 0.8) ** 2
    pilot(dist.MultivariateNormal(jnp.zeros(2), spread * jnp.eye(2)), jnp.zeros(2))


def needle(u):
    """1 at .5, and 0 everywhere else but within 1e-6 of it."""
    return (4.0 * u * (1.0 - u)) ** 1e12


def gamma_of_a_needle(u):
    """log p rises by 40 where the concentration is 40, and is constant once its logarithm is taken away."""
    pilot(dist.Gamma(40.0 * needle(u), 1.0), 40.0)
    numpyro.factor("background", -jnp.log(needle(u)))


def dirichlet_of_a_needle(u):
    pilot(dist.Dirichlet(40.0 * needle(u) * jnp.ones(3)), jnp.ones(3) / 3.0)
    numpyro.factor("background", -2.0 * jnp.log(needle(u)))


def count_of_a_needle(u):
    pilot(dist.NegativeBinomialLogits(40.0 * needle(u), 3.0), 40)
    numpyro.factor("background", -jnp.log(needle(u)))


def weight_of_a_needle(u):
    with handlers.scale(scale=needle(u)):
        pilot(dist.Normal(0.0, 1e-17), 0.0)


def kink(u):
    return jnp.abs(u - 0.3)


HIDDEN = {
    "a product of products": of_rates(
        lambda x, y: 12.0 / (1.0 + jnp.square(jnp.square(near(x) * near(x + 0.1 * y) * near(y))))
    ),
    "a product of squares": of_rates(lambda x, y: -((near(x) ** 2 * near(y) ** 2 * near(x) ** 2) ** 2)),
    "a power of a product": of_rates(lambda x, y: 1e-9 * (near(x) * near(y)) ** 4),
    "reduce_prod": of_rates(lambda x, y: jnp.prod(jnp.stack([near(x)] * 6))),
    "cumprod": of_rates(lambda x, y: jnp.cumprod(jnp.stack([near(x)] * 6))[-1]),
    "a dot product of powers": of_rates(
        lambda x, y: jnp.dot(jnp.stack([near(x) ** 3] * 2), jnp.stack([near(y) ** 3] * 2))
    ),
    "a hill of width 1e-10": of_rates(lambda x, y: 40.0 / (1.0 + ((x - 3.7) / 1e-10) ** 2)),
    "a hill by a negative power": of_rates(lambda x, y: 40.0 * (1.0 + ((x - 3.7) / 1e-8) ** 2) ** -1),
    "a hill by a reciprocal root": of_rates(lambda x, y: 40.0 * jax.lax.rsqrt(1.0 + ((x - 3.7) / 1e-8) ** 2)),
    "a hill by a logarithm": of_rates(lambda x, y: -9.0 * jnp.log(1e-16 + (x - 3.7) ** 2)),
    "a hill by log1p": of_rates(lambda x, y: -9.0 * jnp.log1p(-1.0 + 1e-16 + (x - 3.7) ** 2)),
    "a pole of size 1e-13": of_rates(lambda x, y: 1e-13 / (x - 3.7)),
    "a pole where two shares meet": of_shares(lambda u, v: 1e-13 / (1.0 - u - v)),
    "a high power of a share and the rest": of_shares(lambda u, v: 40.0 * (4.0 * u * (1.0 - u)) ** 10_000),
    "high powers of a share": of_shares(lambda u, v: 1e5 * (u**1000 - u**1001)),
    "an exponential": of_rates(lambda x, y: 40.0 * jnp.exp(-1e8 * (x - 3.7) ** 2)),
    "a hill of real latents": of_reals(lambda z: 40.0 / (1.0 + ((z - 0.7) / 1e-8) ** 2)),
    "a real latent in a covariance": of_reals(covariance_of_a_real_latent),
    "a real latent in a rate": of_reals(lambda z: pilot(dist.Gamma(1e-30 + (z - 0.8) ** 2, 1.0), 2.0)),
    "a real latent in a probability": of_reals(lambda z: pilot(dist.Bernoulli(1e-15 + (z - 0.8) ** 2), 1)),
    "a high power in a concentration": with_pilot(gamma_of_a_needle),
    "a high power in concentrations": with_pilot(dirichlet_of_a_needle),
    "a high power in a count": with_pilot(count_of_a_needle),
    "a high power in a weight": with_pilot(weight_of_a_needle),
    "a branch where constants are 0": with_pilot(lambda u: jnp.where(jnp.array([1.0, 0.0]) * u > 0, u, kink(u)).sum()),
    "a branch where constants are infinite": with_pilot(lambda u: jnp.where(jnp.isfinite(u * jnp.inf), u, kink(u))),
    "a branch where constants are nan": with_pilot(lambda u: jnp.where(u * jnp.nan == u * jnp.nan, u, kink(u))),
    "a branch where infinite constants compare": with_pilot(
        lambda u: jnp.where(u * jnp.inf * jnp.ones(2) == jnp.inf, kink(u), u).sum()
    ),
    "a real latent in a concentration": of_reals(lambda z: pilot(dist.Beta(1e-15 + (z - 0.8) ** 2, 1.0), 0.5)),
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        HIDDEN,
        "a product of products",
        "a power of a product",
        "cumprod",
        "a dot product of powers",
        "a hill by a reciprocal root",
        "a hill by a logarithm",
        "a pole where two shares meet",
        "high powers of a share",
        "an exponential",
        "a real latent in a covariance",
        "a high power in a count",
        "a high power in a weight",
        "a branch where constants are nan",
    ),
)
def test_what_could_hide_between_the_points_of_a_certificate_is_refused(name):
    assert refusal_of(RewardModel(HIDDEN[name], A))


def high_powers_in_probabilities(u):
    numpyro.sample("first", dist.Categorical(jnp.stack([needle(u), 1.0 + 0.0 * u])), obs=1)
    numpyro.sample("second", dist.Geometric(0.5 * needle(u)), obs=2)


def test_high_powers_may_take_probability_away():
    """A hole of width 1e-6 in a density has a mass that no posterior misses."""
    assert refusal_of(RewardModel(with_pilot(high_powers_in_probabilities), A)) == ""


def triangle(sample):
    """A hill of 40 nats and width 1e-4 made of three walls, each 4e5 nats a unit: the second difference of softplus."""

    def make(u):
        wall = 4e5 * (jax.scipy.special.logit(u) - 0.3)
        for number, (shift, weight) in enumerate(((-40.0, -1.0), (0.0, 2.0), (40.0, -1.0))):
            sample(f"pilot{number}", wall + shift, weight)

    return with_pilot(make)


def by_weight(name, logits, weight):
    with handlers.scale(scale=weight * jnp.ones(())):
        numpyro.sample(name, dist.Bernoulli(logits=logits), obs=0)


def by_count(name, logits, weight):
    numpyro.sample(name, dist.Binomial(weight, logits=logits), obs=0)


def by_value(name, logits, weight):
    numpyro.sample(name, dist.Geometric(logits=logits), obs=5.0 * weight)


def by_concentrations(u):
    """A pole at .3, where the sum of two concentrations is 0, and a zero beside it."""
    numpyro.sample("first", dist.Beta(1e-3 * (u - 0.3) + 0.5, -0.5), obs=0.5)
    numpyro.sample("second", dist.Gamma(1e-3 * (u - 0.3 - 1e-9), 1.0), obs=1.0)


@pytest.mark.parametrize(
    "program", [triangle(by_weight), triangle(by_count), triangle(by_value), with_pilot(by_concentrations)]
)
def test_what_turns_a_density_around_is_no_program(program):
    with pytest.raises(InvalidProgram, match="leaves its domain"):
        RewardModel(program, A)


@pytest.mark.slow
def test_a_split_may_have_an_outer_weight():
    def program(arm):
        weight, rate = numpyro.sample("weight", dist.Gamma(2.0, 1.0)), latents("rate", dist.Beta(1.0, 1.0))
        with handlers.scale(scale=weight):
            bernoulli(rate[arm])

    assert collapsed(RewardModel(program, A), outer="weight").explanation.reason.startswith("exact given weight")


def test_a_row_whose_weight_is_negative_cannot_be_produced():
    def program(arm, context):
        rate = latents("rate", dist.Beta(1.0, 1.0))
        with handlers.scale(scale=context):
            bernoulli(rate[arm])

    model = RewardModel(program, A, np.float64(1.0))
    rows = Interaction(jnp.zeros(3, int), jnp.ones(3), jnp.array([1.0, 0.0, -1.0]))
    found = jax.jit(model.in_support)({"rate": jnp.full(A, 0.5)}, rows)
    assert found["reward"].tolist() == [True, True, False]


def of_share(link, prior=None):
    prior = (prior or dist.Beta(2.0, 3.0)).expand([A])
    return of_one_latent("rate", prior, lambda rate, arm: dist.Bernoulli(link(rate, arm)))


def of_rate(link, law=dist.Exponential):
    return of_one_latent("rate", dist.Gamma(2.0, 3.0).expand([A]), lambda rate, arm: law(link(rate, arm)))


def log_odds_of_half(half, arm):
    logits = jnp.log(2.0 * half) - jnp.log1p(-2.0 * half)
    return jax.nn.sigmoid(logits[arm])


def one_hot(arm):
    return jax.nn.one_hot(arm, A)


HARMLESS = {
    "where positive": of_rate(lambda z, arm: jnp.where(z > 0, z, 1.0)[arm]),
    "where not negative": of_rate(lambda z, arm: jnp.where(0.0 >= z[arm], 1.0, z[arm])),
    "maximum with 0": of_rate(lambda z, arm: jnp.maximum(z, 0.0)[arm]),
    "relu": of_rate(lambda z, arm: jax.nn.relu(z)[arm]),
    "abs": of_rate(lambda z, arm: jnp.abs(-z)[arm]),
    "the root of a one-hot product": of_rate(lambda z, arm: jnp.sqrt(one_hot(arm) @ z**2)),
    "the root of a sum over one-hot columns": of_rate(lambda z, arm: jnp.sqrt((one_hot(arm) * z**2).sum(-1))),
    "a sum over arms": of_rate(lambda z, arm: sum((arm == a) * z[a] for a in range(A)) ** 1.0),
    "log odds of a half": of_share(log_odds_of_half, dist.Uniform(0.0, 0.5)),
    "sigmoid of logit": of_share(lambda u, arm: jax.nn.sigmoid(jax.scipy.special.logit(u))[arm]),
    "sigmoid of logit, gathered": of_share(lambda u, arm: jax.nn.sigmoid(jax.scipy.special.logit(u)[arm])),
    "1 - (1 - share)": of_share(lambda u, arm: jnp.exp(jnp.log(1.0 - (1.0 - u)))[arm]),
    "-expm1(log1p(-share))": of_share(lambda u, arm: -jnp.expm1(jnp.log1p(-u))[arm]),
    "odds": of_share(lambda u, arm: (u / (1.0 - u))[arm] / (1.0 + (u / (1.0 - u))[arm])),
    "exp of log": of_rate(lambda z, arm: jnp.exp(jnp.log(z)[arm] + 0.5), dist.Poisson),
    "two multiples": of_rate(lambda z, arm: 1.0 / (z[arm] + 2.0 * z[arm])),
    "a clip at the ends": of_share(lambda u, arm: jnp.log(jnp.clip(u, 0.0, 1.0))[arm] * 0.0 + u[arm]),
    "is finite": of_rate(lambda z, arm: jnp.where(jnp.isfinite(z), z, 1.0)[arm], dist.Poisson),
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        HARMLESS,
        "where positive",
        "maximum with 0",
        "the root of a one-hot product",
        "log odds of a half",
        "sigmoid of logit, gathered",
        "odds",
        "exp of log",
        "is finite",
    ),
)
def test_harmless_spellings_are_not_refused(name):
    assert refusal_of(RewardModel(HARMLESS[name], A)) == ""


@pytest.mark.parametrize(
    "choose", [lambda z, which: z[which], lambda z, which: jnp.where(which > 0, z[0], z[1])], ids=["index", "where"]
)
def test_entries_that_data_choose_among_the_same_latents_are_different_numbers(choose):
    """The sum of two of them is no multiple of one, although both are one of the same two."""

    def program(arm, context):
        z = numpyro.sample("z", dist.Gamma(2.0, 3.0).expand([A]))
        first, second = choose(z, context).T
        numpyro.sample("reward", dist.Exponential(1.0 / (first + 2.0 * second)))

    assert "division" in refusal_of(RewardModel(program, A, np.zeros(2, int)))


def test_high_powers_are_no_sign_and_no_test_of_finiteness():
    """z^1000 overflows at 2 and underflows at .4, so a sign of it is a branch on z."""
    programs = [
        of_rate(lambda z, arm: jnp.where(z**1000 > 0, z, z**2)[arm]),
        of_rate(lambda z, arm: jnp.where(jnp.isfinite(z**1000), z, z**2)[arm]),
        of_rate(lambda z, arm: jnp.where(z**1000 == z**1000, z, z**2)[arm]),
    ]
    assert all(
        "comparison" in refusal_of(RewardModel(p, A)) or "finite" in refusal_of(RewardModel(p, A)) for p in programs
    )


SHARES = {
    "1 - p0 - p1": (lambda p: 1.0 - p[0, 0] - p[0, 1], True),
    "of two rows": (lambda p: 1.0 - p[0, 0] - p[1, 1], False),
    "the same twice": (lambda p: 1.0 - p[0, 0] - p[0, 0], False),
    "p0 + p2": (lambda p: p[1, 0] + p[1, 2], True),
    "1 - sum": (lambda p: 1.0 - p[0, :2].sum(), True),
    "cumsum": (lambda p: jnp.cumsum(p, axis=-1)[0, 1], True),
    "p1 / (1 - p0)": (lambda p: p[0, 1] / (1.0 - p[0, 0]), True),
    "p0 - p1": (lambda p: p[0, 0] - p[0, 1], False),
    "1 - .999 p0": (lambda p: 1.0 - 0.999 * p[0, 0], False),
    "1 - a sum over rows": (lambda p: 1.0 - p[:, 0].sum(), False),
}


@pytest.mark.parametrize("name", slow_but(SHARES, "1 - p0 - p1", "of two rows", "the same twice"))
def test_sums_over_a_simplex_are_shares_only_of_one_row_and_once(name):
    share, is_fine = SHARES[name]

    def program(arm):
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)).expand([A]))
        numpyro.factor("term", jnp.log(share(p)))
        numpyro.sample("reward", dist.Categorical(p[arm]))

    assert (refusal_of(RewardModel(program, A)) == "") == is_fine


def test_an_exact_engine_is_refused_with_the_line():
    with pytest.raises(NotConjugate, match=r"product of powers.*line \d+ of test_proof_for_all_data") as refused:
        conjugate(RewardModel(HIDDEN["a hill of width 1e-10"], A))
    assert "pole" in str(refused.value) and refused.value.explanation is not None


def test_a_kink_in_a_branch_of_data_is_refused_with_the_operation():
    """It is refused whether or not the branch is taken: the proof holds for all data."""

    def program(arm, context):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        normal(jnp.where(context > 1e6, jnp.abs(mean), mean))

    assert "abs" in refusal_of(RewardModel(program, A, np.float32(1.0)))


CHOSEN = {
    "a share or 0": (dist.Beta(2.0, 2.0), lambda u, c: jnp.where(c > 0, u, 0.0) > 0),
    "a share or 1": (dist.Beta(2.0, 2.0), lambda u, c: jnp.where(c > 0, u, 1.0) < 1),
    "a rate or infinity": (dist.Gamma(2.0, 2.0), lambda z, c: jnp.isfinite(jnp.where(c > 0, z, jnp.inf))),
    "a rate or a small number": (dist.Gamma(2.0, 2.0), lambda z, c: jnp.where(c > 0, z, 1e-30) > 1e-25),
    "a rate or its power": (dist.Gamma(2.0, 2.0), lambda z, c: jnp.where(c > 0, z, z**4) > 1e-19),
    "a product that overflows": (dist.Gamma(2.0, 2.0), lambda z, c: jnp.isfinite(1e300 * (100.0 * z) ** 4)),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_branch_is_left_out_only_if_no_data_take_it(name):
    """The other branch has a spike 1e-6 wide: no point of a certificate meets it."""
    prior, is_plain = CHOSEN[name]

    def program(arm, context):
        z = latents("z", prior)[arm]
        spike = 1.0 / (1.0 + ((z - 0.37) / 1e-6) ** 2)
        rate = jnp.where(is_plain(z, context), z, z * (1.0 - 0.5 * spike))
        reward(dist.Bernoulli(rate) if isinstance(prior, dist.Beta) else dist.Exponential(rate))

    assert refusal_of(RewardModel(program, A, np.float64(1.0)))


def test_a_triangular_solve_that_does_not_read_the_diagonal_is_no_power():
    def solved(z, unit_diagonal):
        matrix = jnp.full((8, 8), 0.5) * z
        solve = jax.lax.linalg.triangular_solve
        return solve(matrix, jnp.ones((8, 1)), left_side=True, lower=True, unit_diagonal=unit_diagonal)[-1, 0]

    found = [refusal_of(RewardModel(of_rates(lambda z, _, flag=flag: solved(z, flag)), A)) for flag in (False, True)]
    assert found[0] == "" and "triangular solve" in found[1]
