"""Problems and implementations of bench_live.py: this library, NumPy loops, and bayesianbandits if it is installed.

An implementation is a pair of functions, `select(context) -> arm` and `update(arm, reward, context)`. All learn the same
posterior from the same prior, as far as their library offers it.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.paper.settings import bernoulli_program, linear_program


class Case(NamedTuple):
    """A problem: success rates of arms, or weights of a linear reward with noise of standard deviation 1/2."""

    name: str
    num_arms: int
    num_features: int = 0

    def truth(self) -> np.ndarray:
        """Return the rates (A,), or the weights (A, D)."""
        rng = np.random.default_rng(20170903)
        if self.num_features:
            return rng.normal(1.0, 0.5, (self.num_arms, self.num_features))
        return np.array([0.4, 0.7, 0.8]) if self.num_arms == 3 else rng.beta(2.0, 5.0, self.num_arms)


class Player(NamedTuple):
    """An implementation of a bandit.

    Attributes:
        name: name in tables.
        note: what it computes.
        make: (case, seed) -> (select, update); not timed.
    """

    name: str
    note: str
    make: Callable[[Case, int], tuple[Callable, Callable]]


CASES: Mapping[str, Case] = {
    case.name: case for case in (Case("bernoulli", 3), Case("linear", 5, 10), Case("bernoulli-100", 100))
}


def case_players(case: Case, num_samples: int) -> list[Player]:
    """Return the implementations that can play a case; the first is this library."""
    loop = _numpy_linear if case.num_features else _numpy_bernoulli
    players = [
        Player("ppl_bandit", f"double sampling, M = {num_samples}, p-hat from its law", _ours(num_samples, False)),
        Player("ppl_bandit, draws=True", f"the same, from M = {num_samples} draws", _ours(num_samples, True)),
        Player("NumPy, 1 draw", "Thompson sampling, written by hand", loop(1)),
        Player(f"NumPy, {num_samples} draws", "p-hat and an arm drawn from it, written by hand", loop(num_samples)),
    ]
    if importlib.util.find_spec("bayesianbandits"):
        note = "Thompson sampling from one draw; no p-hat, no propensities"
        players.append(Player("bayesianbandits", note, _bayesianbandits))
    return players


def case_program(case: Case) -> tuple[Callable, Any]:
    """Return the program of a case and its example context."""
    if case.num_features:
        return linear_program(case.num_arms, case.num_features), np.full(case.num_features, 0.5)
    return bernoulli_program(case.num_arms), None


def _ours(num_samples: int, draws: bool) -> Callable:
    def make(case: Case, seed: int) -> tuple[Callable, Callable]:
        from ppl_bandit import Bandit

        program, context = case_program(case)
        bandit = Bandit(program, case.num_arms, context=context, num_samples=num_samples, seed=seed, draws=draws)
        bandit.warm_up()
        decisions: list[Any] = []

        def select(context: Any) -> int:
            decisions.append(bandit.select(context))
            return decisions[-1].arm

        def update(arm: int, reward: float, context: Any) -> None:
            bandit.update(decisions.pop(), reward)

        return select, update

    return make


def _numpy_bernoulli(num_samples: int) -> Callable:
    def make(case: Case, seed: int) -> tuple[Callable, Callable]:
        rng, counts = np.random.default_rng(seed), np.ones((2, case.num_arms))

        def select(context: Any) -> int:
            table = rng.beta(counts[0], counts[1], (num_samples, case.num_arms))
            return _choose(rng, table)

        def update(arm: int, reward: float, context: Any) -> None:
            counts[0, arm] += reward
            counts[1, arm] += 1.0 - reward

        return select, update

    return make


def _numpy_linear(num_samples: int) -> Callable:
    """Normal-inverse-gamma regression per arm; it draws the A expected rewards, which are Student-t."""

    def make(case: Case, seed: int) -> tuple[Callable, Callable]:
        rng, size = np.random.default_rng(seed), case.num_features
        covariance = np.tile(np.eye(size), (case.num_arms, 1, 1))
        mean, shape, rate = np.ones((case.num_arms, size)), np.ones(case.num_arms), np.ones(case.num_arms)

        def select(context: np.ndarray) -> int:
            scale = np.sqrt((covariance @ context) @ context * rate / shape)
            table = mean @ context + scale * rng.standard_t(2.0 * shape, (num_samples, case.num_arms))
            return _choose(rng, table)

        def update(arm: int, reward: float, context: np.ndarray) -> None:
            gain = covariance[arm] @ context
            spread = 1.0 + context @ gain
            error = reward - context @ mean[arm]
            mean[arm] += gain * error / spread
            covariance[arm] -= np.outer(gain, gain) / spread
            shape[arm] += 0.5
            rate[arm] += 0.5 * error**2 / spread

        return select, update

    return make


def _choose(rng: np.random.Generator, table: np.ndarray) -> int:
    if len(table) == 1:
        return int(table.argmax())
    shares = np.bincount(table.argmax(axis=1), minlength=table.shape[1]) / len(table)
    return int(rng.choice(shares.size, p=shares))


def _bayesianbandits(case: Case, seed: int) -> tuple[Callable, Callable]:
    from bayesianbandits import (
        Agent,
        Arm,
        ContextualAgent,
        DirichletClassifier,
        NormalInverseGammaRegressor,
        ThompsonSampling,
    )

    if not case.num_features:
        arms = [
            Arm(arm, lambda draws: draws[..., 1], DirichletClassifier({0: 1.0, 1: 1.0})) for arm in range(case.num_arms)
        ]
        agent = Agent(arms, ThompsonSampling(), random_seed=seed)
        return lambda context: agent.pull()[0], lambda arm, reward, context: agent.update(np.array([int(reward)]))
    linear = [
        Arm(arm, learner=NormalInverseGammaRegressor(mu=1.0, lam=1.0, a=1.0, b=1.0)) for arm in range(case.num_arms)
    ]
    contextual = ContextualAgent(linear, ThompsonSampling(), random_seed=seed)
    return (
        lambda context: contextual.pull(context[None])[0],
        lambda arm, reward, context: contextual.update(context[None], np.array([reward])),
    )
