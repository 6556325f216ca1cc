"""From the exact engine to the next that is nearest to it, and from there, once the evidence stays away, further."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, Capabilities, engines
from ppl_bandit.posterior import fallback
from ppl_bandit.types import Engine, Explanation


def drifting(arm, context):
    """Conjugate at every context that looks like the example; beyond 100, given `shift` alone."""
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(mean[arm] + jnp.where(context > 100, shift**2, shift), 0.5))


@pytest.mark.slow
def test_a_datum_that_is_conjugate_given_one_site_leads_to_the_collapsed_engine(tmp_path):
    bandit = Bandit(drifting, 2, context=1.0, num_samples=200)
    arms, rewards = np.array([0, 1, 0, 1]), np.array([0.7, 1.9, 0.4, 1.6])
    bandit.update_many(arms=arms, rewards=rewards, contexts=np.ones(4))
    assert bandit.explanation.is_exact
    with pytest.warns(UserWarning, match="uses the collapsed engine, with all 5 rewards replayed") as warned:
        bandit.update(arm=0, reward=1.2, context=1000.0)
    assert len(warned) == 1 and bandit.num_rewards == 5
    assert "EXACT GIVEN shift" in bandit.explain()

    grid = np.linspace(-5.0, 5.0, 4001)
    log_density, moments = -0.5 * grid**2, []
    for arm in (0, 1):
        offsets = [(r, grid) for a, r in zip(arms, rewards, strict=True) if a == arm] + (
            [(1.2, grid**2)] if arm == 0 else []
        )
        residuals = np.stack([r - offset for r, offset in offsets]) / 0.25
        precision = 1.0 + len(offsets) / 0.25
        moments.append((residuals.sum(axis=0) / precision, 1.0 / precision))
        log_density += 0.5 * residuals.sum(axis=0) ** 2 / precision - 0.5 * (residuals**2 * 0.25).sum(axis=0)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    drawn = bandit.posterior(1000)["mean"]
    for arm, (means, variance) in enumerate(moments):
        mean = weights @ means
        sd = np.sqrt(weights @ means**2 - mean**2 + variance)
        # At least half of 1,000 particles count: 5 standard errors.
        assert abs(drawn[:, arm].mean() - mean) < 5 * sd / np.sqrt(500)

    # The engine was found by way of that datum: a file has to remember it.
    bandit.save(tmp_path / "moved")
    loaded = Bandit.load(tmp_path / "moved", drifting)
    np.testing.assert_array_equal(loaded.posterior(1000)["mean"], drawn)
    for _ in range(2):
        ours, theirs = bandit.select(2.0), loaded.select(2.0)
        assert (ours.arm, ours.propensity) == (theirs.arm, theirs.propensity)
        assert bandit.update(ours, 0.5).log_evidence == loaded.update(theirs, 0.5).log_evidence
    again = Bandit.load(tmp_path / "moved", drifting)
    again.save(tmp_path / "again")
    np.testing.assert_array_equal(Bandit.load(tmp_path / "again", drifting).posterior(1000)["mean"], drawn)


def wary(model):
    """An engine of the user's own, exact in truth, that does not trust its draws after a reward of 1."""
    engine = engines.conjugate(model)

    def update(key, state, rows):
        after, info = engine.update(key, state, rows)
        return after, info._replace(is_trusted=jnp.all(rows.reward == 0))

    return engine._replace(
        update=update,
        explanation=engine.explanation._replace(engine="wary", is_exact=False),
        capabilities=Capabilities(),
    )


def clicks(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


@pytest.mark.slow
def test_draws_that_lack_evidence_are_told_for_as_long_as_they_do(tmp_path):
    """The warning comes once; who looks later, or loads the bandit, has to see it too, until draws are trusted again."""
    bandit = Bandit(clicks, 2, engine=wary)
    with pytest.warns(UserWarning, match="used with caution"):
        bandit.update(arm=0, reward=1)
    assert "NOT TRUSTED" in bandit.explain()
    bandit.save(tmp_path / "doubted")
    assert "NOT TRUSTED" in Bandit.load(tmp_path / "doubted", clicks, engine=wary).explain()
    bandit.update(arm=0, reward=0)
    assert "NOT TRUSTED" not in bandit.explain()


class FakeInfo(NamedTuple):
    is_trusted: jax.Array
    ess: jax.Array
    num_refreshes: jax.Array
    is_full: jax.Array
    may_recover: jax.Array


def fake(name):
    """An engine whose draws lack evidence after a reward below 0, and all but a few of them after one below -1.

    They are renewed with every second reward, and beyond repair after one below -2.
    """

    def factory(model):
        def update(key, state, interaction):
            lowest = jnp.min(interaction.reward)
            ess = jnp.where((lowest < -1.0) & (lowest >= -2.0), 50.0, 900.0)
            num = state + interaction.arm.shape[0]
            return num, FakeInfo(lowest >= 0.0, ess, (num + 1) // 2, jnp.array(False), lowest >= -2.0)

        def sample(key, state, num_samples):
            return {"mean": jr.normal(key, (num_samples, 2))}

        explanation = Explanation(name, False, "", {}, name)
        return Engine(lambda key: jnp.zeros(()), update, sample, explanation, settings={"num_particles": 1000})

    return factory


def plain(arm):
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.0))


@pytest.fixture(params=["reweight", pytest.param("collapsed", marks=pytest.mark.slow)])
def doubter(request, monkeypatch):
    monkeypatch.setattr(fallback, "LADDER", {request.param: "nuts"})
    monkeypatch.setattr(engines, "nuts", fake("nuts"))
    monkeypatch.setattr(engines, "reweight", fake(request.param))
    return Bandit(plain, 2, engine=engines.reweight, num_samples=10)


def give(bandit, *rewards):
    for reward in rewards:
        bandit.update(arm=0, reward=reward)


def test_draws_without_evidence_are_kept_while_the_next_rewards_may_bring_it(doubter, tmp_path):
    name = doubter.explanation.engine
    with pytest.warns(UserWarning, match="renewed as rewards come, so these draws are used with caution"):
        give(doubter, -0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        give(doubter, *[-0.5] * 17)  # 18 rewards, 9 renewals
        assert "NOT TRUSTED" in doubter.explain() and doubter.explanation.engine == name
        doubter.save(tmp_path / "doubted")
        give(doubter, 1.0)
        assert "NOT TRUSTED" not in doubter.explain()
        give(doubter, *[-0.5] * 19)
    assert doubter.explanation.engine == name and doubter.num_rewards == 38
    with pytest.warns(UserWarning, match="uses the nuts engine, with all 39 rewards replayed"):
        give(doubter, -0.5)
    # How often they were renewed in vain is saved with it.
    loaded = Bandit.load(tmp_path / "doubted", plain, engine=engines.reweight)
    with pytest.warns(UserWarning, match="uses the nuts engine, with all 19 rewards replayed"):
        give(loaded, -0.5)


@pytest.mark.parametrize("reward", [-1.5, -2.5], ids=["few count", "beyond repair"])
def test_draws_that_no_reward_will_mend_are_replaced_at_once(doubter, reward):
    give(doubter, 1.0)
    with pytest.warns(UserWarning, match="uses the nuts engine, with all 2 rewards replayed"):
        give(doubter, reward)


def test_a_batch_whose_draws_lack_evidence_leads_to_the_next_engine(doubter):
    with pytest.warns(UserWarning, match="uses the nuts engine, with all 2 rewards replayed"):
        doubter.update_many(arms=[0, 1], rewards=[-0.5, -0.5])
