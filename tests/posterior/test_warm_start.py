"""Warm starts: a later process reuses proofs and traced functions, for the same task only and with the same results."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import (
    Bandit,
    Capabilities,
    Engine,
    Explanation,
    Interaction,
    InvalidProgram,
    Journal,
    RewardModel,
    engines,
    selectors,
)
from ppl_bandit.journal.model_files import bundled_models, load_model
from ppl_bandit.posterior import warm_start
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.model.tracing import forbid_programs
from ppl_bandit.runtime import artefact
from ppl_bandit.runtime.compile_ahead import CompiledAhead, run_afterwards, traced_once


def conversion(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def unknown_spread(arm):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("arms", 3):
        level = numpyro.sample("level", dist.Normal(0.0, spread))
    numpyro.sample("reward", dist.Normal(level[arm], 1.0))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Turn the disk cache on, in a folder of this test."""
    monkeypatch.delenv("PPL_BANDIT_CACHE")
    monkeypatch.setattr(artefact, "folder", lambda: tmp_path / "warm_starts")
    return tmp_path / "warm_starts"


@pytest.fixture(scope="module")
def first_start(tmp_path_factory):
    """A cache folder after the first start of `conversion`, and that bandit."""
    folder = tmp_path_factory.mktemp("first") / "warm_starts"
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PPL_BANDIT_CACHE")
        patched.setattr(artefact, "folder", lambda: folder)
        bandit = started(conversion, 3, num_samples=50)
    return folder, bandit


@pytest.fixture
def warm_cache(first_start, cache):
    """Turn the disk cache on, in a copy of the folder after the first start of `conversion`."""
    shutil.copytree(first_start[0], cache)
    return cache


# What a live bandit compiles for its first decision and update; a proof compiles other programs.
FIRST_FUNCTIONS = {"jit(init)", "jit(select)", "jit(update)", "jit(quick_update)"}


def started(*args, **options):
    """Return a bandit once its start is stored."""
    bandit = Bandit(*args, **options)
    settle()
    return bandit


def settle():
    """Wait for the background thread."""
    done = threading.Event()
    run_afterwards(done.set)
    assert done.wait(600)  # compiling takes minutes on a machine with other work


def later(*args, **options):
    """Return a bandit that starts as in a later process: bandits of one process share starts without the disk cache."""
    warm_start._kept.cache_clear()
    return Bandit(*args, **options)


def played(bandit, num_steps=6):
    """Return all that comes out of some steps: probabilities, decisions, evidence, and the posterior."""
    found = []
    for step in range(num_steps):
        decision = bandit.select()
        info = bandit.update(decision, float(step % 2))
        found.append((decision.arm, decision.best_arm_probs.tolist(), decision.propensity, bool(info.is_trusted)))
    return found, str(bandit.explain()), np.asarray(next(iter(bandit.posterior(50).values()))).tolist()


def check_warm_start(program, engine, first, cache, count_compilations):
    files = sorted(cache.iterdir())
    with count_compilations() as compiled:
        second = later(program, 3, num_samples=50)
        assert second.explanation.engine == engine
        for step in range(3):
            second.update(second.select(), float(step % 2))
        second._learner.run.wait()
    assert set(compiled) <= FIRST_FUNCTIONS, compiled  # no proof, not even for decisions and updates
    assert played(later(program, 3, num_samples=50)) == played(first)  # with the text of explain() and the draws
    assert sorted(cache.iterdir()) == files


def test_a_warm_start_makes_the_same_decisions_and_proves_nothing(first_start, warm_cache, count_compilations):
    assert len(list(warm_cache.iterdir())) == 1
    check_warm_start(conversion, "conjugate", first_start[1], warm_cache, count_compilations)


@pytest.mark.slow
def test_a_warm_start_with_particles_makes_the_same_decisions_and_proves_nothing(cache, count_compilations):
    first = started(unknown_spread, 3, num_samples=50)
    assert len(list(cache.iterdir())) == 1
    check_warm_start(unknown_spread, "collapsed", first, cache, count_compilations)


