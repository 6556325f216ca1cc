"""`ppl-bandit init NAME`: a folder with a program, the settings of its service and a test, ready to be changed."""

import argparse
import re
from pathlib import Path

from ppl_bandit.commands import CommandResult, ShowLine

_MODEL = '''"""The reward model of {name}: a success rate for each arm. Change it to what a reward of yours is."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3


def model(arm):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


truth = {{"rate": jnp.array([0.10, 0.15, 0.25])}}  # an example world, for tests and `ppl-bandit run`
'''
_CONFIG = """# `ppl-bandit serve experiments.toml` answers decisions and rewards over HTTP.
[experiments.{name}]
model = "model.py"
journal = "{name}.db"
arms = ["control", "low", "high"]
selector = "double_sampling"
"""
_TEST = '''"""`python -m pytest` in this folder: the program is valid, the bandit finds the best arm of its world."""

import jax.random as jr
import model
import numpy as np
from ppl_bandit import Bandit


def test_the_posterior_is_exact():
    assert Bandit(model.model, num_arms=model.num_arms).explanation.is_exact


def test_the_best_arm_is_played_most():
    bandit = Bandit(model.model, num_arms=model.num_arms, seed=1)
    played = np.zeros(model.num_arms, int)
    for key in jr.split(jr.key(1), 300):
        decision = bandit.select()
        played[decision.arm] += 1
        bandit.update(decision, bandit.model.draw_reward(key, model.truth, decision.arm))
    assert played.argmax() == np.argmax(model.truth["rate"])
'''
_FILES = {"model.py": _MODEL, "experiments.toml": _CONFIG, "test_model.py": _TEST}
_NEXT = {
    "ppl-bandit check model.py": "is the posterior exact?",
    "python -m pytest": "does the bandit find the best arm?",
    "ppl-bandit tune model.py --horizon 1000": "which selector loses least?",
    "ppl-bandit serve experiments.toml": "decisions over HTTP (extra `serve`)",
}


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Write the files into a new folder; nothing that exists is changed."""
    folder = Path(arguments.name)
    if re.fullmatch(r"[a-z][a-z0-9-]*", folder.name) is None:
        raise ValueError(f"{folder.name!r} cannot be a name: use small letters, digits and hyphens, as in price-test")
    if folder.exists():
        raise ValueError(f"{folder} exists already: give another name")
    folder.mkdir(parents=True)
    for name, text in _FILES.items():
        text = text.format(name=folder.name) if name != "test_model.py" else text
        (folder / name).write_text(text, encoding="utf-8")
    show(f"wrote {', '.join(_FILES)} to {folder}. Next:\n\n  cd {folder}")
    width = max(map(len, _NEXT))
    for command, question in _NEXT.items():
        show(f"  {command:<{width}}  # {question}")
    return {"folder": str(folder), "files": list(_FILES)}, 0
