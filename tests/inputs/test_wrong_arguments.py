"""Every public callable refuses a wrong argument before it works: the message names the argument, and says what was given."""

import inspect
import itertools
import re
import time

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from shared_models import bernoulli_bandit, bernoulli_model, bernoulli_program

import ppl_bandit as pb
from ppl_bandit import (
    Bandit,
    Design,
    Environment,
    Interaction,
    Journal,
    JournalError,
    Online,
    RewardModel,
    engines,
    selectors,
    stopping,
)
from ppl_bandit.comparison import engine_comparison, model_ranking, rank_models
from ppl_bandit.evaluation import evaluate as evaluate_module, rejection
from ppl_bandit.simulation import simulate as simulate_module, tune as tune_module
from ppl_bandit.trials import simulator

WRONG = (None, 3, "zz", -1, float("nan"), [], {})


class Worked(Exception):
    """The arguments were accepted, and the work began."""


def line(x):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(slope * x, 1.0))


@pytest.fixture(scope="module")
def model():
    return bernoulli_model(2)


@pytest.fixture(scope="module")
def bandit(model):
    bandit = bernoulli_bandit(2)
    for _ in range(4):
        bandit.update(bandit.select(), 1.0)
    return bandit


@pytest.fixture
def cases(model, bandit, monkeypatch, tmp_path):
    """{name: (function, valid arguments)}; where the work would begin, `Worked` is raised."""

    def begin(*args, **kwargs):
        raise Worked

    monkeypatch.chdir(tmp_path)
    log = pd.DataFrame({"arm": [0, 1] * 10, "reward": [0.0, 1.0] * 10, "propensity": 0.5})
    world, design = (
        Environment(model, {"rate": np.array([0.3, 0.5])}),
        Design([20], stopping=stopping.superiority(0.95)),
    )
    rows, sizes = Interaction(np.array([0, 1]), np.array([0.0, 1.0])), {"num_steps": 5, "num_realizations": 2}
    journal = Journal(tmp_path / "e.db")
    bernoulli_bandit(2, journal=journal)
    bandit.save(tmp_path / "saved")
    for module, name in (
        (evaluate_module, "follow_posterior"),
        (evaluate_module, "engine_of"),
        (rejection, "engine_of"),
        (simulate_module, "prepare"),
        (tune_module, "simulate_candidates"),
        (simulator, "as_engine"),
        (engine_comparison, "find_references"),
        (model_ranking, "_why_no_loo"),
        (Bandit, "_build"),
        (Bandit, "_overview"),
        (Online, "_start"),
    ):
        monkeypatch.setattr(module, name, begin)
    found = {
        "RewardModel": (RewardModel, {"program": bernoulli_program(2), "num_arms": 2}),
        "Environment": (Environment, {"reward_model": model, "truth": world.truth}),
        "Environment.from_prior": (Environment.from_prior, {"reward_model": model}),
        "Environment.from_draws": (
            Environment.from_draws,
            {"reward_model": model, "draws": {"rate": np.ones((3, 2)) / 2}},
        ),
        "Environment.from_path": (
            Environment.from_path,
            {"reward_model": model, "path": {"rate": np.ones((3, 2)) / 2}},
        ),
        "Bandit": (Bandit, {"program": bernoulli_program(2), "num_arms": 2}),
        "Bandit.load": (Bandit.load, {"path": tmp_path / "saved", "program": bernoulli_program(2)}),
        "Online": (Online, {"program": line}),
        "Online.update": (Online(line).update, {"outcomes": {"y": [1.0]}}),
        "Online.posterior": (Online(line).posterior, {}),
        "Design": (Design, {"looks": [20], "stopping": stopping.superiority(0.95)}),
        "Journal": (Journal, {"url": tmp_path / "e.db"}),
        "simulate": (
            pb.simulate,
            {
                "key": 0,
                "reward_model": model,
                "engine": engines.conjugate,
                "selector": selectors.thompson(),
                "environment": world,
            }
            | sizes,
        ),
        "tune": (pb.tune, {"reward_model": model, "horizon": 5}),
        "operating_characteristics": (
            pb.operating_characteristics,
            {"model": model, "design": design, "scenarios": {"a": [0.3, 0.3]}},
        ),
        "calibrate": (pb.calibrate, {"model": model, "design": design, "null": 0.3}),
        "adjusted_estimates": (pb.adjusted_estimates, {"model": model, "design": design, "means": [0.3, 0.4]}),
        "compare": (pb.compare, {"reward_model": model, "data": rows}),
        "rank_models": (rank_models, {"models": {"a": model, "b": model}, "data": rows, "num_runs": 2}),
        "evaluate": (pb.evaluate, {"log": log, "target": 0, "model": model}),
        "evaluate_arms": (pb.evaluate_arms, {"log": log, "model": model}),
        "evaluate_by_rejection": (
            pb.evaluate_by_rejection,
            {"log": log, "selector": selectors.thompson(), "model": model},
        ),
    }
    valid = {
        "update": {"arm": 0, "reward": 1.0},
        "update_many": {"arms": [0, 1], "rewards": [0.0, 1.0]},
        "update_each": {"rows": []},
        "select_many": {"num_decisions": 2},
        "discard": {"decision": "zz"},
        "erase": {"unit": "zz"},
        "retire_arm": {"arm": 7},
        "evaluate": {"target": 0},
        "save": {"path": tmp_path / "saved"},
        "expire": {"older_than": 3600.0},
    }
    for name in (
        *valid,
        "select",
        "pending",
        "alarms",
        "posterior",
        "expected_rewards",
        "propensities",
        "explain",
    ):
        found[f"Bandit.{name}"] = getattr(bandit, name), valid.get(name, {})
    for name in ("summary", "plot", "report", "logged_decisions"):
        found[f"Bandit.{name}"] = getattr(bandit, name), {}
    for name in ("events", "head", "verify"):
        found[f"Journal.{name}"] = getattr(journal, name), {}
    inner = {"selector": selectors.thompson(), "floor": 0.1, "share": 0.5, "horizon": 5, "power": 0.5}
    for name in selectors.__all__:
        factory = getattr(selectors, name)
        if inspect.isfunction(factory):
            needed = {n: v for n, v in inner.items() if n in inspect.signature(factory).parameters}
            found[f"selectors.{name}"] = factory, needed
    rule = {"p": 0.9, "delta": 0.05, "below": 0.1, "function": lambda look: look.num_decisions, "name": "size"}
    for name in stopping.__all__[1:]:
        factory = getattr(stopping, name)
        needed = {n: rule[n] for n, own in inspect.signature(factory).parameters.items() if own.default is own.empty}
        found[f"stopping.{name}"] = factory, needed | ({"at_least": 9.0} if name == "rule" else {})
    yield found
    journal.close()


