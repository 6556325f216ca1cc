"""What one process proved and traced, the next takes over: only for the same task, and with the same results."""

import functools
import json
import os
import subprocess
import sys
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
    InvalidProgram,
    Journal,
    RewardModel,
    engines,
    selectors,
)
from ppl_bandit.commands.model_files import bundled_models, load_model
from ppl_bandit.posterior import learning, warm_start
from ppl_bandit.posterior.warm_start import words_of
from ppl_bandit.program.model.recorded_readings import recorded
from ppl_bandit.runtime import disk_cache
from ppl_bandit.runtime.compile_ahead import Ahead


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
def kept_in(tmp_path, monkeypatch):
    """Keep starts in a folder of this test's own, and count the engines that are built."""
    monkeypatch.delenv("PPL_BANDIT_CACHE")
    monkeypatch.setattr(disk_cache, "folder", lambda: tmp_path / "starts")
    return tmp_path / "starts"


@pytest.fixture
def num_built(monkeypatch):
    built = []
    original = learning._built
    monkeypatch.setattr(learning, "_built", lambda *args: built.append(1) or original(*args))
    return lambda: len(built)


def played(bandit, num_steps=6):
    """Return all that comes out of some steps: probabilities, decisions, evidence, and the posterior."""
    found = []
    for step in range(num_steps):
        decision = bandit.select()
        info = bandit.update(decision, float(step % 2))
        found.append((decision.arm, decision.best_arm_probs.tolist(), decision.propensity, bool(info.is_trusted)))
    return found, str(bandit.explain()), np.asarray(next(iter(bandit.posterior(50).values()))).tolist()


@pytest.mark.parametrize(
    "program, engine",
    [(conversion, "conjugate"), pytest.param(unknown_spread, "collapsed", marks=pytest.mark.slow)],
)
def test_a_start_that_is_taken_over_decides_as_the_first_did(program, engine, kept_in, num_built):
    first = Bandit(program, 3, num_samples=50, seed=4)
    files = sorted(kept_in.iterdir())
    assert len(files) == 2  # of the program, and of the start on it
    second = Bandit(program, 3, num_samples=50, seed=4)
    assert num_built() == 1  # the engine of the second is not built, not even for decisions and updates
    assert second._learner.engine.explanation.engine == engine
    for step in range(3):
        second.update(second.select(), float(step % 2))
    assert num_built() == 1
    third = Bandit(program, 3, num_samples=50, seed=4)
    assert played(third) == played(first)
    assert num_built() == 2  # by the draws of the posterior
    assert sorted(kept_in.iterdir()) == files


def test_everything_else_that_a_bandit_does_builds_its_engine_when_it_is_asked(kept_in, num_built, tmp_path):
    Bandit(conversion, 3, num_samples=50)
    bandit = Bandit(conversion, 3, num_samples=50)
    # Traced now: in the middle of it the engine is built.
    bandit.update_many(arms=[0, 1, 2, 2] * 8, rewards=[1.0, 0.0, 1.0, 1.0] * 8)
    assert num_built() == 2
    counts = bandit.posterior_parameters()["rate"]
    assert counts["concentration1"].tolist() == [9.0, 1.0, 17.0]
    assert counts["concentration0"].tolist() == [1.0, 9.0, 1.0]
    assert {decision.arm for decision in bandit.select_many(num_decisions=15)} <= {0, 1, 2}
    bandit.save(tmp_path / "saved")
    loaded = Bandit.load(tmp_path / "saved", conversion)
    assert loaded.select().best_arm_probs.tolist() == bandit.select().best_arm_probs.tolist()
    with Journal(tmp_path / "journal.db") as journal:
        recorded = Bandit(conversion, 3, num_samples=50, journal=journal)
        recorded.update(recorded.select(), 1.0)
        again = Bandit(conversion, 3, num_samples=50, journal=journal)
        assert num_built() == 2  # the experiment goes on without
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
    """An engine that keeps its rewards, in room that doubles, reads the program by recordings, and believes little of it."""
    log_likelihood = recorded(model.log_likelihood)

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
    capabilities = Capabilities(reserve=reserve, quick_update=quick_update, is_traceable_without_program=True)
    return Engine(init, update, sample, given, capabilities=capabilities)


