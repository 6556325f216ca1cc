"""Bandits of one process share the start of a program: with the same results, and for the same program and settings only."""

import functools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import bernoulli_bandit

from ppl_bandit import Bandit, RewardModel, engines, selectors
from ppl_bandit.posterior.task import Task
from ppl_bandit.posterior.warm_start import MAX_STARTS, _kept, find_start, start_name
from ppl_bandit.types import InvalidProgram

PRIOR = SimpleNamespace(successes=1.0)


def conversion(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(PRIOR.successes, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def played(**options):
    """Return the decisions of a new bandit and its posterior after them."""
    bandit = Bandit(conversion, 2, num_samples=20, **options)
    decisions = []
    for step in range(4):
        decision = bandit.select()
        decisions.append((decision.arm, decision.best_arm_probs.tolist(), decision.propensity))
        bandit.update(decision, step % 2)
    return decisions, bandit.posterior_parameters()["rate"]["concentration1"].tolist(), bandit.explain()


@pytest.fixture(scope="module")
def first():
    _kept.cache_clear()
    return played()


def test_a_second_bandit_decides_as_the_first_and_compiles_neither_decision_nor_update(first, count_compilations):
    with count_compilations() as compiled:
        second = played()
    assert second == first
    assert not {"jit(init)", "jit(select)", "jit(update)", "jit(quick_update)"} & set(compiled)


def test_bandits_with_other_seeds_and_names_of_arms_keep_their_own(first, count_compilations):
    with count_compilations() as compiled:
        decisions, counts, text = played(arms=["red", "blue"], seed=3)
        assert {arm for arm, *_ in decisions} <= {"red", "blue"} and "red" in text and "red" not in first[2]
        assert decisions != played(arms=["red", "blue"], seed=4)[0] and sum(counts) == 4.0
    assert "jit(select)" not in compiled


@pytest.mark.slow
def test_bandits_of_several_threads_share_a_start(first):
    with ThreadPoolExecutor(4) as pool:
        assert all(found == first for found in pool.map(lambda _: played(), range(4)))


@pytest.mark.slow
def test_a_variable_that_changed_is_read_again_and_refused_in_a_model_that_read_another_value(first, monkeypatch):
    model = RewardModel(conversion, 2)
    counts = []
    for successes in (1.0, 5.0, 1.0):
        monkeypatch.setattr(PRIOR, "successes", successes)
        bandit = Bandit(conversion, 2, num_samples=20)
        counts.append(bandit.posterior_parameters()["rate"]["concentration1"].tolist())
        if successes == 5.0:
            _kept.cache_clear()  # else it might be given the start of the bandit above, which read the same value
            with pytest.raises(InvalidProgram, match="PRIOR.successes, which the program reads, has changed"):
                Bandit(model, num_samples=20)
    assert counts == [[1.0, 1.0], [5.0, 5.0], [1.0, 1.0]]
    assert Bandit(model, num_samples=20).posterior_parameters()["rate"]["concentration1"].tolist() == [1.0, 1.0]


def task_of(model, **changed):
    settings = {"selector": selectors.double_sampling(), "num_samples": 50, "draws": False, **changed}
    return Task(model, None, seed=0, may_fall_back=True, **settings)


def key_of(model, factory=engines.choose, **changed):
    name = start_name(task_of(model, **changed), factory)
    return None if name is None else (name, model.artefact.name)


def test_other_programs_and_settings_have_other_keys(monkeypatch):
    def renamed(arm):
        return conversion(arm)

    model = RewardModel(conversion, 2)
    base = key_of(model)
    assert base is not None and key_of(RewardModel(conversion, 2)) == base
    others = [
        key_of(RewardModel(renamed, 2)),
        key_of(model, selector=selectors.thompson()),
        key_of(model, num_samples=51),
        key_of(model, draws=True),
        key_of(model, engines.reweight),
        key_of(model, functools.partial(engines.reweight, num_particles=500)),
    ]
    with jax.default_matmul_precision("highest"):
        assert key_of(model) is None  # it was validated under other settings
        others.append(key_of(RewardModel(conversion, 2)))
    monkeypatch.setattr(PRIOR, "successes", 2.0)
    assert key_of(model) is None  # it was validated for another value
    others.append(key_of(RewardModel(conversion, 2)))
    assert None not in others and len({base, *others}) == 1 + len(others)


def test_what_cannot_be_identified_is_not_shared():
    class OwnBeta(dist.Beta):
        """Draws as it likes."""

    def own(arm):
        rate = numpyro.sample("rate", OwnBeta(1.0, 1.0).expand([2]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    assert key_of(RewardModel(own, 2)) is None
    assert key_of(RewardModel(conversion, 2), lambda model: engines.conjugate(model)) is None


def test_the_starts_that_were_not_used_for_longest_are_dropped(monkeypatch):
    _kept.cache_clear()
    monkeypatch.setattr("ppl_bandit.posterior.warm_start._new_start", lambda *given: object())
    model = RewardModel(conversion, 2)

    def found(num_samples):
        return find_start(task_of(model, num_samples=num_samples), engines.choose)

    first = [found(number) for number in range(1, MAX_STARTS + 1)]
    assert found(1) is first[0] and len(set(map(id, first))) == MAX_STARTS
    found(MAX_STARTS + 1)
    assert found(1) is first[0] and found(2) is not first[1]  # the first was used after it
    _kept.cache_clear()


def test_bandits_whose_factory_returns_the_same_engine_share_compiled_functions(count_compilations):
    first = bernoulli_bandit(2)
    first.update(first.select(), 1.0)
    with count_compilations() as compiled:
        second = bernoulli_bandit(2)
        second.update(second.select(), 1.0)
    assert not {"jit(init)", "jit(select)", "jit(update)"} & set(compiled)
