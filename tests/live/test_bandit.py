"""The live bandit: reproducible, saved and continued, and closed to bad input."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import bernoulli_bandit, bernoulli_parts

from ppl_bandit import Bandit, NotCertified, RewardModel, engines, selectors
from ppl_bandit.journal import checkpoints

ARMS = ["control", "low", "high"]


def linear(arm, context):
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0).expand([2]))
    weights = numpyro.sample("weights", dist.Normal(0.0, jnp.sqrt(variance)[:, None] * jnp.ones(2)).to_event(1))
    numpyro.sample("reward", dist.Normal((weights[arm] * context["x"]).sum(-1), jnp.sqrt(variance)[arm]))


@pytest.fixture(scope="module")
def conversion_parts():
    return bernoulli_parts(3)


@pytest.fixture(scope="module")
def linear_parts():
    model = RewardModel(linear, 2, context={"x": np.ones(2)})
    engine = engines.conjugate(model)
    return model, lambda _: engine


def conversion_bandit(parts, **options):
    return bernoulli_bandit(arms=ARMS, **options)


def frozen(bandit):
    """Everything that later decisions depend on, as comparable values."""
    experiment = bandit._experiment
    kept = {
        "state": experiment.projection.learner.state,
        "engine": bandit.explanation.engine,
        "history": experiment.history.rows()[:3],
        "num_decisions": experiment.num_decisions,
        "open": sorted(event.decision for event in experiment.store.pending(experiment.name)),
    }
    return {name: jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), value) for name, value in kept.items()}


def play(bandit, num_steps, rng, context=None):
    decisions = []
    for _ in range(num_steps):
        decision = bandit.select(context)
        decisions.append(decision)
        bandit.update(decision, float(rng.random() < 0.5))
    return decisions


def test_a_decision_speaks_the_arms_names_and_states_its_probabilities(conversion_parts):
    bandit = conversion_bandit(conversion_parts)
    decision = bandit.select()
    assert decision.arm in ARMS
    np.testing.assert_allclose(decision.best_arm_probs.sum(), 1.0, rtol=1e-12)
    assert decision.num_candidates == 1  # nothing is known yet: every arm may be best
    assert decision.propensity == decision.propensities[ARMS.index(decision.arm)]


def test_the_same_seed_and_calls_give_the_same_decisions(conversion_parts):
    first, second, third = (conversion_bandit(conversion_parts, seed=seed) for seed in (7, 7, 8))
    runs = [play(bandit, 25, np.random.default_rng(0)) for bandit in (first, second, third)]
    arms = [[decision.arm for decision in run] for run in runs]
    assert arms[0] == arms[1]
    assert arms[0] != arms[2]
    np.testing.assert_array_equal(runs[0][-1].best_arm_probs, runs[1][-1].best_arm_probs)


def test_a_decision_holds_no_memory_of_the_device(conversion_parts):
    # A store keeps the propensities of every decision; a view of a JAX array would keep its buffers, 4 kB each.
    bandit = conversion_bandit(conversion_parts)
    for decision in [bandit.select(), *bandit.select_many(num_decisions=2)]:
        owner = decision.propensities
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert owner.base is None


def test_reading_the_posterior_changes_no_later_decision(conversion_parts):
    first, second = (conversion_bandit(conversion_parts) for _ in range(2))
    second.posterior(100)
    second.expected_rewards()
    second.explain()
    assert [d.arm for d in play(first, 10, np.random.default_rng(0))] == [
        d.arm for d in play(second, 10, np.random.default_rng(0))
    ]


def test_the_posterior_is_beta_with_the_counts(conversion_parts):
    bandit = conversion_bandit(conversion_parts)
    for arm, reward in [("low", 1), ("low", 0), ("high", 1), ("low", True)]:
        bandit.update(arm=arm, reward=reward)
    found = bandit.posterior_parameters()["rate"]
    np.testing.assert_allclose(found["concentration1"], [1, 3, 2], rtol=1e-12)
    np.testing.assert_allclose(found["concentration0"], [1, 2, 1], rtol=1e-12)
    draws = bandit.posterior(4000)["rate"]
    # 5 standard errors of a Beta mean, whose sd is at most 0.3.
    np.testing.assert_allclose(draws.mean(0), [1 / 2, 3 / 5, 2 / 3], atol=5 * 0.3 / np.sqrt(4000))


def test_rewards_may_come_late_and_in_any_order(conversion_parts):
    prompt, late = (conversion_bandit(conversion_parts) for _ in range(2))
    rewards = [1, 0, 1, 1, 0, 0]
    decisions = [late.select() for _ in rewards]
    for index in (3, 0, 5, 2, 4, 1):
        late.update(decisions[index].id if index % 2 else decisions[index], rewards[index])
    for decision, reward in zip(decisions, rewards, strict=True):
        prompt.update(arm=decision.arm, reward=reward)
    for name in ("concentration1", "concentration0"):
        np.testing.assert_allclose(
            late.posterior_parameters()["rate"][name], prompt.posterior_parameters()["rate"][name], rtol=1e-12
        )


@pytest.mark.slow
def test_history_in_one_batch_is_history_row_by_row(linear_parts):
    model, engine = linear_parts
    batch, single = (Bandit(model, engine=engine) for _ in range(2))
    rng = np.random.default_rng(1)
    arms, rewards, x = rng.integers(0, 2, 37), 1e4 + rng.standard_normal(37), rng.standard_normal((37, 2))
    batch.update_many(arms=arms, rewards=rewards, contexts={"x": x})
    for row in range(37):
        single.update(arm=int(arms[row]), reward=rewards[row], context={"x": x[row]})
    found, expected = batch.posterior_parameters(), single.posterior_parameters()
    for site in expected:
        for name in expected[site]:
            # Both orders of summation round at 2e-16 per step; rates of 1e9 come from squares of 1e4.
            np.testing.assert_allclose(found[site][name], expected[site][name], rtol=1e-9, atol=1e-12)


def test_select_many_decides_as_select_would_and_independently_per_row(conversion_parts):
    batch, single = (conversion_bandit(conversion_parts) for _ in range(2))
    many = batch.select_many(num_decisions=60)
    assert [d.arm for d in many] == [single.select().arm for _ in range(60)]
    counts = np.array([sum(d.arm == arm for d in many) for arm in ARMS])
    # Equal arms: each count is Binomial(60, 1/3), sd 3.7; one shared draw would give 60, 0, 0.
    assert counts.min() > 20 - 5 * 3.7
    batch.update(many[3], 1)


def test_contexts_in_a_batch_each_get_their_own_decision(linear_parts):
    model, engine = linear_parts
    bandit = Bandit(model, engine=engine)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((400, 2))
    arms = rng.integers(0, 2, 400)
    weights = np.array([[1.0, 0.0], [0.0, 1.0]])
    bandit.update_many(
        arms=arms, rewards=(weights[arms] * x).sum(1) + 0.1 * rng.standard_normal(400), contexts={"x": x}
    )
    decisions = bandit.select_many({"x": np.array([[3.0, -3.0], [-3.0, 3.0], [3.0, -3.0]])})
    assert [d.arm for d in decisions] == [0, 1, 0]
    np.testing.assert_array_equal(decisions[1].context["x"], [-3.0, 3.0])


def test_allowed_arms_are_the_only_ones_played(conversion_parts):
    bandit = conversion_bandit(conversion_parts)
    for allowed in (["low", "high"], np.array([False, True, True])):
        chosen = {bandit.select(allowed=allowed).arm for _ in range(15)}
        assert chosen == {"low", "high"}
    assert bandit.select(allowed=["low", "high"]).propensities[0] == 0.0


BAD_UPDATES = {
    "nan": (dict(arm="low", reward=float("nan")), "reward is nan: a reward must be finite"),
    "infinite": (dict(arm="low", reward=float("inf")), "must be finite"),
    "out of support": (
        dict(arm="low", reward=2),
        "reward=2 is outside the support of the outcome 'reward' on arm 'low'",
    ),
    "not a number": (dict(arm="low", reward="many"), "reward must be a number, got 'many'"),
    "a list": (dict(arm="low", reward=[1, 0]), "has shape"),
    "missing": (dict(arm="low"), "reward is missing"),
    "unknown arm": (dict(arm="medium", reward=1), "'medium' is not an arm of this bandit; the arms are"),
    "an index for a name": (dict(arm=0, reward=1), "0 is not an arm"),
    "no arm": (dict(reward=1), "give a decision, or arm="),
    "an unwanted context": (dict(arm="low", reward=1, context=[1.0]), "takes arm alone"),
    "unknown outcome": (dict(arm="low", reward={"click": 1}), "has outcomes ['click'], expected ['reward']"),
    "a forged id": (dict(decision="abc-0", reward=1), "was not made by this bandit"),
}


@pytest.mark.parametrize("case", BAD_UPDATES)
def test_a_bad_update_names_the_argument_and_changes_nothing(conversion_parts, case):
    arguments, words = BAD_UPDATES[case]
    bandit = conversion_bandit(conversion_parts)
    play(bandit, 3, np.random.default_rng(0))
    bandit.select()
    before = frozen(bandit)
    with pytest.raises(ValueError) as error:
        bandit.update(**arguments)
    assert words in str(error.value)
    assert frozen(bandit) == before


def test_a_decision_takes_one_reward_of_its_own_bandit(conversion_parts):
    bandit, other = (conversion_bandit(conversion_parts) for _ in range(2))
    decision = bandit.select()
    other.select()  # the same number on the same seed is still another bandit's decision
    before = frozen(other)
    with pytest.raises(ValueError, match="was not made by this bandit"):
        other.update(decision, 1)
    assert frozen(other) == before
    bandit.update(decision, 1)
    before = frozen(bandit)
    assert bandit.update(decision, 1) is None  # said twice, learnt once
    with pytest.raises(ValueError, match="already has the reward 1, and 0 was given: pass correct=True"):
        bandit.update(decision, 0)
    with pytest.raises(ValueError, match="not both"):
        bandit.update(bandit.select(), 1, arm="low")
    del before["num_decisions"], before["open"]  # the select in between
    after = frozen(bandit)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(arms=[0, 1, 5], rewards=[1.0, 1.0, 1.0]), r"arms\[2\]=5 is not an arm"),
        (dict(arms=[0, 1], rewards=[1.0, np.nan]), "nan in row 1"),
        (dict(arms=[0, 1], rewards=[1.0]), r"rewards has shape \(1,\), expected \(2,\)"),
        (dict(arms=[], rewards=[]), "arms is empty"),
        (dict(arms=[0, 1], rewards=[1.0, 2.0], contexts={"x": np.ones((2, 3))}), r"shape \(2, 3\), expected \(2, 2\)"),
        (dict(arms=[0, 1], rewards=[1.0, 2.0], contexts={"y": np.ones((2, 2))}), "has the structure"),
        (dict(arms=[0, 1], rewards=[1.0, 2.0], contexts={"x": [["a", "b"], ["c", "d"]]}), "dtype|structure"),
        (dict(arms=[0, 1], rewards=[1.0, 2.0], contexts={"x": np.full((2, 2), np.inf)}), "every entry must be finite"),
        (dict(arms=[0, 1], rewards=[1.0, 2.0]), "contexts is missing"),
    ],
)
def test_a_bad_batch_is_turned_away_whole(linear_parts, arguments, words):
    model, engine = linear_parts
    bandit = Bandit(model, engine=engine)
    arguments = {"contexts": {"x": np.ones((len(arguments["arms"]), 2))}} | arguments
    if words == "contexts is missing":
        del arguments["contexts"]
    before = frozen(bandit)
    with pytest.raises(ValueError, match=words):
        bandit.update_many(**arguments)
    assert frozen(bandit) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(context={"x": np.ones(3)}), r"context\['x'\] has shape \(3,\), expected \(2,\)"),
        (dict(context=None), "context is missing"),
        (dict(context={"x": np.ones(2), "z": 1.0}), "has the structure"),
        (dict(context={"x": [1.0, np.nan]}), "holds nan|structure"),
        (dict(context={"x": np.ones(2)}, allowed=[]), "excludes every arm"),
        (dict(context={"x": np.ones(2)}, allowed=[4]), "is not an arm"),
        (dict(context={"x": np.ones(2)}, allowed=np.ones(5, bool)), "one entry per arm"),
    ],
)
def test_a_bad_selection_names_the_argument_and_makes_no_decision(linear_parts, arguments, words):
    model, engine = linear_parts
    bandit = Bandit(model, engine=engine)
    before = frozen(bandit)
    with pytest.raises(ValueError, match=words):
        bandit.select(**arguments)
    assert frozen(bandit) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(arms=["a", "a"]), "different names"),
        (dict(arms=["a", "b"], num_arms=3), "make them agree"),
        (dict(), "give num_arms="),
        (dict(arms=[1, 2, 3]), "must be strings"),
        (dict(num_arms=3, num_samples=0), "num_samples must be a positive integer"),
        (dict(num_arms=3, seed=-1), "seed must be an integer"),
    ],
)
def test_a_bandit_is_not_built_from_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        Bandit(linear, **options)


def test_a_loaded_bandit_continues_as_if_never_stopped(conversion_parts, tmp_path):
    model, engine = conversion_parts
    bandit = conversion_bandit(conversion_parts, seed=3)
    play(bandit, 10, np.random.default_rng(0))
    waiting = bandit.select()
    bandit.save(tmp_path / "bandit.db")
    loaded = Bandit.load(tmp_path / "bandit.db", model, engine=engine)
    assert frozen(loaded) == frozen(bandit) and not loaded._task.draws
    for copy in (bandit, loaded):
        copy.update(waiting.id, 1)
    ahead = [play(copy, 10, np.random.default_rng(1)) for copy in (bandit, loaded)]
    assert [d.arm for d in ahead[0]] == [d.arm for d in ahead[1]]
    assert not {d.id for d in ahead[0]} & {d.id for d in ahead[1]}  # two bandits from here on
    np.testing.assert_array_equal(ahead[0][-1].best_arm_probs, ahead[1][-1].best_arm_probs)


def test_a_file_whose_posterior_has_another_layout_is_learnt_again(conversion_parts, tmp_path, monkeypatch):
    model, engine = conversion_parts
    bandit = conversion_bandit(conversion_parts, seed=3)
    play(bandit, 10, np.random.default_rng(0))
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_state_form", lambda state: "the layout of another release")
        bandit.save(tmp_path / "bandit.db")
    loaded = Bandit.load(tmp_path / "bandit.db", model, engine=engine)
    assert loaded.num_rewards == 10
    for site, parameters in bandit.posterior_parameters().items():
        for name, values in parameters.items():
            np.testing.assert_allclose(loaded.posterior_parameters()[site][name], values, rtol=1e-12)


def test_contexts_and_open_decisions_survive_a_file(linear_parts, tmp_path):
    model, engine = linear_parts
    bandit = Bandit(model, engine=engine)
    waiting = bandit.select({"x": np.array([0.5, -0.5])})
    bandit.update(arm=1, reward=2.0, context={"x": [1.0, 2.0]})
    bandit.save(tmp_path / "bandit.db")
    loaded = Bandit.load(tmp_path / "bandit.db", model, engine=engine)
    loaded.update(waiting.id, 0.3)
    bandit.update(waiting, 0.3)
    assert frozen(loaded) == frozen(bandit)


def test_a_callers_later_edit_of_a_context_changes_nothing(linear_parts, tmp_path):
    model, engine = linear_parts
    bandit = Bandit(model, engine=engine, journal=tmp_path / "j.db")
    x = np.array([2.0, 3.0])
    decision = bandit.select({"x": x})
    x[0] = 1e6
    bandit.update(decision, 1.0)
    assert bandit.history()["x_0"].tolist() == [2.0]
    assert decision.to_dict()["context"] == {"x": [2.0, 3.0]}


def test_a_file_is_not_loaded_with_another_program_selector_or_format(conversion_parts, tmp_path):
    model, engine = conversion_parts
    path = tmp_path / "bandit.db"
    conversion_bandit(conversion_parts).save(path)

    def other(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 2.0).expand([3]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    with pytest.raises(ValueError, match="program: its computation, or a number in it, is different"):
        Bandit.load(path, other, engine=engine)
    with pytest.raises(ValueError, match=r"selector: it was double_sampling\(.*\), now it is thompson\(\)"):
        Bandit.load(path, model, engine=engine, selector=selectors.thompson())
    (tmp_path / "noise.db").write_bytes(b"noise")
    with pytest.raises(ValueError, match="is not a saved bandit"):
        Bandit.load(tmp_path / "noise.db", model)
    np.savez(tmp_path / "pickled.npz", header=np.array([{"format": "evil"}], dtype=object))
    with pytest.raises(ValueError, match="is not a saved bandit"):
        Bandit.load(tmp_path / "pickled.npz", model)


def surprising(arm, context):
    """Conjugate at every context that looks like the example, and not where the context is large."""
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Bernoulli(jnp.where(context > 100, rate[arm] ** 2, rate[arm])))


def test_a_datum_that_is_not_conjugate_is_reported_and_changes_nothing():
    bandit = Bandit(surprising, 2, context=1.0, engine=engines.conjugate)
    bandit.update(arm=0, reward=1, context=1.0)
    before = frozen(bandit)
    with pytest.raises(NotCertified, match="is not conjugate.*details: residual"):
        bandit.update(arm=0, reward=0, context=1000.0)
    assert frozen(bandit) == before
    bandit.update(arm=0, reward=0, context=2.0)


@pytest.mark.slow
def test_a_bandit_left_to_choose_moves_on_with_its_history_intact():
    bandit = Bandit(surprising, 2, context=1.0, num_samples=200)
    bandit.update_many(arms=[0] * 6 + [1] * 6, rewards=[1, 1, 1, 1, 0, 0] + [0] * 6, contexts=np.ones(12))
    waiting = bandit.select(1.0)
    assert bandit.explanation.is_exact
    with pytest.warns(UserWarning, match="uses the reweight engine, with all 13 rewards replayed") as warned:
        bandit.update(arm=0, reward=0, context=1000.0)
    assert len(warned) == 1
    assert not bandit.explanation.is_exact
    assert bandit.num_rewards == 13
    bandit.update(waiting, 1)
    # The exact posterior of arm 0 after 4 (or 5) successes and 2 failures, and one failure at rate squared, on a grid.
    grid = np.linspace(0.0005, 0.9995, 2000)
    density = grid ** (4 + (waiting.arm == 0)) * (1 - grid) ** 2 * (1 - grid**2)
    mean = (grid * density).sum() / density.sum()
    sd = np.sqrt(((grid - mean) ** 2 * density).sum() / density.sum())
    # An effective sample of at least 100 of the engine's 1,000 draws: 5 standard errors.
    assert abs(bandit.posterior(1000)["rate"][:, 0].mean() - mean) < 5 * sd / np.sqrt(100)
    assert "the larger is better: log evidence -" in bandit.explain()


def test_the_users_precision_flag_is_left_alone_and_accuracy_kept(conversion_parts):
    assert not jax.config.jax_enable_x64
    bandit = conversion_bandit(conversion_parts)
    bandit.update_many(arms=["low"] * 64, rewards=np.arange(64) % 2)
    assert not jax.config.jax_enable_x64
    assert jnp.zeros(()).dtype == jnp.float32
    found = bandit.posterior_parameters()["rate"]["concentration1"]
    np.testing.assert_allclose(found, [1, 33, 1], rtol=1e-12)


def test_updates_and_selections_compile_once(conversion_parts, caplog):
    bandit = conversion_bandit(conversion_parts, num_samples=31)  # its functions are its own, and not compiled before
    play(bandit, 1, np.random.default_rng(0))
    with jax.log_compiles(True), caplog.at_level(logging.DEBUG):
        play(bandit, 20, np.random.default_rng(0))
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    assert compiled == []
    with jax.log_compiles(True), caplog.at_level(logging.DEBUG):
        for num_rows in (3, 32, 5, 64, 26, 7):
            bandit.update_many(arms=["low"] * num_rows, rewards=np.ones(num_rows))
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    assert sum("update" in line for line in compiled) == 1  # a batch of 32 rows; a batch of 1 was compiled before


def test_explain_says_what_was_proved_and_what_the_data_say(conversion_parts):
    bandit = conversion_bandit(conversion_parts)
    bandit.update_many(arms=["low"] * 40 + ["high"] * 40, rewards=[1] * 10 + [0] * 30 + [1] * 35 + [0] * 5)
    text = bandit.explain()
    for words in (
        "EXACT",
        "rate: Beta",
        "adds (+1, +0)",
        "checked: the closed form is proved",
        "learnt from 80 rewards",
        "double_sampling",
    ):
        assert words in text
    row = next(line for line in text.splitlines() if line.strip().startswith("high"))
    assert " 40 " in row and float(row.split()[-2]) > 0.8  # P(best); the arm never played keeps a share


def test_arviz_gets_named_arms_and_the_data(conversion_parts):
    pytest.importorskip("arviz")
    bandit = conversion_bandit(conversion_parts)
    bandit.update_many(arms=["low", "high", "low"], rewards=[1, 0, 1])
    tree = bandit.to_arviz(50)
    assert list(tree["posterior"]["rate"].coords["arm"].values) == ARMS
    assert tree["posterior"]["rate"].shape == (1, 50, 3)
    assert tree["observed_data"]["reward"].values.tolist() == [1.0, 0.0, 1.0]
    assert tree["constant_data"]["played_arm"].values.tolist() == ["low", "high", "low"]
    rate = tree["posterior"]["rate"].values[0]
    expected = np.log(np.stack([rate[:, 1], 1 - rate[:, 2], rate[:, 1]], axis=1))
    np.testing.assert_allclose(tree["log_likelihood"]["reward"].values[0], expected, rtol=1e-10)


@pytest.mark.slow
def test_a_decision_notes_arms_whose_expected_reward_has_no_mean():
    def waiting(arm):
        mean = numpyro.sample("mean", dist.InverseGamma(1.0, 60.0).expand([2]))
        numpyro.sample("reward", dist.Exponential(1.0 / mean[arm]))

    bandit = Bandit(waiting, arms=["tea", "coffee"])
    # Under InverseGamma(1, b) a mean has no mean; one reward makes it InverseGamma(2, b + y), which has one.
    (note,) = bandit.select().notes
    assert note.startswith("expected reward of tea, coffee: its own expectation over the latents is infinite")
    bandit.update(arm="tea", reward=30.0)
    decision = bandit.select()
    assert decision.notes[0].startswith("expected reward of coffee: ")
    assert json.loads(json.dumps(decision.to_dict()))["notes"] == list(decision.notes)
    bandit.update(arm="coffee", reward=30.0)
    assert bandit.select().notes == ()


@pytest.mark.slow
def test_a_reward_beyond_a_moving_support_is_learnt_or_refused_with_nothing_changed():
    def up_to(arm):
        top = numpyro.sample("top", dist.Gamma(3.0, 1.0).expand([2]))
        numpyro.sample("reward", dist.Uniform(0.0, top[arm]))

    bandit = Bandit(up_to, num_arms=2)
    bandit.update(arm=0, reward=0.5)
    bandit.update(arm=0, reward=5.0)
    top = bandit.posterior(1000)["top"][:, 0]
    # Gamma(3, 1) times t^-2 beyond 5 is 5 plus an Exponential(1): its mean is 6, off by 4 / sqrt(500).
    assert top.min() >= 5.0 and abs(top.mean() - 6.0) < 0.18
    before = bandit.posterior(100)["top"]
    with pytest.raises(ValueError, match="reward=-1 is outside the support of the outcome 'reward' on arm 0"):
        bandit.update(arm=0, reward=-1.0)
    assert bandit.num_rewards == 2
    np.testing.assert_array_equal(bandit.posterior(100)["top"], before)


@pytest.mark.slow
def test_a_live_bandit_that_is_not_exact_renews_its_draws_and_says_so_once(caplog, monkeypatch):
    runs = []

    def click(arm):
        runs.append(arm)
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.5))
        numpyro.sample("reward", dist.Bernoulli(logits=weight * (1.0 + arm)))

    monkeypatch.setattr("ppl_bandit.posterior.learning._FIRST_CAPACITY", 16)
    bandit = Bandit(RewardModel(click, 2), engine=engines.reweight, num_samples=100)
    rewards, arms = [1, 1, 0, 1, 1, 1, 1, 0, 1, 1], []
    num_runs, learn = len(runs), bandit._learner.run.update
    with caplog.at_level(logging.INFO, logger="ppl_bandit"):
        for reward in rewards:
            decision = bandit.select()
            arms.append(decision.arm)
            info = bandit.update(decision, reward)
            assert bool(info.is_trusted)
    assert sum("renewed" in record.getMessage() for record in caplog.records) == int(info.num_refreshes) > 0
    assert len(runs) == num_runs and len(learn._compilations) == 1  # one form, traced once
    grid = np.linspace(-8.0, 8.0, 4001)
    logits = grid[:, None] * (1.0 + np.array(arms))
    log_density = -0.5 * (grid / 1.5) ** 2 + (logits * rewards - np.logaddexp(0.0, logits)).sum(axis=1)
    density = np.exp(log_density - log_density.max())
    mean = (grid * density).sum() / density.sum()
    sd = np.sqrt(((grid - mean) ** 2 * density).sum() / density.sum())
    # An effective sample of at least half of the 1,000 particles, and as many draws of them: 5 standard errors.
    assert abs(bandit.posterior(1000)["weight"].mean() - mean) < 5 * sd * np.sqrt(1 / 500 + 1 / 1000)


@pytest.mark.slow
def test_a_program_without_forward_mode_is_played():
    @jax.custom_vjp
    def sigmoid(x):
        return 1.0 / (1.0 + jnp.exp(-x))

    # The slope is made of the function itself: forward mode meets a custom_vjp.
    sigmoid.defvjp(lambda x: (sigmoid(x),) * 2, lambda y, outer: (outer * y * (1.0 - y),))

    def click(arm):
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.5).expand([2]))
        numpyro.sample("reward", dist.Bernoulli(sigmoid(weight[arm])))

    bandit = Bandit(click, num_arms=2)
    assert bandit.explanation.engine == "reweight"
    for step in range(12):
        decision = bandit.select()
        info = bandit.update(decision, float(decision.arm == 1 or step % 3 == 0))
        assert bool(info.is_trusted)
    assert bandit.select().best_arm_probs[1] > 0.5


@pytest.mark.slow
def test_a_reward_that_only_rounding_keeps_from_being_certified_is_told_so():
    def level(arm):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([2]))
        numpyro.sample("reward", dist.Normal(mean[arm], 1.0))

    bandit = Bandit(level, num_arms=2, engine=engines.conjugate)
    with pytest.raises(
        NotCertified,
        match="rounding could hide a deviation; a prior whose middle and width fit .* leave less to round; nothing was",
    ):
        bandit.update(arm=0, reward=3e6)
    assert bandit.num_rewards == 0