def test_an_engine_that_keeps_its_data_starts_from_what_another_traced_and_grows_without_the_program(
    kept_in, num_built, monkeypatch
):
    monkeypatch.setitem(warm_start._FACTORIES, hoarding, "hoarding")
    monkeypatch.setattr("ppl_bandit.posterior.learning._FIRST_ROOM", 4)
    traced = []
    original = Ahead._lower

    def lower(self, shapes, signature, *options):
        traced.append((self._function.__name__, str(signature) in self.portables))
        return original(self, shapes, signature, *options)

    monkeypatch.setattr(Ahead, "_lower", lower)

    def played(bandit):
        """Return all that comes out of steps between which the compiler has its time, and the last state."""
        found = []
        for step in range(7):
            bandit.warm_up()
            decision = bandit.select()
            info = bandit.update(decision, float(step % 2))
            found.append((decision.arm, decision.best_arm_probs.tolist(), float(info.log_likelihood)))
        return found, jax.tree.map(np.asarray, bandit._learner.state)

    first = Bandit(noted, 3, engine=hoarding, num_samples=50, seed=3)
    assert {name for name, _ in traced} == {"first", "select", "learn", "learn_quickly"}
    expected = played(first)
    traced.clear()
    RUNS.clear()
    second = Bandit(noted, 3, engine=hoarding, num_samples=50, seed=3)
    second.warm_up()
    assert num_built() == 2  # it is cheap, and needed for more room
    assert {name for name, is_known in traced if is_known} >= {"first", "learn", "learn_quickly"}
    assert all(is_known for _, is_known in traced)  # nothing is traced again
    assert RUNS
    RUNS.clear()
    found, state = played(second)
    assert found == expected[0]
    jax.tree.map(np.testing.assert_array_equal, state, expected[1])
    assert state.rewards.shape == (8,) and state.total > 0
    run = second._learner.run
    assert not RUNS  # what the program computes was recorded when it began
    assert run.select.num_waits == run.learn.num_waits == run.learn_quickly.num_waits == 0
    failed = [p.exception() for part in (run.select, run.learn, run.learn_quickly) for p in part._promises.values()]
    assert set(failed) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("name", bundled_models())
def test_every_bundled_model_starts_a_second_time_as_it_did_first(name, kept_in):
    file = load_model(name)
    given = {"context": file.context, "outcomes": file.outcomes, "num_samples": 100, "seed": 2}
    first = Bandit(file.program, file.num_arms, **given)
    kept = sorted(kept_in.iterdir())
    second = Bandit(file.program, file.num_arms, **given)
    assert sorted(kept_in.iterdir()) == kept
    run = second._learner.run
    assert all(part.portables for part in (run.init, run.select, run.learn, run.learn_quickly) if part is not None)
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


def test_what_was_refused_is_not_proved_again(kept_in, monkeypatch):
    with jax.enable_x64(True):  # as a live bandit does it
        first = engines.choose(RewardModel(logit, 2)).explanation
    monkeypatch.setattr(sys.modules["ppl_bandit.engines.choose"], "PROVED", (None, None))  # which cannot be called
    monkeypatch.setattr(
        "ppl_bandit.program.model.validation.abstract_trace", None
    )  # nor is the program validated again
    assert engines.choose(RewardModel(logit, 2)).explanation == first
    assert first.engine == "reweight" and "Not exact, because" in first.report


def test_what_is_damaged_is_not_found(kept_in):
    model = RewardModel(conversion, 3)
    model.keep("a start", "words")
    assert model.found("words") == "a start" and model.found("other words") is None
    for file in kept_in.iterdir():
        file.write_bytes(b"not a start")
    assert model.found("words") is None and RewardModel(conversion, 3).num_arms == 3


def test_what_was_cut_or_changed_is_not_read(kept_in):
    disk_cache.keep("name", list(range(100)))
    file = kept_in / "name"
    whole = file.read_bytes()
    assert disk_cache.kept("name") == list(range(100))
    for contents in (b"", whole[:20], whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"x" + whole[1:]):
        file.write_bytes(contents)
        assert disk_cache.kept("name") is None


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(tmp_path, monkeypatch, kept_in):
    kept_in.parent.joinpath("starts").write_text("a file in its place")
    assert Bandit(conversion, 3, num_samples=50).select().arm in range(3)


def test_what_cannot_be_written_down_is_not_kept(kept_in):
    disk_cache.keep("name", lambda: None)
    assert disk_cache.kept("name") is None


def test_the_oldest_starts_are_let_go(kept_in, monkeypatch):
    monkeypatch.setattr(disk_cache, "_MAX_FILES", 3)
    for index in range(5):
        disk_cache.keep(f"name-{index}", index)
        os.utime(kept_in / f"name-{index}", (index, index))
    assert {file.name for file in kept_in.iterdir()} == {"name-2", "name-3", "name-4"}
    assert disk_cache.latest("name-") == "name-4" and disk_cache.latest("other-") is None
    assert disk_cache.kept("name-4") == 4 and disk_cache.kept("name-0") is None


def priced(price=1.0, shape=1.0):
    """Return a program of which one number is changed at a time."""

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


def name_of(program, **changed):
    return task_name_of(RewardModel(program, 2), **changed)


