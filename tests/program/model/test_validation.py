"""Building a reward model says, in one sentence, what is wrong with a program."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from programs import bernoulli, gammas, latents, normal, rates, reals, reward

from ppl_bandit import Interaction, InvalidProgram, RewardModel


def known_latent(arm):
    rate = rates()
    share = numpyro.sample("share", dist.Delta(0.5))
    bernoulli(share * rate[arm])


def subsampled_plate(arm):
    rate = rates()
    with numpyro.plate("rows", 10, subsample_size=arm.shape[0]):
        bernoulli(rate[arm])


def branches_on_arm(arm):
    rate = rates()
    if arm[0] == 0:
        rate = 1 - rate
    bernoulli(rate[arm])


def branches_on_arm_as_if_it_were_a_number(arm):
    rate = rates()
    if arm == 0:
        rate = 1 - rate
    bernoulli(rate[arm])


def prior_depends_on_context(arm, context):
    normal(latents("mean", dist.Normal(context.sum(), 1))[arm])


def factor_depends_on_arm(arm):
    mean = reals()
    numpyro.factor("penalty", -jnp.sum(mean[arm] ** 2))
    normal(mean[arm])


def expected_reward_of_wrong_shape(arm):
    rate = rates()
    bernoulli(rate[arm])
    numpyro.deterministic("expected_reward", rate.sum())


def is_weighted(arm):
    with handlers.scale(scale=3.0):
        rate = rates()
    bernoulli(rate[arm])


def is_masked(arm):
    with handlers.mask(mask=jnp.array([True, False])):
        rate = rates()
    bernoulli(rate[arm])


def calls_back(arm):
    mean = reals()
    squared = jax.pure_callback(np.square, jax.ShapeDtypeStruct(mean.shape, mean.dtype), mean, vmap_method="sequential")
    normal(squared[arm])


def calls_back_in_single_precision(arm):
    mean = reals()
    given = mean.astype(jnp.float32)
    squared = jax.pure_callback(
        np.square, jax.ShapeDtypeStruct(given.shape, given.dtype), given, vmap_method="sequential"
    )
    normal(squared[arm])


def samples_inside_a_scan(arm):
    start = numpyro.sample("start", dist.Normal(0, 1))

    def walk(place, _):
        place = numpyro.sample("place", dist.Normal(place, 1))
        return place, place

    _, places = scan(walk, start, None, length=2)
    normal(places[arm])


def weights_for_probabilities(arm):
    weight = gammas("weight")
    mixing = dist.Categorical(probs=jnp.broadcast_to(weight, (*arm.shape, 2)))
    numpyro.sample("reward", dist.MixtureSameFamily(mixing, dist.Normal(jnp.zeros((*arm.shape, 2)), 1.0)))


INVALID = {
    "is weighted": (is_weighted, "inside handlers.scale"),
    "is masked": (is_masked, "inside handlers.mask"),
    "calls back": (calls_back, "a callback of the program (line"),
    "calls back in single precision": (
        calls_back_in_single_precision,
        "cannot differentiate the program by its latents (line",
    ),
    "samples inside a scan": (samples_inside_a_scan, "NumPyro's own scan"),
    "weights for probabilities": (weights_for_probabilities, "probs of 'reward' do not sum to 1"),
    "misspells a method": (lambda arm: normal(reals()[arm].summ()), "AttributeError"),
    "no outcome": (
        lambda arm: numpyro.sample("click", dist.Bernoulli(rates()[arm])),
        "no sample site 'reward'; its sample sites are ['rate', 'click']",
    ),
    "outcome is deterministic": (lambda arm: numpyro.deterministic("reward", rates()[arm]), "no sample site 'reward'"),
    "outcome is observed": (
        lambda arm: reward(dist.Bernoulli(rates()[arm]), obs=jnp.ones(arm.shape)),
        "passes obs= to 'reward'",
    ),
    "outcome of wrong shape": (
        lambda arm: bernoulli(rates()),
        "has shape (2,) (batch (2,), event ()) for 3 rows of data",
    ),
    "outcome with event shape": (
        lambda arm: reward(dist.Bernoulli(rates()[arm]).to_event(1)),
        "with an empty event shape",
    ),
    "latent per row": (
        lambda arm: normal(reals("effect", arm.shape[0])),
        "'effect' has shape (2,) for 2 rows and (3,) for 3",
    ),
    "discrete latent": (
        lambda arm: reward(
            dist.Bernoulli(jnp.where(numpyro.sample("kind", dist.Bernoulli(0.5)) == 1, 0.2, 0.8) * jnp.ones(arm.shape))
        ),
        "'kind' is discrete: sum it out",
    ),
    "known latent": (known_latent, "'share' has a Delta prior"),
    "param site": (
        lambda arm: bernoulli(numpyro.param("rate", jnp.array([0.5, 0.5]))[arm]),
        "numpyro.param 'rate' has no posterior",
    ),
    "no latent": (lambda arm: reward(dist.Bernoulli(jnp.array([0.2, 0.3])[arm])), "no latent sample site"),
    "subsampled plate": (subsampled_plate, "'rows' is subsampled"),
    "branches on arm": (branches_on_arm, "`if arm[0] == 0:`"),
    "branches on arm as if it were a number": (branches_on_arm_as_if_it_were_a_number, "`if arm == 0:`"),
    "turns arm into numpy": (lambda arm: reward(dist.Bernoulli(rates()[np.asarray(arm)])), "only known at run time"),
    "prior depends on arm": (
        lambda arm: normal(latents("mean", dist.Normal(jnp.mean(arm * 1.0), 1))[arm]),
        "depends on arm",
    ),
    "factor depends on arm": (factor_depends_on_arm, "depends on arm"),
    "expected reward of drawn value": (
        lambda arm: numpyro.deterministic("expected_reward", 2.0 * reward(dist.Bernoulli(rates()[arm]))),
        "depends on the drawn value",
    ),
    "expected reward of wrong shape": (
        expected_reward_of_wrong_shape,
        "expected_reward must be a numpyro.deterministic of shape (N,)",
    ),
    "rows are coupled": (lambda arm: normal(jnp.cumsum(reals()[arm])), "changes with the other rows"),
    "raises an error": (lambda arm: bernoulli(rates()[arm] @ jnp.ones((7, 7))), "the program failed on 2 rows (line"),
    "has no mean": (lambda arm: reward(dist.Cauchy(reals("centre")[arm], 1.0)), "no finite mean"),
    "has an infinite mean": (
        lambda arm: reward(dist.Pareto(1.0, latents("alpha", dist.Uniform(0.1, 0.9))[arm])),
        "no finite mean",
    ),
    "is never possible": (
        lambda arm: reward(dist.Normal(0.0, -latents("scale", dist.Gamma(1, 1))[arm])),
        "not finite at any value",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_program_is_refused_with_the_reason(name):
    program, words = INVALID[name]
    with pytest.raises(InvalidProgram) as error:
        RewardModel(program, 2)
    assert words in str(error.value)


def test_a_prior_that_depends_on_context_is_refused():
    with pytest.raises(InvalidProgram, match="depends on context"):
        RewardModel(prior_depends_on_context, 2, context=np.ones(2))


def test_an_arm_without_an_entry_of_its_own_is_refused():
    def two_rates(arm):
        bernoulli(rates(2)[arm])

    with pytest.raises(InvalidProgram, match="reads entries 0 to 2 of an axis with 2 entries"):
        RewardModel(two_rates, 3)


def test_several_outcomes_need_to_say_what_to_maximise():
    def two(arm):
        rate = rates()[arm]
        numpyro.sample("click", dist.Bernoulli(rate))
        numpyro.sample("buy", dist.Bernoulli(rate))

    with pytest.raises(InvalidProgram, match="must say what to maximise"):
        RewardModel(two, 2, outcomes=("click", "buy"))


def with_context(arm, context):
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    normal((weights[arm] * context).sum(-1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(program=with_context, num_arms=2), "no example was given"),
        (dict(program=lambda arm: None, num_arms=2, context=1.0), "takes arm alone"),
        (dict(program=lambda a, b, c: None, num_arms=2), "needs 3 positional arguments"),
        (dict(program="model", num_arms=2), "program must be a function"),
        (dict(program=with_context, num_arms=0, context=np.ones(3)), "num_arms must be a positive integer, got 0"),
        (dict(program=with_context, num_arms=2.0, context=np.ones(3)), "num_arms must be a positive integer, got 2.0"),
        (dict(program=with_context, num_arms=2, context="big"), "context must hold numbers"),
        (
            dict(program=with_context, num_arms=2, context=np.ones(3), outcomes=()),
            "outcomes must be a list or tuple of different",
        ),
        (
            dict(program=with_context, num_arms=2, context=np.ones(3), outcomes=3),
            "outcomes must be a list or tuple of different .* got 3",
        ),
        (dict(program=with_context, num_arms=2, context=np.ones(4)), "the program failed on 2 rows"),
    ],
)
def test_arguments_are_checked_before_the_program_runs(arguments, words):
    with pytest.raises(InvalidProgram, match=words):
        RewardModel(**arguments)


def test_validation_leaves_the_users_precision_flag_alone():
    before = jax.config.jax_enable_x64
    RewardModel(with_context, 2, context=np.ones(3))
    assert jax.config.jax_enable_x64 == before


def test_a_program_gets_jax_arrays():
    def with_intercept(arm, context):
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([2, 3]).to_event(2))[arm]
        features = context.at[:, 0].set(1.0)
        mean = jax.lax.fori_loop(0, 3, lambda d, total: total + weights[:, d] * features[:, d], jnp.zeros(arm.shape))
        normal(mean)

    assert "formula" in RewardModel(with_intercept, 2, context=np.ones(3)).expected_reward_method


def test_a_number_of_trials_that_comes_as_a_float_is_told_what_to_do():
    def trials(arm, context):
        numpyro.sample("reward", dist.Binomial(context, rates()[arm]))

    with pytest.raises(InvalidProgram, match=r"\.astype\(int\)"):
        RewardModel(trials, 2, context=5.0)
    RewardModel(lambda arm, context: trials(arm, context.astype(int)), 2, context=5.0)


def test_a_support_that_moves_with_a_latent_takes_what_some_latent_can_produce():
    def up_to(arm):
        top = numpyro.sample("top", dist.Gamma(2, 1).expand([2]))
        numpyro.sample("reward", dist.Uniform(0.0, top[arm]))

    model = RewardModel(up_to, 2)
    latents = {"top": jnp.array([1.0, 1.0])}
    found = model.in_support(latents, Interaction(jnp.array([0, 1, 0]), jnp.array([0.5, 9.0, -1.0])))
    assert found["reward"].tolist() == [True, True, False]


def test_a_callback_in_float64_is_refused_with_what_works():
    @jax.custom_vjp
    def sigmoid(x):
        return jax.pure_callback(lambda x: 1 / (1 + np.exp(-np.asarray(x))), x, x, vmap_method="broadcast_all")

    sigmoid.defvjp(lambda x: (sigmoid(x),) * 2, lambda y, outer: (outer * y * (1 - y),))

    def click(arm):
        weight = reals("weight")
        bernoulli(sigmoid(weight[arm]))

    with pytest.raises(
        InvalidProgram, match=r"line \d+ of test_validation.py: .*pure_callback.*float64.*jax_enable_x64"
    ):
        RewardModel(click, 2)


def test_an_improper_prior_is_refused_with_proper_ones_named():
    def program(arm):
        level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (2,), ()))
        normal(level[arm])

    with pytest.raises(InvalidProgram, match=r"'level' has the improper prior.*dist\.Normal\(0\.0, 100\.0\)"):
        RewardModel(program, 2)


def test_a_program_that_counts_its_runs_is_not_taken_for_rows_that_depend_on_each_other():
    runs = []

    def program(arm):
        runs.append(arm)
        level = reals("level")
        numpyro.sample("reward", dist.Normal(level[arm], 1.0 + len(runs)))

    with pytest.raises(InvalidProgram, match="two runs of the program with the same arguments differ.*counter"):
        RewardModel(program, 2)
