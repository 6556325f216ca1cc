"""Cost of an update, engine by engine, against `MCMC.run` called afresh: logistic regression, D = 10, A = 5, 1,000 draws.

Run by hand: python tests/benchmarks/bench_engines.py [--steps 1000]; with --batches 1000 10000 ..., what one update
with so many rows costs; with --model NAME, the stream of a bundled model through `reweight`, or "here" for this regression.
Ratios are of one run on one machine.
Compilation is counted separately for the engines, which compile once per capacity; `MCMC.run` compiles on every call.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from ppl_bandit import engines
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

NUM_ARMS, NUM_FEATURES, NUM_DRAWS = 5, 10, 1000


def program(arm, context):
    with numpyro.plate("arms", NUM_ARMS):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(NUM_FEATURES), 1.0).to_event(1))
    numpyro.sample("reward", dist.Bernoulli(logits=jnp.sum(weights[arm] * context, axis=-1)))


def make_rows(num_rows):
    key_truth, key_context, key_arm, key_reward = jr.split(jr.key(0), 4)
    truth = jr.normal(key_truth, (NUM_ARMS, NUM_FEATURES))
    context = jr.normal(key_context, (num_rows, NUM_FEATURES))
    arm = jr.randint(key_arm, (num_rows,), 0, NUM_ARMS)
    reward = jr.bernoulli(key_reward, jax.nn.sigmoid(jnp.sum(truth[arm] * context, axis=-1))).astype(float)
    return Interaction(arm, reward, context)


def timed(function, *args):
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return result, time.perf_counter() - start


def fresh_mcmc(rows, num_rows):
    """Seconds of one `MCMC.run` with a sampler made for it, as a loop without this library would make it."""

    def conditioned(arm, context, reward):
        with numpyro.handlers.condition(data={"reward": reward}):
            program(arm, context)

    def run():
        mcmc = MCMC(NUTS(conditioned), num_warmup=500, num_samples=NUM_DRAWS, progress_bar=False)
        mcmc.run(jr.key(0), rows.arm[:num_rows], rows.context[:num_rows], rows.reward[:num_rows].astype(int))
        return mcmc.get_samples()

    return timed(run)[1]


def stream(engine, rows, first, last):
    """Seconds of each update from row `first` to row `last`, and which of them compiled."""
    seconds, is_compiled, infos = [], [], []
    traced = False

    @jax.jit
    def update(key, state, row):
        nonlocal traced
        traced = True
        return engine.update(key, state, row)

    state = jax.jit(engine.init)(jr.key(1))
    if first > 0:
        head = jax.tree.map(lambda leaf: leaf[:first], rows)
        state, _ = jax.jit(engine.update)(jr.key(2), engine.capabilities.reserve(state, first), head)
    for number in range(first, last):
        row = jax.tree.map(lambda leaf, number=number: leaf[number : number + 1], rows)
        traced = False
        (state, info), elapsed = timed(update, jr.key(number), engine.capabilities.reserve(state, 1), row)
        seconds.append(elapsed)
        is_compiled.append(traced)
        infos.append(jax.device_get(info))
    return np.array(seconds), np.array(is_compiled), infos


def stream_of(name, num_rows):
    """A bundled model, and rows of its own world."""
    file = load_model(name)
    model = RewardModel(file.program, file.num_arms, context=file.context, outcomes=file.outcomes)
    key_arm, key_context, key_reward = jr.split(jr.key(0), 3)
    arm = jr.randint(key_arm, (num_rows,), 0, model.num_arms)
    context = None if file.context is None else jax.vmap(file.contexts)(jr.split(key_context, num_rows))
    return model, Interaction(arm, jax.jit(model.draw_reward)(key_reward, file.truth, arm, context), context)


def show_stream(name, seconds, is_compiled, infos):
    """Print milliseconds of the updates of a stream that compiled nothing."""
    steady = 1e3 * seconds[~is_compiled]
    print(
        f"{name}: first {seconds[0]:.1f} s; mean {steady.mean():.2f} ms, median {np.median(steady):.2f}, 99% "
        f"{np.quantile(steady, 0.99):.1f}, worst {steady.max():.0f}; {int(infos[-1].num_refreshes)} refreshes; "
        f"trusted {np.mean([info.is_trusted for info in infos]):.1%}"
    )


def show_batches(model, sizes):
    """Print seconds of one update with many rows, after compilation."""
    engine = engines.reweight(model)
    for size in sizes:
        rows, update = make_rows(size), jax.jit(engine.update)
        state = engine.capabilities.reserve(jax.jit(engine.init)(jr.key(1)), size)
        _, cold = timed(update, jr.key(2), state, rows)
        (_, info), warm = timed(update, jr.key(3), state, rows)
        print(
            f"{size} rows in one update: {warm:.2f} s, {cold:.1f} s with compilation; {int(info.num_refreshes)} refreshes; "
            f"trusted {bool(info.is_trusted)}",
            flush=True,
        )


def main():
    jax.config.update("jax_enable_x64", True)  # as in the live bandit
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", help="measure one update with so many rows, and nothing else")
    parser.add_argument("--model", help="stream a bundled model through reweight, and nothing else")
    parser.add_argument("--steps", type=int, default=1000, help="length of the stream")
    arguments = parser.parse_args()
    model = RewardModel(program, NUM_ARMS, context=np.zeros(NUM_FEATURES))
    if arguments.batches:
        return show_batches(model, arguments.batches)
    if arguments.model:
        other, rows = (
            (model, make_rows(arguments.steps))
            if arguments.model == "here"
            else stream_of(arguments.model, arguments.steps)
        )
        return show_stream(
            arguments.model, *stream(engines.reweight(other, capacity=arguments.steps), rows, 0, arguments.steps)
        )
    rows = make_rows(arguments.steps)
    sizes = [size for size in (10, 200, 1000) if size <= arguments.steps]
    mcmc = {size: fresh_mcmc(rows, size) for size in sizes}
    baseline = float(np.mean(list(mcmc.values())))
    lines = [
        f"MCMC.run afresh: {', '.join(f'{s:.2f} s at n = {n}' for n, s in mcmc.items())}; mean {baseline:.2f} s",
        "",
    ]
    lines.append(f"{'engine':>9} {'rows':>12} {'ms a step':>10} {'times cheaper':>14} {'compile s':>10} {'trusted':>8}")

    seconds, is_compiled, infos = stream(engines.reweight(model), rows, 0, arguments.steps)
    steady = seconds[~is_compiled]
    is_refresh = np.diff([0, *(int(info.num_refreshes) for info in infos)])[~is_compiled] > 0
    half, is_between = len(steady) // 2, ~is_refresh
    lines.append(
        f"{'reweight':>9} {f'1-{arguments.steps}':>12} {1e3 * steady.mean():10.2f} {baseline / steady.mean():14.0f} "
        f"{seconds[is_compiled].sum():10.1f} {np.mean([info.is_trusted for info in infos]):8.0%}"
    )
    summary = (
        f"reweight: {int(infos[-1].num_refreshes)} refreshes of {1e3 * steady[is_refresh].mean():.0f} ms; between them "
        f"{1e3 * steady[:half][is_between[:half]].mean():.2f} ms a step in the first half and "
        f"{1e3 * steady[half:][is_between[half:]].mean():.2f} ms in the second; {int(is_compiled.sum())} compilations, "
        f"{baseline / seconds.mean():.0f} times cheaper with them counted"
    )
    for name in ("nuts", "svi", "laplace"):
        engine = getattr(engines, name)(model)
        means = []
        for size in sizes:
            seconds, is_compiled, infos = stream(engine, rows, size - 10, size)
            steady = seconds[~is_compiled].mean()
            means.append(steady)
            lines.append(
                f"{name:>9} {f'{size - 9}-{size}':>12} {1e3 * steady:10.2f} {mcmc[size] / steady:14.0f} "
                f"{seconds[is_compiled].sum():10.1f} {np.mean([info.is_trusted for info in infos]):8.0%}"
            )
        lines.append(f"{name:>9} {'mean':>12} {'':>10} {baseline / np.mean(means):14.0f}")
    print("\n".join([*lines, "", summary]))


if __name__ == "__main__":
    main()
