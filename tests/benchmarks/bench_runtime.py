"""Measure the runtime tricks of docs/tricks.md one by one, on a live step and on a first decision.

For each trick, processes with and without it take turns of 20 live steps; then fresh processes with an empty cache measure the
time from their start to the first decision. Processes compile as users do.

Usage: python tests/benchmarks/bench_runtime.py [options] [order] [dispatch] [packed] [--case linear] [--turns 30]
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time

STEPS = 20


def without(trick):
    """Turn a trick off in this process, before anything is compiled."""
    import jax

    from ppl_bandit.runtime import packed_state, xla_options

    if trick in ("options", "order"):
        for options in (xla_options._LARGE, xla_options._SMALL, xla_options._QUICK):
            kept = {} if trick == "options" else dict(options)
            kept.update(xla_options._IN_ORDER) if trick == "options" else kept.pop("xla_cpu_scheduler_type")
            options.clear()
            options.update(kept)
    elif trick == "dispatch":
        jax.config.update("jax_cpu_enable_async_dispatch", True)
    elif trick == "packed":
        packed_state._MAX_PACKED_SIZE = -1  # every leaf is then an array of its own


def work(trick, case_name):
    """Play one side: print the time of the first decision, then the median step of each turn that is asked for."""
    import numpy as np
    from live_players import CASES, case_program

    from ppl_bandit import Bandit

    if trick:
        without(trick)
    case = CASES[case_name]
    program, context = case_program(case)
    bandit = Bandit(program, case.num_arms, context=context)
    bandit.select(context)
    print(time.time(), flush=True)
    bandit.warm_up()
    rng, truth = np.random.default_rng(0), case.truth()
    for _ in sys.stdin:
        spent = []
        for _ in range(STEPS):
            context = rng.uniform(size=case.num_features) if case.num_features else None
            began = time.perf_counter()
            decision = bandit.select(context)
            reward = float(truth[decision.arm] @ context if case.num_features else rng.random() < truth[decision.arm])
            bandit.update(decision, reward)
            spent.append(time.perf_counter() - began)
        print(statistics.median(spent), flush=True)


def compare(trick, case_name, num_turns, num_starts):
    """Print the step and the first decision with and without a trick."""
    steps, starts = ([], []), ([], [])
    with contextlib.ExitStack() as stack:
        sides = [_process(stack, own, case_name) for own in ("", trick)]
        for side, _ in sides:
            side.stdout.readline()
        for _ in range(num_turns):
            for own, (side, _) in zip(steps, sides, strict=True):
                side.stdin.write("turn\n")
                side.stdin.flush()
                own.append(float(side.stdout.readline()))
    for _ in range(num_starts):
        for own, name in zip(starts, ("", trick), strict=True):
            with contextlib.ExitStack() as stack:
                side, began = _process(stack, name, case_name)
                own.append(float(side.stdout.readline()) - began)
    ratio = statistics.median(off / on for on, off in zip(*steps, strict=True))
    medians = [1e6 * statistics.median(own) for own in steps]
    first = [statistics.median(own) for own in starts]
    print(
        f"{trick:<10} {case_name:<14} step {medians[0]:.0f} us, without {medians[1]:.0f} us (x {ratio:.2f}); "
        f"first decision {first[0]:.2f} s, without {first[1]:.2f} s",
        flush=True,
    )


def _process(stack, trick, case_name):
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": folder}
    command = [sys.executable, __file__, "--worker", trick, "--case", case_name]
    began = time.time()
    side = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    stack.callback(side.wait)
    stack.callback(side.stdin.close)
    return side, began


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tricks", nargs="*", default=["options", "order", "dispatch", "packed"])
    parser.add_argument("--case", default="bernoulli")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--worker")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, arguments.case)
    else:
        for name in arguments.tricks:
            compare(name, arguments.case, arguments.turns, arguments.starts)
