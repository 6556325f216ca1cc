"""Five further programs, which were not used to design `tune`: the checks of held_out.py, with the same arguments.

python tests/benchmarks/held_out_further.py --horizons 1000,300 --out results-further
python tests/benchmarks/held_out_further.py --report --out results-further
"""

from pathlib import Path

import held_out
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from ppl_bandit.commands.model_files import ModelFile


def gaussian8(arm):
    with numpyro.plate("arms", 8):
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
        mean = numpyro.sample("mean", dist.Normal(1.0, 0.5 * jnp.sqrt(variance)))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))


def linear4(arm, context):
    with numpyro.plate("arms", 4):
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), jnp.sqrt(variance)[:, None]).to_event(1))
    numpyro.sample("reward", dist.Normal(jnp.sum(weights[arm] * context, axis=-1), jnp.sqrt(variance[arm])))


def features(key):
    return jnp.concatenate([jnp.ones(1), jax.random.normal(key, (2,))])


def poisson6(arm):
    with numpyro.plate("arms", 6):
        rate = numpyro.sample("rate", dist.Gamma(1.0, 0.5))
    numpyro.sample("reward", dist.Poisson(rate[arm]))


def bernoulli10(arm):
    with numpyro.plate("arms", 10):
        rate = numpyro.sample("rate", dist.Beta(1.0, 9.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


held_out.PROGRAMS[:] = ["exponential", "gaussian8", "linear4", "poisson6", "bernoulli10"]
held_out.AS_WIDE_AS_CAN_BE.append("bernoulli10")
held_out.FILES |= {
    "gaussian8": ModelFile("gaussian8", Path(__file__), gaussian8, 8),
    "linear4": ModelFile("linear4", Path(__file__), linear4, 4, jnp.array([1.0, 0.2, -0.3]), contexts=features),
    "poisson6": ModelFile("poisson6", Path(__file__), poisson6, 6),
    "bernoulli10": ModelFile("bernoulli10", Path(__file__), bernoulli10, 10),
}
held_out.WIDER |= {
    "exponential": lambda world, by: {"rate": world["rate"] / by},
    "gaussian8": lambda world, by: world | {"mean": 1.0 + by * (world["mean"] - 1.0)},
    "linear4": lambda world, by: world | {"weights": by * world["weights"]},
    "poisson6": lambda world, by: {"rate": by * world["rate"]},
    "bernoulli10": lambda world, by: {"rate": by * world["rate"]},
}

if __name__ == "__main__":
    held_out.main()
