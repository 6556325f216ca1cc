"""A live step does not wait for the compiler, and batches are split into fixed sizes."""

import jax.numpy as jnp
import numpy as np
import pytest
from shared_models import Trust, bernoulli_bandit, bernoulli_model

from ppl_bandit import Bandit, Engine, Explanation
from ppl_bandit.posterior.learning import batch_sizes


def swelling(model):
    """An engine whose state has another shape after every reward, although it offers no `reserve`."""

    def update(key, state, rows):
        return jnp.append(state, rows.reward[0]), Trust(jnp.asarray(True))

    return Engine(
        lambda key: jnp.zeros(1),
        update,
        lambda key, state, num: {"rate": jnp.full((num, 3), state.size / 4)},
        Explanation("swelling", False, "a test", {}),
    )


@pytest.mark.slow
def test_a_state_may_change_its_shape(tmp_path):
    bandit = Bandit(bernoulli_model(3), engine=swelling, num_samples=8)
    for num_seen in (1, 2):
        bandit.update(bandit.select(), 1.0)
        np.testing.assert_array_equal(bandit._learner.state, [0.0, *[1.0] * num_seen])
        assert np.all(bandit.posterior(2)["rate"] == (1 + num_seen) / 4)
    bandit.save(tmp_path / "swollen")
    loaded = Bandit.load(tmp_path / "swollen", bernoulli_model(3), engine=swelling)
    np.testing.assert_array_equal(loaded._learner.state, [0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "num_rows, expected", [(1, [1]), (2, [32]), (3, [32]), (33, [32, 1]), (34, [32, 32]), (2000, [1024, 1024])]
)
def test_rows_are_split_into_few_sizes_with_little_padding(num_rows, expected):
    assert batch_sizes(num_rows, (1024, 32, 1)) == expected


def test_an_update_in_several_batches_is_one_update():
    rng = np.random.default_rng(0)
    arms, rewards = rng.integers(0, 3, 70), rng.integers(0, 2, 70)
    bandit = bernoulli_bandit()
    info = bandit.update_many(arms=arms, rewards=rewards)
    assert info.is_certified.shape == (70,) and info.is_trusted
    won = np.bincount(arms, rewards, minlength=3)
    np.testing.assert_allclose(bandit.posterior_parameters()["rate"]["concentration1"], 1.0 + won)
    with pytest.raises(ValueError, match="row 65"):
        bandit.update_many(arms=arms, rewards=np.where(np.arange(70) == 65, 0.5, rewards))
    assert bandit.num_rewards == 70


@pytest.mark.slow
def test_both_routes_decide_and_a_batch_decides_as_single_calls_do():
    for draws in (False, True):
        one, many = (bernoulli_bandit(seed=3, draws=draws) for _ in range(2))
        batch = many.select_many(num_decisions=18)  # a batch of 16 and two single decisions
        for theirs in batch:
            ours = one.select()
            assert ours.arm == theirs.arm and ours.num_candidates == theirs.num_candidates
            np.testing.assert_allclose(ours.best_arm_probs, theirs.best_arm_probs, atol=1e-12)
            np.testing.assert_allclose(ours.propensities, theirs.propensities, atol=1e-9)
