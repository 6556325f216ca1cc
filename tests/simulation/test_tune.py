"""Worlds from the prior, paired differences between selectors, and tune."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import bernoulli_engine, bernoulli_model, bernoulli_program

from ppl_bandit import Bandit, Environment, RewardModel, engines, selectors, simulate, tune
from ppl_bandit.engines.updates.exact import conjugate
from ppl_bandit.simulation.standings import CandidateRegret, choose_candidate
from ppl_bandit.simulation.tune import candidates, has_posterior_regret, posterior_regret, simulate_candidates
from ppl_bandit.types import Selection


@pytest.mark.slow
def test_every_realization_has_its_own_world_and_all_selectors_see_the_same_worlds():
    runs = simulate(
        0,
        bernoulli_model(2),
        bernoulli_engine(2),
        {"Thompson": selectors.thompson(), "Gittins": selectors.optimistic_gittins(20)},
        Environment.from_prior(bernoulli_model(2)),
        num_steps=20,
        num_realizations=400,
    )
    assert runs.attrs["worlds"] == "prior"
    gaps = np.asarray(runs.regret.max("step"))  # of the worse arm, in runs that played it
    both = np.all(gaps > 0, axis=0)
    np.testing.assert_array_equal(gaps[0, both], gaps[1, both])
    assert np.unique(gaps[0, both]).size == both.sum()
    # |difference of two uniforms| is 1/3 on average, with deviation .24: 400 worlds place it to .012; 5 of these.
    played = np.where(gaps.max(axis=0) > 0, gaps.max(axis=0), 0.0)
    assert abs(played.mean() - 1 / 3) < 0.06


def test_a_world_that_is_not_drawn_has_no_truth():
    with pytest.raises(ValueError, match=r"the truth is not drawn yet: call environment\.world\(key\)"):
        Environment.from_prior(bernoulli_model(2)).expected_rewards(None)


@pytest.mark.parametrize(
    "prior",
    [
        dist.Gamma(2.0, 1.0),
        *(
            pytest.param(d, marks=pytest.mark.slow)
            for d in (dist.Beta(2.0, 3.0), dist.Normal(5.0, 0.1), dist.Uniform(3.0, 4.0))
        ),
    ],
)
def test_worlds_are_drawn_inside_any_support(prior):
    def program(arm):
        level = numpyro.sample("level", prior.expand([2]))
        numpyro.sample("reward", dist.Normal(level[arm], 1.0))

    world = Environment.from_prior(RewardModel(program, 2)).world(jr.key(3))
    assert np.all(prior.support(world.truth["level"])) and np.unique(world.truth["level"]).size == 2


def test_only_a_truth_that_is_given_can_change():
    with pytest.raises(ValueError, match="changes was given without a truth"):
        Environment(bernoulli_model(2), None, changes={5: {"rate": jnp.array([0.1, 0.2])}})


def regret_of(name, regret, selector=None):
    regret = np.asarray(regret, float)[:, None]
    return CandidateRegret(name, selector or selectors.thompson(), regret, np.zeros(regret.shape, bool))


def test_differences_are_paired_over_the_same_worlds():
    rng = np.random.default_rng(0)
    hardness = rng.exponential(50.0, 200)  # common to all candidates
    regrets = [
        regret_of("good", hardness + rng.normal(size=200)),
        regret_of("as good", hardness + rng.normal(size=200)),
        regret_of("worse", hardness + 1.0 + rng.normal(size=200)),
    ]
    found = choose_candidate({one.name: one for one in regrets}, "mean", 10, 0.0)
    assert found.name in ("good", "as good") and found.num_worlds == 200
    worse = next(s for s in found.standings if s.name == "worse")
    # A difference of 1 with deviation sqrt(2), of 200: error .1, ten times smaller than the error of either mean.
    assert abs(worse.behind - 1.0) < 0.5 and worse.behind_error < 0.13 < worse.error
    assert worse.hardest > 2 * worse.mean


def test_a_candidate_with_a_regret_of_nan_does_not_lead():
    regrets = [regret_of("lost", [1.0, np.nan, 1.0]), regret_of("found", [5.0, 6.0, 7.0])]
    assert choose_candidate({one.name: one for one in regrets}, "mean", 10, 0.0).name == "found"


def test_among_equals_the_lower_tail_is_chosen_and_the_criterion_may_be_a_quantile():
    rng = np.random.default_rng(1)
    calm = rng.uniform(9.0, 11.0, 400)
    rash = np.where(np.arange(400) < 8, 300.0, calm - 6.3)
    assert rash.mean() < calm.mean()
    regrets = {"calm": regret_of("calm", calm), "rash": regret_of("rash", rash)}
    assert choose_candidate(regrets, "mean", 10, 0.0).name == "calm"
    assert choose_candidate(regrets, 0.5, 10, 0.0).name == "rash"


def test_among_equals_an_index_with_learning_is_chosen():
    rng = np.random.default_rng(4)
    leader = rng.normal(10.0, 1.0, 400)
    # Differences of deviation 2 over 400 worlds have a standard error of .1: 1.5 of these behind, then 3.
    noise = rng.normal(0.0, 2.0, 400)
    noise = 2.0 * (noise - noise.mean()) / noise.std()
    learns = selectors.optimistic_gittins(100, 2.0, 1.0)
    for behind, chosen in ((0.15, "learns"), (0.3, "leader")):
        regrets = {
            "leader": regret_of("leader", leader),
            "learns": regret_of("learns", leader + noise + behind, learns),
        }
        assert choose_candidate(regrets, "mean", 100, 0.0).name == chosen
    plain = {name: one._replace(selector=selectors.optimistic_gittins(100)) for name, one in regrets.items()}
    plain["learns"] = plain["learns"]._replace(regret=plain["learns"].regret - 0.15)
    assert (
        choose_candidate(plain, "mean", 100, 0.0).name == "leader"
    )  # without learning, one standard error is the limit
    tail = {"leader": regret_of("leader", leader), "learns": regret_of("learns", leader + 0.1 * noise + 0.15, learns)}
    found = choose_candidate(tail, 0.9, 100, 0.0)  # for a quantile, learning does not count
    own = found.standings[1]
    assert found.name == "leader" and own.behind_error < own.behind < 2 * own.behind_error


def sloped(arm, context):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("reward", dist.Normal(slope[arm] * context, 1.0))


def test_posterior_regret_sums_the_gaps_of_the_plays_under_each_truth():
    rng = np.random.default_rng(3)
    arms, contexts = rng.integers(0, 2, 12), rng.normal(size=12)
    rates, slopes = rng.uniform(size=(5, 2)), rng.normal(size=(5, 2))
    plain = rates[:, None, :] + np.zeros((5, 12, 1))
    contextual = slopes[:, None, :] * contexts[:, None]
    found = posterior_regret(bernoulli_model(2), {"rate": jnp.asarray(rates)}, jnp.asarray(arms), None)
    model = RewardModel(sloped, 2, jnp.array(0.5))
    others = posterior_regret(model, {"slope": jnp.asarray(slopes)}, jnp.asarray(arms), jnp.asarray(contexts))
    for (regret, is_stuck), rewards in ((found, plain), (others, contextual)):
        gaps = rewards.max(axis=2) - np.take_along_axis(rewards, arms[None, :, None], axis=2)[..., 0]
        np.testing.assert_allclose(regret, gaps.sum(axis=1), rtol=1e-5)
        np.testing.assert_array_equal(is_stuck, (gaps[:, -3:] > 0).all(axis=1))


@pytest.mark.slow
def test_posterior_regret_has_the_mean_of_the_true_regret_and_less_noise():
    rule, found = selectors.optimistic_gittins(30, 0.1), {}
    worlds = Environment.from_prior(bernoulli_model(2))
    for num_truths in (1, None):
        sizes = {"num_steps": 30, "num_worlds": 512, "num_samples": 1000, "num_truths": num_truths}
        ran = simulate_candidates({"": rule}, bernoulli_model(2), bernoulli_engine(2), worlds, **sizes, seed=0)
        found[num_truths] = ran[""].regret, ran[""].is_stuck
    (truth, is_stuck), (judged, are_stuck) = found[1], found[None]
    assert truth.shape == (512, 1) and judged.shape == (512, 32)
    difference = judged.mean(axis=1) - truth[:, 0]
    assert abs(difference.mean()) < 4 * difference.std() / difference.size**0.5
    # For a rule that explores little, most of the variance is whether its choice was right.
    assert judged.mean(axis=1).std() < 0.6 * truth.std()
    # A share of 512 has a standard error of .022 at most.
    assert abs(is_stuck.mean() - are_stuck.mean()) < 0.09
    assert abs(np.quantile(truth, 0.9) - np.quantile(judged, 0.9)) < 0.25 * np.quantile(truth, 0.9)


@pytest.mark.slow
def test_posterior_regret_needs_an_exact_posterior_of_the_worlds_own_prior():
    own, other = (
        Environment.from_prior(bernoulli_model(2)),
        Environment.from_prior(RewardModel(bernoulli_program(2), 2)),
    )
    assert has_posterior_regret(bernoulli_model(2), bernoulli_engine(2), own) and not has_posterior_regret(
        bernoulli_model(2), bernoulli_engine(2), other
    )
    assert not has_posterior_regret(
        bernoulli_model(2), bernoulli_engine(2), Environment(bernoulli_model(2), {"rate": jnp.array([0.2, 0.3])})
    )
    forgetful = engines.conjugate(bernoulli_model(2), discount=0.99)
    assert not has_posterior_regret(bernoulli_model(2), forgetful, own)
    path = Environment.from_path(bernoulli_model(2), {"rate": np.full((5, 2), 0.5)})
    assert not has_posterior_regret(bernoulli_model(2), bernoulli_engine(2), path)

    def believed(arm):  # worlds are drawn without the factor, the posterior includes it
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
        numpyro.factor("belief", jnp.log(rate).sum())
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    model = RewardModel(believed, 2)
    assert model.terms_beside_draws() == ("belief",) and not bernoulli_model(2).terms_beside_draws()
    assert not has_posterior_regret(model, engines.conjugate(model), Environment.from_prior(model))
    assert not has_posterior_regret(
        bernoulli_model(2),
        bernoulli_engine(2)._replace(explanation=bernoulli_engine(2).explanation._replace(is_exact=False)),
        own,
    )


@pytest.mark.slow  # a page of the documentation tunes, too
def test_tune_returns_a_selector_that_a_bandit_can_use():
    heard = []
    tuned = tune(
        bernoulli_model(2),
        30,
        {
            "top-two": selectors.top_two(),
            "patience 1": selectors.optimistic_gittins(30),
            "patience .1": selectors.optimistic_gittins(30, 0.1),
        },
        engine=bernoulli_engine(2),
        num_worlds=128,
        say=heard.append,
    )
    assert tuned.name != "top-two" and tuned.code.startswith("selectors.optimistic_gittins(horizon=30")
    assert (
        heard[0] == "compiling a function for 3 candidates ..."
        and heard[-1] == "3 of 3 candidates have played: patience .1"
    )
    assert tuned.regret["patience 1"].shape == (128,)
    assert str(tuned).count("\n") == 4
    bandit = Bandit(
        bernoulli_model(2), engine=lambda model: bernoulli_engine(2), selector=selectors.optimistic_gittins(2)
    )
    for _ in range(2):
        bandit.update(bandit.select(), reward=1.0)
    with pytest.raises(ValueError, match="step 3 is beyond the horizon of 2 decisions"):
        bandit.select()
    with pytest.raises(ValueError, match="step 4 is beyond the horizon"):
        bandit.select_many(num_decisions=2)


def test_a_function_of_the_user_is_a_candidate_beside_selectors():
    def last(key, table, step, *, allowed, marginals):
        return Selection(table.shape[1] - 1, table.mean(axis=0), 0, jnp.array([0, 1]))

    rules = {"last": last, "Thompson": selectors.thompson()}
    tuned = tune(bernoulli_model(2), 3, rules, engine=bernoulli_engine(2), num_worlds=4)
    alone = tune(bernoulli_model(2), 3, {"last": last}, engine=bernoulli_engine(2), num_worlds=4)
    np.testing.assert_allclose(tuned.regret["last"], alone.regret["last"])
    assert not np.allclose(tuned.regret["Thompson"], alone.regret["last"])


def test_candidates_are_every_selector_and_several_patiences():
    named = candidates(bernoulli_model(2), bernoulli_engine(2), 100)
    assert {"Gittins, patience 2, learning 1", "Gittins, patience 1", "information-directed"} <= named.keys()
    fewer = candidates(
        bernoulli_model(2),
        bernoulli_engine(2)._replace(capabilities=bernoulli_engine(2).capabilities._replace(marginals=None)),
        100,
    )
    assert named.keys() - fewer.keys() == {"Gittins, patience 2, learning 1", "Gittins, patience 4, learning 0.5"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(horizon=0), "horizon must be a positive integer, got 0"),
        (dict(criterion=2.0), r'criterion must be "mean" or a quantile strictly inside \(0, 1\), got 2.0'),
        (dict(selectors={}), "selectors is empty"),
        (dict(num_worlds=1.5), "num_worlds must be a positive integer, got 1.5"),
        (
            dict(environment=Environment.from_prior(bernoulli_model(2)), contexts=lambda key: 0),
            "contexts was given together",
        ),
        (
            dict(environment=Environment.from_path(bernoulli_model(2), {"rate": jnp.full((5, 2), 0.5)})),
            "10 steps were asked for, but the path of environment has 5",
        ),
        (dict(environment=Environment.from_prior(bernoulli_model(3))), "environment has 3 arms and reward_model 2"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tune(bernoulli_model(2), engine=bernoulli_engine(2), **({"horizon": 10} | arguments))


def known_noise(arm):
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    numpyro.sample("reward", dist.Normal(mean[arm], 3.0))


def own_noise(arm):
    with numpyro.plate("arms", 2):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0))
        mean = numpyro.sample("mean", dist.Normal(0.0, 0.5 * jnp.sqrt(variance)))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "count"),
    [
        (bernoulli_program(2), 2.0),
        (known_noise, 9.0 / 4.0),
        (own_noise, 4.0),
    ],  # a + b; 3^2 / 2^2; sigma^2 / (sigma / 2)^2
)
def test_a_prior_is_worth_as_many_rewards_as_a_textbook_says(program, count):
    model = RewardModel(program, 2)
    engine = conjugate(model)
    offered = engine.capabilities.marginals(engine.init(None), None)
    np.testing.assert_allclose(offered.pseudo_counts(), [count, count], rtol=1e-4)


@pytest.mark.slow
def test_the_tuned_selector_is_as_good_as_any_fixed_one_on_new_worlds():
    """Bernoulli arms, horizon 300: tuned on 256 worlds, tested on 1,024 others, paired."""
    named = candidates(bernoulli_model(2), bernoulli_engine(2), 300)
    tuned = tune(bernoulli_model(2), 300, named, engine=bernoulli_engine(2), num_worlds=256)
    judged = simulate(
        1,
        bernoulli_model(2),
        bernoulli_engine(2),
        named,
        Environment.from_prior(bernoulli_model(2)),
        num_steps=300,
        num_realizations=1024,
        summary=True,
    ).final_regret
    own = judged.sel(selector=tuned.name)
    for name in named:
        behind = np.asarray(own - judged.sel(selector=name))
        assert behind.mean() <= 3 * behind.std() / 32, name