def wrong_calls(cases):
    """Yield a name, its function and valid arguments, the name of an argument and a wrong value of it, one at a time."""
    for name, (function, given) in cases.items():
        for argument, own in inspect.signature(function).parameters.items():
            if own.kind in (own.VAR_KEYWORD, own.VAR_POSITIONAL):
                continue
            for value in WRONG:
                if value is not own.default and value != own.default:
                    yield name, function, given, argument, value


# Every fourth call, with another value for each argument, and on request all of them.
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_wrong_argument_is_named(cases, step):
    problems = []
    for name, function, given, argument, value in itertools.islice(wrong_calls(cases), 0, None, step):
        begun, shown = time.thread_time(), f"{name}({argument}={value!r})"
        try:
            function(**(given | {argument: value}))
            continue  # a text is a name, 3 is a count, and so on
        except Worked:
            continue
        except FileNotFoundError as error:
            named, message = str(value) in str(error), str(error)
        except (ValueError, TypeError, JournalError) as error:
            named = re.search(rf"\b({argument}s?|{argument.removesuffix('s')})\b", message := str(error))
        except Exception as error:
            named, message = False, f"raw {type(error).__name__} {error}"
        if not named:
            problems.append(f"{shown}: {message[:160]}")
        if time.thread_time() - begun > 3.0:  # under a second where nothing else runs
            problems.append(f"{shown}: took {time.thread_time() - begun:.1f} s")
    assert not problems, "\n".join(problems)
