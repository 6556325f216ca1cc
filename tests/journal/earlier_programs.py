"""The experiments in `earlier/`, journals that version 0.1.0 and tables of version 3 wrote, and what was played in them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Bandit

FOLDER = Path(__file__).parent / "earlier"


def conversion(arm, *, num_arms):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def linear(arm, context):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    numpyro.sample("reward", dist.Normal(jnp.sum(weights[arm] * context["x"], -1), 0.5))


def walk(arm, *, previous=None):
    with numpyro.plate("arms", 2):
        if previous is None:
            level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        else:
            level = numpyro.sample("level", dist.Normal(previous["level"], 0.1))
    numpyro.sample("reward", dist.Normal(level[arm], 0.5))


def hurdle(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]).to_event(1))
    price = numpyro.sample("price", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("buys", dist.Bernoulli(rate[arm]))
    numpyro.sample("spend", dist.Exponential(price[arm]))
    numpyro.deterministic("expected_reward", rate[arm] / price[arm])


OPTIONS = {
    "conjugate": {"program": conversion, "arms": ["a", "b"], "num_samples": 100},
    "linear": {"program": linear, "num_arms": 2, "context": {"x": np.zeros(2)}, "num_samples": 100},
    "kalman": {"program": walk, "num_arms": 2, "num_samples": 100},
    "lanes": {"program": conversion, "num_arms": 3, "num_samples": 100},
    "outcomes": {"program": hurdle, "num_arms": 2, "outcomes": ("buys", "spend"), "num_samples": 100},
}
OPTIONS |= {"version3": OPTIONS["conjugate"], "version3_kalman": OPTIONS["kalman"]}


def open_earlier(name, journal=None, **options):
    """Open an experiment with the settings of its journal; without `journal`, a new one in memory."""
    given = OPTIONS[name] | options
    return Bandit(given.pop("program"), **given, **({} if journal is None else {"journal": journal}))


def numbers(bandit):
    """Return what must be the same after opening: the moments of the posterior's closed form, and counts."""
    parameters = bandit.posterior_parameters()
    return {
        "parameters": jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), parameters),
        "num_rewards": bandit.num_rewards,
        "pending": bandit.pending().decision.tolist(),
        "rewards": [bandit.history()[outcome].tolist() for outcome in bandit.model.outcomes],
        "retired": bandit.retired,
    }


def load_numbers(name):
    return json.loads((FOLDER / f"{name}.json").read_text())