def task_name_of(model, **changed):
    options = {"selector": selectors.double_sampling(), "num_samples": 50, "draws": False, "factory": engines.choose}
    options |= changed
    words = words_of(options["selector"], options["num_samples"], options["draws"], options["factory"])
    return (
        None
        if words is None or model.program_fingerprint is None
        else (model._place(*words), model.program_fingerprint)
    )


def test_another_program_or_task_has_another_name(kept_in):
    model = RewardModel(priced(), 2)
    base = task_name_of(model)
    assert base is not None and name_of(priced()) == base
    others = [
        name_of(priced(price=1.5)),
        name_of(priced(shape=1.5)),
        name_of(bent(1.0)),
        name_of(bent(2.0)),
        task_name_of(model, num_samples=51),
        task_name_of(model, draws=True),
        task_name_of(model, selector=selectors.thompson()),
        task_name_of(model, selector=selectors.with_floor(selectors.thompson(), 0.1)),
        task_name_of(model, selector=selectors.with_floor(selectors.thompson(), 0.2)),
        task_name_of(model, factory=engines.conjugate),
        task_name_of(model, factory=functools.partial(engines.conjugate, discount=0.9)),
        task_name_of(model, factory=engines.reweight),
        task_name_of(model, factory=engines.nuts),
        task_name_of(model, factory=functools.partial(engines.reweight, num_particles=500)),
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


def test_facts_that_are_found_are_those_that_validation_finds(kept_in, monkeypatch):
    def program(arm, context):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([2, 3]))
        numpyro.sample("reward", dist.Normal(jnp.sum(level[arm] * context["x"], -1) + context["kind"], 1.0))

    model = RewardModel(program, 2, {"x": np.ones(3), "kind": 0})
    model.keep(None, "words")
    monkeypatch.setattr("ppl_bandit.program.model.validation.abstract_trace", None)  # it is not called
    again = RewardModel(program, 2, {"x": np.ones(3), "kind": 0})
    for name in model._facts._fields:
        if name not in ("context", "fingerprint"):
            assert getattr(again._facts, name) == getattr(model._facts, name)
    assert again._mean_method is model._mean_method and again.program_fingerprint == model.program_fingerprint


def test_a_program_that_is_wrong_is_refused_however_often_it_is_read(kept_in):
    def make(is_wrong):
        def program(arm):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
            numpyro.sample("reward", dist.Normal(jnp.cumsum(rate[arm]) if is_wrong else rate[arm], 1.0))

        return program

    RewardModel(make(False), 2).keep(None, "words")  # written the same
    for _ in range(2):
        with pytest.raises(InvalidProgram, match="changes with the other rows"):
            RewardModel(make(True), 2)


def test_what_cannot_be_told_has_no_name(kept_in):
    rule = selectors.selector_contract.as_selector(lambda key, table, step, *, allowed=None, marginals=None: None)
    two = dist.Normal(0.0, 1.0).expand([2])
    assert name_of(of_prior(two)) is not None
    assert name_of(of_prior(OwnNormal(0.0, 1.0).expand([2]))) is None
    assert name_of(of_prior(dist.TransformedDistribution(two, OwnAffine(0.0, 2.0)))) is None
    assert name_of(called_back) is None
    model = RewardModel(priced(), 2)
    assert task_name_of(model, selector=rule) is None
    assert task_name_of(model, factory=lambda model: engines.conjugate(model)) is None
    assert task_name_of(model, factory=engines.svi) is None


def test_a_change_of_jax_changes_the_name(kept_in):
    base = name_of(priced())
    with jax.default_matmul_precision("highest"):
        changed = name_of(priced())
    assert None not in (base, changed) and changed != base and name_of(priced()) == base


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


def test_a_start_compiles_few_programs_the_next_fewer_and_later_steps_none(tmp_path):
    """Ten: what the compiler knows, arms' indices, rows, the examination, infinite means, the prior, what arms read, their
    coefficients, select and learn. One more is an operation that ran outside of them, or a question asked twice. In the next
    process all but the prior, select and learn are not needed.
    """
    (first, later, decided), (second, later_again, decided_again) = twice(tmp_path, "conversion", 5)
    assert decided_again == decided
    assert len(first) <= 10, first
    assert len(second) <= 4, second
    assert {"jit(select)", "jit(learn)"} <= set(first) & set(second)
    assert later == later_again == []


@pytest.mark.slow
def test_draws_that_are_renewed_are_renewed_alike_in_the_next_process(tmp_path):
    """Seven in the next process: the prior, select, both ways to learn, and three by which the engine is built."""
    (first, later, decided), (second, later_again, decided_again) = twice(tmp_path, "logit", 40)
    assert decided_again == decided
    programs = {f"jit({name})" for name in ("first", "select", "learn", "learn_quickly")}
    assert programs <= set(first)
    assert programs <= set(second) and len(second) <= 7, second
    assert later == later_again == []
