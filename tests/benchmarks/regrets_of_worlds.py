"""Save the regret of every candidate in every world of a pool, to try rules of choice on."""

import sys
import time
from pathlib import Path

import numpy as np
from map_of_selectors import bundled

from ppl_bandit import Environment, engines
from ppl_bandit.simulation.tune import Player, candidates

began, out, seconds = time.time(), Path(sys.argv[1]), float(sys.argv[2])
for case in sys.argv[3:]:
    name, horizon, num = case.rsplit("-", 2)
    horizon, num, start = int(horizon), int(num), time.time()
    if start - began > seconds:
        print("no time for", case)
        continue
    model, contexts = bundled(name)
    engine = engines.conjugate(model)
    named = candidates(model, engine, horizon)
    play = Player(model, engine, Environment.from_prior(model, contexts), horizon, 1000, 0, num, "float32")
    with play.working():
        play.prepare(named)
        middle = time.time()
        regret = {rule: play.worlds(named[rule], 0, num)[0] for rule in named}
    np.savez_compressed(out / f"{name}-{horizon}.npz", **regret)
    print(f"{case}: compiled {middle - start:.0f} s, played {time.time() - middle:.0f} s", flush=True)
