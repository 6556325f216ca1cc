"""Live steps of peer libraries beside those of bench_live.py: python tests/benchmarks/bench_peers.py [--steps 400].

Needs `pip install ppl_bandit[bench]`: bayesianbandits, mabwiser, river.
"""

import argparse

import numpy as np
from bench_live import live_table, measure_live
from live_players import CASES, Player, case_players


def peers(case):
    """Return the peers that can play a case."""
    linear = case.num_features > 0
    return [
        Player("mabwiser", "LinTS: known noise, ridge prior about 0" if linear else "Thompson sampling", _mabwiser),
        Player("river", "LinUCB: deterministic, no posterior draws" if linear else "Thompson sampling", _river),
    ]


def _mabwiser(case, seed):
    from mabwiser.mab import MAB, LearningPolicy

    arms = list(range(case.num_arms))
    if not case.num_features:
        bandit = MAB(arms, LearningPolicy.ThompsonSampling(), seed=seed)
        bandit.fit(arms, [0] * len(arms))  # predict requires a fit
        return lambda context: bandit.predict(), lambda arm, reward, context: bandit.partial_fit([arm], [int(reward)])
    contextual = MAB(arms, LearningPolicy.LinTS(alpha=1.0), seed=seed)
    contextual.fit(arms, [0.0] * len(arms), np.zeros((len(arms), case.num_features)))
    return (
        lambda context: contextual.predict(context[None]),
        lambda arm, reward, context: contextual.partial_fit([arm], [reward], context[None]),
    )


def _river(case, seed):
    from river import bandit, proba

    arms = list(range(case.num_arms))
    if not case.num_features:
        policy = bandit.ThompsonSampling(reward_obj=proba.Beta(), seed=seed)
        return lambda context: policy.pull(arms), lambda arm, reward, context: policy.update(arm, bool(reward))
    linear = bandit.LinUCBDisjoint(alpha=1.0, seed=seed)
    return (
        lambda context: linear.pull(arms, dict(enumerate(context))),
        lambda arm, reward, context: linear.update(arm, dict(enumerate(context)), reward),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--samples", type=int, default=1000)
    options = parser.parse_args()
    for name, case in CASES.items():
        players = case_players(case, options.samples) + peers(case)
        print("\n".join(live_table(name, measure_live(case, players, options.steps), options.steps, options.samples)))