@pytest.mark.slow
def test_an_engine_is_built_when_more_than_the_first_functions_is_needed(warm_cache, tmp_path):
    bandit = later(conversion, 3, num_samples=50)
    # The batch update is traced now, and the engine is built inside that trace.
    bandit.update_many(arms=[0, 1, 2, 2] * 8, rewards=[1.0, 0.0, 1.0, 1.0] * 8)
    counts = bandit.posterior_parameters()["rate"]
    assert counts["concentration1"].tolist() == [9.0, 1.0, 17.0]
    assert counts["concentration0"].tolist() == [1.0, 9.0, 1.0]
    assert {decision.arm for decision in bandit.select_many(num_decisions=15)} <= {0, 1, 2}
    bandit.save(tmp_path / "saved")
    loaded = Bandit.load(tmp_path / "saved", conversion)
    assert loaded.select().best_arm_probs.tolist() == bandit.select().best_arm_probs.tolist()
    with Journal(tmp_path / "journal.db") as journal:
        recorded = later(conversion, 3, num_samples=50, journal=journal)
        recorded.update(recorded.select(), 1.0)
        again = later(conversion, 3, num_samples=50, journal=journal)
        assert again.posterior_parameters()["rate"]["concentration1"].sum() == 4.0


RUNS = []


def noted(arm):
    RUNS.append(jnp.shape(arm))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([3]))
    numpyro.sample("reward", dist.Bernoulli(logits=level[arm]))


class Hoard(NamedTuple):
    rewards: Any
    num_rows: Any
    total: Any
    nothing: Any


class Trust(NamedTuple):
    is_trusted: Any
    log_likelihood: Any


def hoarding(model):
    """An engine that keeps its rewards, in a buffer that doubles, and reads the program by a function that is traced once."""
    log_likelihood = traced_once(model.log_likelihood)

    def init(key):
        return Hoard(jnp.zeros(4), jnp.zeros((), int), jnp.zeros(()), jnp.zeros((0, 2)))

    def absorbed(state, rows, total):
        kept = state.rewards.at[state.num_rows].set(rows.reward[0])
        said = log_likelihood({"level": jnp.full(3, 0.5)}, rows._replace(mask=None))[0]
        return state._replace(rewards=kept, num_rows=state.num_rows + 1, total=total), Trust(jnp.asarray(True), said)

    def update(key, state, rows):
        return absorbed(state, rows, state.total + jnp.sum(state.rewards))

    def quick_update(key, state, rows):  # leaves the total as it was: the very same array
        return *absorbed(state, rows, state.total), state.num_rows % 3 != 2

    def reserve(state, num_rows):
        capacity, kept = state.rewards.shape[0], np.asarray(state.rewards)
        while capacity < int(state.num_rows) + num_rows:
            capacity *= 2
        return state._replace(rewards=np.concatenate([kept, np.zeros(capacity - kept.size)]))

    def sample(key, state, num):
        return {"level": jax.random.normal(key, (num, 3)) + state.total}

    given = Explanation("hoarding", False, "a test", {})
    capabilities = Capabilities(reserve=reserve, quick_update=quick_update, record_readings=lambda state: None)
    return Engine(init, update, sample, given, capabilities=capabilities)


