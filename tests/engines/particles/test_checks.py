"""A failed check is named with its value and its bound, and passed checks are not."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, RewardModel, engines
from ppl_bandit.engines.checks import CHECKS, all_passed, describe_failures, make_info, worst_values
from ppl_bandit.types import Interaction

NAMES = ("k_hat", "acceptance", "capacity")
NO_ROOM = "the rows did not fit into the buffer and were not learnt"


@pytest.mark.parametrize(
    ("values", "failures"),
    [
        ([0.7, 0.5, 1.0], []),
        ([0.93, 0.8, 1.0], ["Pareto k-hat of the weights is 0.93 and must be at most 0.7"]),
        ([0.1, 0.25, 0.0], [NO_ROOM, "the mean acceptance probability is 0.25 and must be at least 0.5"]),
        ([np.nan, 0.8, 1.0], ["Pareto k-hat of the weights is nan and must be at most 0.7"]),
    ],
)
def test_a_failed_check_is_named_with_its_value_and_bound(values, failures):
    checks = dict(zip(NAMES, jnp.asarray(values), strict=True))
    assert describe_failures(checks) == failures
    assert bool(all_passed(checks)) == (not failures)
    info = make_info(checks, permanent=["capacity"])
    assert info.failed_checks() == failures
    assert (bool(info.is_trusted), bool(info.may_recover)) == (not failures, NO_ROOM not in failures)


def test_the_worst_value_of_several_blocks_is_the_largest_or_the_smallest_by_the_kind_of_bound():
    values = dict(zip(NAMES, jnp.array([[0.2, 0.5], [0.9, 0.6], [1.0, 0.0]]), strict=True))
    found = worst_values(values)
    np.testing.assert_allclose([found[name] for name in NAMES], [0.5, 0.6, 0.0])


def clicks(arm):
    with numpyro.plate("arms", 2):
        score = numpyro.sample("score", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(logits=score[arm]))


def test_the_warning_of_a_live_bandit_names_the_failed_check_and_no_other():
    """`laplace` with its k-hat replaced by 2; the other checks pass or fail as measured."""

    def skewed(model):
        engine = engines.laplace(model)

        def update(key, state, rows):
            state, info = engine.update(key, state, rows)
            return state, info._replace(is_trusted=jnp.array(False), checks={**info.checks, "k_hat": jnp.array(2.0)})

        return engine._replace(update=update)

    bandit = Bandit(clicks, 2, engine=skewed)
    with pytest.warns(UserWarning) as warned:
        bandit.update(arm=0, reward=1)
    text = str(warned[0].message)
    conclusion = "the draws of the laplace engine are not trusted: intervals and P(best) may be wrong; leave engine out"
    assert text.startswith(conclusion) and text.endswith(
        "(details: Pareto k-hat of the weights is 2 and must be at most 0.7)"
    )
    assert bandit.explanation.engine == "laplace"  # chosen for its speed: no slower engine replaces it
    assert "NOT TRUSTED" in bandit.explain() and "k-hat" not in bandit.explain() + bandit.report().text
    assert "k-hat of the weights is 2" in bandit.explain(details=True)
    with pytest.raises(ValueError, match="the laplace engine does not estimate the log evidence"):
        _ = bandit.log_evidence


@pytest.mark.slow
def test_a_bandit_whose_moves_end_at_their_budget_keeps_its_engine_and_every_decision_says_so():
    """`laplace` under the name of an engine that has a fallback; the first 11 updates report moves that did not finish."""
    num_unfinished = 11  # one more than the doubted refreshes after which other evidence leads to the fallback

    def unfinished(model):
        engine = engines.laplace(model)

        def update(key, state, rows):
            state, _ = engine.update(key, state, rows)
            num_rows = jnp.sum(state.buffer.times)
            is_done = num_rows > num_unfinished
            checks = {"autocorrelation": jnp.array(0.8), "divergences": jnp.array(0.0), "budget": jnp.array(0.0)}
            info = make_info(checks, is_unfinished=~is_done, num_refreshes=num_rows)
            return state, info._replace(is_trusted=is_done)

        return engine._replace(update=update, explanation=engine.explanation._replace(engine="reweight"))

    bandit = Bandit(clicks, 2, engine=unfinished)
    with pytest.warns(UserWarning, match="ended at their budget") as warned:
        for row in range(num_unfinished):
            bandit.update(arm=row % 2, reward=1)
    assert len(warned) == 1 and bandit.explanation.engine == "reweight"
    (note,) = bandit.select().notes
    assert "the autocorrelation of the particles with their starting positions is 0.8 and must be at most 0.5" in note
    assert "engines.laplace" in note and "divergent" not in note
    bandit.update(arm=0, reward=1)
    assert bandit.select().notes == () and "NOT TRUSTED" not in bandit.explain()


def test_there_are_few_checks_and_every_number_of_the_engines_has_a_comment():
    assert len(CHECKS) <= 22
    numbers, bare = 0, list[str]()
    for path in sorted(Path(engines.__file__).parent.rglob("*.py")):
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.parse(source).body:
            values = [] if not isinstance(node, ast.Assign) else list(ast.walk(node.value))
            if not any(isinstance(value, ast.Constant) and type(value.value) in (int, float) for value in values):
                continue
            numbers += 1
            written = [*lines[node.lineno - 1 : node.end_lineno], *filter(str.strip, lines[node.end_lineno :][:1])]
            above = lines[node.lineno - 2].startswith("#") or "  #" in lines[node.lineno - 2]
            if isinstance(node.value, ast.Call | ast.Dict) or above or any("#" in line for line in written):
                continue
            bare.append(f"{path.name}: {lines[node.lineno - 1]}")
    assert bare == [] and numbers <= 110


def test_rows_that_do_not_fit_are_named():
    engine = engines.laplace(RewardModel(clicks, 2), capacity=2)
    state = jax.jit(engine.init)(jr.key(0))
    _, info = jax.jit(engine.update)(jr.key(1), state, Interaction(jnp.zeros(3, int), jnp.array([0.0, 1.0, 1.0])))
    assert info.failed_checks() == ["the rows did not fit into the buffer and were not learnt"]
