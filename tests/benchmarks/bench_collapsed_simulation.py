"""Seconds of simulated realizations of a Gaussian hierarchy with the collapsed engine, vectorised, chunk by chunk.

    python tests/benchmarks/bench_collapsed_simulation.py --chunks 50,500,2500 --realizations 5000 --steps 500 --limit 420

For each size of chunk in turn: compile, run one chunk, say how long and what the whole would take; then run the whole with the
fastest of them, unless the time left does not allow it. Lines are printed as they come, and nothing starts that would pass the
limit. Meant for a GPU, in float32; on a CPU `simulate` runs such realizations one after another, on every core.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Environment, RewardModel, engines, selectors
from ppl_bandit.simulation.rollouts import rollout

MEANS = (0.4, 0.7, 1.0, 1.3, 1.7)


def hierarchy(arm):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    common = numpyro.sample("common", dist.Normal(0.0, 2.0))
    with numpyro.plate("arms", len(MEANS)):
        mean = numpyro.sample("mean", dist.Normal(common, spread))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.0))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", default="50,500,2500", help="realizations at once")
    parser.add_argument("--realizations", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--particles", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=420.0, help="seconds in all")
    options = parser.parse_args()
    began = time.perf_counter()
    model = RewardModel(hierarchy, len(MEANS))
    engine = engines.collapsed(model, num_particles=options.particles)
    truth = {"spread": jnp.array(0.5), "common": jnp.array(1.0), "mean": jnp.array(MEANS)}
    world, select = Environment(model, truth), selectors.double_sampling()
    print(f"{jax.devices()[0].device_kind}: engine built after {time.perf_counter() - began:.1f} s", flush=True)

    def play(number):
        run, _, _ = rollout(
            jr.fold_in(jr.key(0), number),
            model,
            engine,
            select,
            world,
            num_steps=options.steps,
            num_samples=options.samples,
        )
        return jnp.sum(run.regret), jnp.mean(run.is_trusted)

    compiled, rates = {}, {}
    for size in map(int, options.chunks.split(",")):
        numbers = jnp.arange(size)
        started = time.perf_counter()
        compiled[size] = jax.jit(jax.vmap(play)).lower(numbers).compile()
        took_compile = time.perf_counter() - started
        temporary = compiled[size].memory_analysis().temp_size_in_bytes / 1e9
        left = options.limit - (time.perf_counter() - began)
        guess = size * min(rates.values(), default=0.0)
        line = f"chunk of {size}: compiled in {took_compile:.1f} s, {temporary:.2f} GB of temporaries"
        if guess > left:
            print(f"{line}; not run, {left:.0f} s are left", flush=True)
            del compiled[size]
            continue
        started, cpu = time.perf_counter(), time.process_time()
        regret, trusted = jax.block_until_ready(compiled[size](numbers))
        took = time.perf_counter() - started
        rates[size] = took / size
        print(
            f"{line}; {took:.2f} s ({time.process_time() - cpu:.1f} s of CPU), {1e6 * took / size / options.steps:.1f} us a "
            f"realization and step, regret {float(regret.mean()):.2f} +- {float(regret.std()) / np.sqrt(size):.2f}, trusted "
            f"{float(trusted.mean()):.4f}; {options.realizations} would take {rates[size] * options.realizations:.0f} s",
            flush=True,
        )
    size = min(rates, key=rates.get)
    left = options.limit - (time.perf_counter() - began)
    if rates[size] * options.realizations > 0.9 * left:
        print(f"the whole is not run: {left:.0f} s are left", flush=True)
        return
    regrets, started = [], time.perf_counter()
    for start in range(0, options.realizations, size):
        regrets.append(np.asarray(compiled[size](start + jnp.arange(size))[0]))
        print(f"  {start + size} realizations after {time.perf_counter() - started:.1f} s", flush=True)
    regrets = np.concatenate(regrets)[: options.realizations]
    print(
        f"{options.realizations} x {options.steps} in {time.perf_counter() - started:.1f} s, regret {regrets.mean():.2f} +- "
        f"{regrets.std() / np.sqrt(regrets.size):.2f}"
    )


if __name__ == "__main__":
    main()