@pytest.mark.slow
def test_an_engine_that_stores_rows_traces_its_update_in_the_background_starts_warm_and_grows(cache, monkeypatch):
    monkeypatch.setattr(warm_start, "_FACTORIES", {"hoarding"})
    monkeypatch.setattr(engines, "hoarding", hoarding, raising=False)
    monkeypatch.setattr("ppl_bandit.posterior.learning._FIRST_CAPACITY", 4)
    traced = []
    original = CompiledAhead._lower

    def lower(self, form):
        if not self._has_exported(form):
            traced.append((self._function.__name__, threading.current_thread() is threading.main_thread()))
        return original(self, form)

    monkeypatch.setattr(CompiledAhead, "_lower", lower)

    def played(bandit):
        """Return all that comes out of steps between which the compiler has its time, and the last state."""
        found = []
        for step in range(7):
            bandit._learner.run.wait()
            decision = bandit.select()
            info = bandit.update(decision, float(step % 2))
            found.append((decision.arm, decision.best_arm_probs.tolist(), float(info.log_likelihood)))
        return found, jax.tree.map(np.asarray, bandit._learner.state)

    first = started(noted, 3, engine=hoarding, num_samples=50, seed=3)
    assert traced == [("init", True), ("select", True), ("quick_update", True), ("update", False)]
    expected = played(first)
    traced.clear()
    second = later(noted, 3, engine=hoarding, num_samples=50, seed=3)
    second._learner.run.wait()
    assert not traced
    found, state = played(second)
    assert found == expected[0]
    jax.tree.map(np.testing.assert_array_equal, state, expected[1])
    assert state.rewards.shape == (8,) and state.total > 0
    assert {name for name, _ in traced} == {"select", "quick_update", "update"}  # for the larger capacity


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logistic", "student_t", "hierarchical_spread"])
def test_what_update_reads_of_a_program_is_recorded_before(name):
    file = load_model(name)
    with jax.enable_x64(True):
        engine = engines.reweight(RewardModel(file.program, file.num_arms, file.context, file.outcomes))
        key = jax.random.key(0)
        state = engine.init(key)
        contexts = jax.tree.map(lambda leaf: np.asarray(leaf, float)[None], file.context)
        rows = Interaction(np.zeros(1, int), np.ones(1), contexts)
        jax.eval_shape(engine.capabilities.quick_update, key, state, rows)
        engine.capabilities.record_readings(state)
        with forbid_programs():
            jax.eval_shape(engine.update, key, state, rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", bundled_models())
def test_every_bundled_model_decides_alike_after_a_warm_start(name, cache):
    file = load_model(name)
    given = {"context": file.context, "outcomes": file.outcomes, "num_samples": 100, "seed": 2}
    first = started(file.program, file.num_arms, **given)
    kept = sorted(cache.iterdir())
    second = later(file.program, file.num_arms, **given)
    assert sorted(cache.iterdir()) == kept
    run = second._learner.run
    assert all(part.exported is not None for _, part in run.first_functions())
    truth = {site: jnp.asarray(value) for site, value in file.truth.items()}
    for step in range(8):
        decisions = [bandit.select(*() if file.context is None else (file.context,)) for bandit in (first, second)]
        one, other = ((d.arm, d.best_arm_probs.tolist(), d.propensities.tolist()) for d in decisions)
        assert one == other
        drawn = first.model.draw_reward(jax.random.key(step), truth, decisions[0].arm, file.context)
        for bandit, decision in zip((first, second), decisions, strict=True):
            bandit.update(decision, jax.tree.map(float, drawn))


def logit(arm):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Bernoulli(logits=level[arm]))


@pytest.mark.slow
def test_a_later_process_skips_proofs_that_failed_until_the_explanation_is_read(cache, monkeypatch):
    with jax.enable_x64(True):  # as a live bandit does it
        first = engines.choose(RewardModel(logit, 2)).explanation
    assert first.engine == "reweight" and "Not exact, because" in first.report
    proofs = []
    choose = sys.modules["ppl_bandit.engines.choose"]
    noted = {name: lambda model, own=own: proofs.append(1) or own(model) for name, own in choose._PROVED.items()}
    monkeypatch.setattr(choose, "_PROVED", noted)
    with monkeypatch.context() as without_validation:
        without_validation.setattr("ppl_bandit.program.model.validation.abstract_trace", None)
        again = engines.choose(RewardModel(logit, 2)).explanation
    assert again.engine == "reweight" and not proofs
    assert str(again) == str(first) and len(proofs) == 2


@pytest.mark.slow  # a special case of the cache key
def test_an_equal_program_whose_proof_failed_is_explained_under_its_own_name(cache):
    engines.choose(RewardModel(logit, 2))

    def giraffe(arm):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([2]))
        numpyro.sample("reward", dist.Bernoulli(logits=level[arm]))

    text = str(engines.choose(RewardModel(giraffe, 2)).explanation)  # an equal program, under its own name
    assert "giraffe: APPROXIMATE" in text and "logit:" not in text


@pytest.mark.slow  # a special case of the cache key
def test_an_equal_program_with_another_name_is_explained_under_its_own_name(warm_cache, count_compilations):
    def zebra(arm):
        with numpyro.plate("arms", 3):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    with count_compilations() as compiled:
        found = Bandit(zebra, 3, num_samples=50)
        found._learner.run.wait()
    assert set(compiled) <= FIRST_FUNCTIONS, compiled
    text = found.explain()
    assert "zebra: EXACT" in text and "conversion" not in text


def test_a_cache_folder_that_cannot_be_written_has_no_effect(cache):
    cache.write_text("a file in its place")
    model = RewardModel(priced(), 2)
    model.save_result("none", None)
    assert RewardModel(priced(), 2).artefact.fingerprint == model.artefact.fingerprint


@pytest.mark.slow  # a proof and two compiled functions more
def test_a_bandit_starts_where_the_cache_folder_cannot_be_written(cache):
    cache.write_text("a file in its place")
    assert Bandit(conversion, 3, num_samples=50).select().arm in range(3)


def priced(price=1.0, shape=1.0):
    """Return a program with two numbers that can be changed."""

    def program(arm):
        rate = numpyro.sample("rate", dist.Gamma(shape, 1.0).expand([2]))
        numpyro.deterministic("expected_reward", price * rate[arm])
        numpyro.sample("reward", dist.Exponential(rate[arm]))

    return program


def bent(slope):
    @jax.custom_jvp
    def own(x):
        return x

    own.defjvp(lambda primals, tangents: (primals[0], slope * tangents[0]))

    def program(arm):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([2]))
        numpyro.sample("reward", dist.Normal(own(level)[arm], 1.0))

    return program


def key_of(program, **changed):
    return task_key_of(RewardModel(program, 2), **changed)


def task_key_of(model, **changed):
    options = {"selector": selectors.double_sampling(), "num_samples": 50, "draws": False, "factory": engines.choose}
    options |= changed
    factory = options.pop("factory")
    task = Task(model, None, seed=0, may_fall_back=True, **options)
    name = warm_start.start_name(task, factory)
    return None if name is None else (name, model.artefact.name)


def test_another_program_or_task_has_another_cache_key(cache):
    model = RewardModel(priced(), 2)
    base = task_key_of(model)
    assert base is not None and key_of(priced()) == base
    others = [
        key_of(priced(price=1.5)),
        key_of(priced(shape=1.5)),
        key_of(bent(1.0)),
        key_of(bent(2.0)),
        task_key_of(model, num_samples=51),
        task_key_of(model, draws=True),
        task_key_of(model, selector=selectors.thompson()),
        task_key_of(model, selector=selectors.with_floor(selectors.thompson(), 0.1)),
        task_key_of(model, selector=selectors.with_floor(selectors.thompson(), 0.2)),
        task_key_of(model, factory=engines.conjugate),
        task_key_of(model, factory=functools.partial(engines.conjugate, discount=0.9)),
        task_key_of(model, factory=engines.reweight),
        task_key_of(model, factory=engines.nuts),
        task_key_of(model, factory=functools.partial(engines.reweight, num_particles=500)),
    ]
    assert None not in others and len({base, *others}) == 1 + len(others)


class OwnNormal(dist.Normal):
    """Draws as it likes."""


class OwnAffine(dist.transforms.AffineTransform):
    """Goes one way as it likes."""


def of_prior(prior):
    def program(arm):
        level = numpyro.sample("level", prior)
        numpyro.sample("reward", dist.Normal(level[arm], 1.0))

    return program


def called_back(arm):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([2]))
    form = jax.ShapeDtypeStruct((), jnp.float32)
    offset = jax.pure_callback(lambda: np.float32(1.0), form, vmap_method="sequential")
    numpyro.sample("reward", dist.Normal(level[arm] + offset, 1.0))


def test_cached_facts_equal_those_of_validation(cache, monkeypatch):
    def program(arm, context):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([2, 3]))
        numpyro.sample("reward", dist.Normal(jnp.sum(level[arm] * context["x"], -1) + context["kind"], 1.0))

    model = RewardModel(program, 2, {"x": np.ones(3), "kind": 0})
    model.save_result("none", None)
    monkeypatch.setattr("ppl_bandit.program.model.validation.abstract_trace", None)  # it cannot be called
    again = RewardModel(program, 2, {"x": np.ones(3), "kind": 0})
    for name in model._facts._fields:
        if name not in ("context", "artefact"):
            assert getattr(again._facts, name) == getattr(model._facts, name)
    assert again._mean_method is model._mean_method and again.artefact.fingerprint == model.artefact.fingerprint


def test_a_program_that_is_wrong_is_refused_however_often_it_is_read(cache):
    def make(is_wrong):
        def program(arm):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
            numpyro.sample("reward", dist.Normal(jnp.cumsum(rate[arm]) if is_wrong else rate[arm], 1.0))

        return program

    RewardModel(make(False), 2).save_result("none", None)  # the same code
    for _ in range(2):
        with pytest.raises(InvalidProgram, match="changes with the other rows"):
            RewardModel(make(True), 2)


def test_what_cannot_be_identified_is_not_cached(cache):
    rule = selectors.selector_contract.as_selector(lambda key, table, step, *, allowed=None, marginals=None: None)
    two = dist.Normal(0.0, 1.0).expand([2])
    assert key_of(of_prior(two)) is not None
    assert key_of(of_prior(OwnNormal(0.0, 1.0).expand([2]))) is None
    assert key_of(of_prior(dist.TransformedDistribution(two, OwnAffine(0.0, 2.0)))) is None
    assert key_of(called_back) is None
    model = RewardModel(priced(), 2)
    assert task_key_of(model, selector=rule) is None
    for changed in (
        {"decide": selectors.greedy().decide},
        {"decide": selectors.top_two(0.9).decide},
        {"select_from_probs": selectors.thompson().select_from_probs},
        {"settings": {"challenge_rate": 0.9}},
    ):
        assert task_key_of(model, selector=dataclasses.replace(selectors.top_two(0.5), **changed)) is None
    assert task_key_of(model, factory=lambda model: engines.conjugate(model)) is None
    assert task_key_of(model, factory=engines.svi) is None


def test_jax_settings_are_part_of_the_cache_key(cache):
    model = RewardModel(priced(), 2)
    base = task_key_of(model)
    with jax.default_matmul_precision("highest"):
        changed = key_of(priced())
        assert task_key_of(model) is None  # it was validated under other settings
    assert None not in (base, changed) and changed != base and task_key_of(model) == base


_START = """
import json, jax, numpyro, numpyro.distributions as dist
from ppl_bandit import Bandit

compiled = []

def note(event, seconds, **facts):
    if event.endswith("backend_compile_duration"):
        compiled.append(str(facts.get("fun_name")))

jax.monitoring.register_event_duration_secs_listener(note)

def conversion(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))

def logit(arm):
    level = numpyro.sample("level", dist.Normal(0.0, 1.5).expand([3]))
    numpyro.sample("reward", dist.Bernoulli(logits=level[arm]))

bandit = Bandit(PROGRAM, 3, num_samples=50)
decisions = []
for step in range(NUM_STEPS):
    decision = bandit.select()
    decisions.append([decision.arm, *decision.best_arm_probs.tolist(), *decision.propensities.tolist()])
    bandit.update(decision, float(step % 2))
    if step == 0:
        first = list(compiled)
print(json.dumps([first, compiled[len(first) :], decisions]))
"""


def twice(folder, program, num_steps):
    """Play in one process and then in another: what was compiled up to the first update, what after it, and the decisions."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder)}
    del environment["PPL_BANDIT_CACHE"]
    script = _START.replace("PROGRAM", program).replace("NUM_STEPS", str(num_steps))
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
        )
        yield json.loads(ended.stdout)


@pytest.mark.slow  # two processes start; above, a warm start builds no engine
def test_a_warm_start_compiles_fewer_programs_than_the_first_and_later_steps_none(tmp_path):
    (first, later, decided), (second, later_again, decided_again) = twice(tmp_path, "conversion", 5)
    assert decided_again == decided
    assert len(second) < len(first), (first, second)
    assert {"jit(select)", "jit(update)"} <= set(first) & set(second)
    assert later == later_again == []


@pytest.mark.slow
def test_particles_are_renewed_alike_after_a_warm_start(tmp_path):
    (first, later, decided), (second, later_again, decided_again) = twice(tmp_path, "logit", 40)
    assert decided_again == decided
    programs = {"jit(init)", "jit(select)", "jit(quick_update)"}
    assert programs <= set(first) and programs <= set(second) and len(second) < len(first), (first, second)
    # The first row waits for none of the functions that renew draws.
    assert "jit(update)" not in (*first, *second) and later == later_again == ["jit(update)"]


def test_a_start_is_stored_although_more_was_prepared_before_the_background_thread_got_to_it(cache, monkeypatch):
    """One thread compiles in the background: if it waited for what was prepared later, it would wait for itself."""
    is_prepared, stored, store = threading.Event(), [], warm_start._store

    def store_later(*args):
        is_prepared.wait(60)
        store(*args)
        stored.append(True)

    monkeypatch.setattr(warm_start, "_store", store_later)
    bandit = Bandit(conversion, num_arms=3, num_samples=50)
    with jax.enable_x64(True):
        for _, function in bandit._learner.run.first_functions():
            function.prepare(np.zeros(7), is_traced_later=True)  # whatever it makes of this form
    is_prepared.set()
    done = threading.Event()
    run_afterwards(done.set)
    assert done.wait(120) and stored
