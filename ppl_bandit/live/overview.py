"""Summary of the arms: expected reward with an interval, P(best), and expected loss."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.display.terminal import shown_name
from ppl_bandit.inputs.data_frames import context_columns
from ppl_bandit.numerics.tail_excess import losses_from_moments, losses_from_table
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit

if TYPE_CHECKING:
    import pandas

# Of the tabulated quantiles: evenly spaced for a Normal law.
ORDERS = np.array([NormalDist().cdf(z) for z in np.linspace(-3.5, 3.5, 81)])
_MAX_CONTEXTS = 200  # the standard error of an average is then 7% of the spread between contexts
_MAX_ENTRIES = 20_000_000  # of all tables together: 160 MB


class Segment(NamedTuple):
    """The contexts with one value of an entry, or in a half of its values, and the arm that is best on average there.

    Attributes:
        name: such as "device=mobile" or "age < 40".
        share: of the contexts averaged over.
        leader: index of the arm.
        best_prob: posterior probability that it is the best single arm of these contexts.
        mean, interval: posterior mean of its expected reward there, and the central 95% interval.
        lead, lead_interval: how much more it earns there than the arm that is best on average over all contexts; 0 if it is
            that arm.
    """

    name: str
    share: float
    leader: int
    best_prob: float
    mean: float
    interval: tuple[float, float]
    lead: float
    lead_interval: tuple[float, float]


class ByContext(NamedTuple):
    """What a choice by context is worth, over the contexts averaged over.

    Attributes:
        lead_shares: (A,), share of the contexts in which each arm has the largest posterior mean.
        gain: posterior mean of what choosing the leader of each context earns per decision, more than the best single arm.
        gain_interval: its central 95% interval.
        single_best_prob: (A,), posterior probability that the arm is the best single arm, on average over the contexts.
        segments: of each entry of the context that differs between contexts.
    """

    lead_shares: np.ndarray
    gain: float
    gain_interval: tuple[float, float]
    single_best_prob: np.ndarray
    segments: tuple[Segment, ...] = ()


class Overview(NamedTuple):
    """One entry for each of the A arms: in closed form where there is one, and from M posterior draws otherwise.

    Attributes:
        arms: names.
        num_rewards: number of rewards learnt.
        mean: posterior mean of the expected reward, or its median.
        is_median: whether `mean` is the median, because one draw makes up most of the average: the mean may not exist.
        low, high: central 95% interval of the expected reward.
        best_prob: posterior probability that the arm is best, averaged over contexts.
        loss: expected loss of choosing this arm now, E[max_b theta_b - theta_a], averaged over contexts; nan if the mean of any
            arm may not exist.
        draws: (M, A), expected rewards, averaged over contexts; None where all numbers are in closed form.
        num_contexts: number of contexts averaged over; 0 for a program without context.
        quantiles: (G, A), of the expected reward at `ORDERS`; None where it has no closed form.
        pseudo_counts: (A,), number of rewards that each arm's posterior is worth; None where that has no closed form.
        contexts: those averaged over, with a leading axis.
        by_context: None for fewer than two contexts, or if the mean of any arm may not exist.
        is_open: (A,), the arms among which the best is looked for: those that are not retired; None for all.
    """

    arms: list[Any]
    num_rewards: np.ndarray
    mean: np.ndarray
    is_median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    best_prob: np.ndarray
    loss: np.ndarray
    draws: np.ndarray | None
    num_contexts: int
    quantiles: np.ndarray | None = None
    pseudo_counts: np.ndarray | None = None
    contexts: Any = None
    by_context: ByContext | None = None
    is_open: np.ndarray | None = None

    @property
    def is_complete(self) -> bool:
        """Whether P(best) is known; in closed form it is if the arms are independent."""
        return not np.isnan(self.best_prob).any()

    @property
    def leaders(self) -> np.ndarray:
        """Indices of the arms, by decreasing mean; the retired ones come last."""
        is_retired = np.zeros(len(self.arms), bool) if self.is_open is None else ~self.is_open
        return np.lexsort((-self.mean, is_retired))

    @property
    def num_open(self) -> int:
        """Number of arms that are not retired."""
        return len(self.arms) if self.is_open is None else int(self.is_open.sum())

    def lead(self, first: int, second: int) -> tuple[float, float, float]:
        """Return how much more one arm earns than another: the posterior mean (or median), and the central 95% interval."""
        if self.draws is None:  # independent arms: all pairs of quantiles
            assert self.quantiles is not None
            cells = np.diff(ORDERS, prepend=0.0, append=1.0)
            weights = 0.5 * (cells[:-1] + cells[1:])
            weights[[0, -1]] += 0.5 * cells[[0, -1]]
            gaps = np.subtract.outer(self.quantiles[:, first], self.quantiles[:, second]).ravel()
            order = np.argsort(gaps)
            mass = np.outer(weights, weights).ravel()[order]
            below = np.cumsum(mass) - 0.5 * mass
            low, middle, high = np.interp([0.025, 0.5, 0.975], below, gaps[order])
            mean = self.mean[first] - self.mean[second]
        else:
            gaps = self.draws[:, first] - self.draws[:, second]
            low, middle, high = np.quantile(gaps, [0.025, 0.5, 0.975])
            mean = gaps.mean()
        return float(middle if self.is_median.any() else mean), float(low), float(high)

    @property
    def source(self) -> str:
        """Where the numbers come from, in words."""
        if self.draws is None:
            return "numbers in closed form"
        drawn = f"from {self.draws.shape[0]} posterior draws"
        return f"numbers {drawn}" if self.quantiles is None else f"intervals in closed form, P(best) {drawn}"

    @property
    def where(self) -> str:
        """The contexts averaged over, in words; empty for a program without context."""
        if not self.num_contexts:
            return ""
        return "at one context" if self.num_contexts == 1 else f"averaged over {self.num_contexts} contexts"

    def to_frame(self) -> "pandas.DataFrame":
        """Return a DataFrame with one row per arm."""
        columns = {
            "arm": [shown_name(arm) for arm in self.arms],
            "num_rewards": self.num_rewards,
            "expected_reward": self.mean,
            "low": self.low,
            "high": self.high,
            "best_arm_prob": self.best_prob,
            "expected_loss": self.loss,
        }
        frame = _narrow_frame()(columns)
        frame.attrs["interval"] = "central 95% of the posterior"
        frame.attrs["num_contexts"] = self.num_contexts
        frame.attrs["source"] = self.source
        return frame


@functools.cache
def _narrow_frame() -> type:
    """Return the class of a DataFrame that prints all columns in 80 characters: long names take two lines."""
    import pandas

    class NarrowFrame(pandas.DataFrame):
        @property
        def _constructor(self) -> type:
            return pandas.DataFrame

        def __repr__(self) -> str:
            printed = pandas.DataFrame(self)
            parts = [str(name).rpartition("_") for name in self.columns]
            printed.columns = pandas.MultiIndex.from_tuples([(start + dash, end) for start, dash, end in parts])
            return repr(printed)

    return NarrowFrame


def arm_overview(
    model: RewardModel,
    arms: Sequence[Any],
    played: np.ndarray,
    draws: Mapping[str, np.ndarray],
    contexts: Any = None,
    is_open: np.ndarray | None = None,
) -> Overview:
    """Summarise the arms by posterior draws.

    Args:
        played: index of the arm of every learnt reward.
        draws: of the latents, {site: (M, ...)}.
        contexts: to average over, with a leading axis; None for a program without context.
        is_open: (A,), the arms that are not retired; None for all.
    """
    num_contexts = 0 if contexts is None else len(jax.tree.leaves(contexts)[0])
    with jax.enable_x64(True):
        rows = contexts if num_contexts else None
        tables = np.asarray(reward_tables(model, num_contexts > 0)(dict(draws), rows))  # (C, M, A)
    competing = tables if is_open is None else np.where(is_open, tables, -np.inf)
    wins = competing == competing.max(axis=2, keepdims=True)
    averaged = tables.mean(axis=0)
    low, median, high = np.quantile(averaged, [0.025, 0.5, 0.975], axis=0)
    # If the mean exists, the largest of M deviations is a small part of their sum.
    deviations = np.abs(averaged - median)
    is_median = (deviations.max(axis=0) > 0.5 * deviations.sum(axis=0)) & (len(averaged) >= 100)
    by_context = None
    if num_contexts > 1 and not is_median.any():
        by_context = _by_context(competing, [] if slot_note(model) else context_entries(model, contexts))
    return Overview(
        list(arms),
        np.bincount(played, minlength=len(arms)),
        np.where(is_median, median, averaged.mean(axis=0)),
        is_median,
        low,
        high,
        (wins / wins.sum(axis=2, keepdims=True)).mean(axis=(0, 1)),
        np.where(is_median.any(), np.nan, losses_from_table(tables, is_open).mean(axis=0)),
        averaged,
        num_contexts,
        contexts=contexts,
        by_context=by_context,
        is_open=is_open,
    )


def _by_context(tables: np.ndarray, entries: Sequence["ContextEntry"]) -> ByContext:
    """Compare the choice of each context's leader with the best single arm; both are fixed by the posterior means.

    Args:
        tables: (C, M, A), expected rewards; of retired arms -inf.
    """
    num_contexts, _, num_arms = tables.shape
    leaders = tables.mean(axis=1).argmax(axis=1)
    by_leader = tables[np.arange(num_contexts), :, leaders].mean(axis=0)
    averaged = tables.mean(axis=0)
    single = int(averaged.mean(axis=0).argmax())
    shares = np.bincount(leaders, minlength=num_arms) / num_contexts
    gains = by_leader - averaged[:, single]
    segments = (
        _segment(name, where, tables, single) for entry in entries for name, where in entry.segments() if where.any()
    )
    return ByContext(shares, float(gains.mean()), _interval_of(gains), _best_probs(averaged), tuple(segments))


def _segment(name: str, where: np.ndarray, tables: np.ndarray, single: int) -> Segment:
    averaged = tables[where].mean(axis=0)
    leader = int(averaged.mean(axis=0).argmax())
    own, leads = averaged[:, leader], averaged[:, leader] - averaged[:, single]
    return Segment(
        name,
        float(where.mean()),
        leader,
        float(_best_probs(averaged)[leader]),
        float(own.mean()),
        _interval_of(own),
        float(leads.mean()),
        _interval_of(leads),
    )


def _best_probs(averaged: np.ndarray) -> np.ndarray:
    wins = averaged == averaged.max(axis=1, keepdims=True)
    return (wins / wins.sum(axis=1, keepdims=True)).mean(axis=0)


def _interval_of(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


_MAX_COLUMNS = 24  # of a context; of wider contexts the first ones
_MAX_DISTINCT = 4  # values of an entry that are segments of their own


class ContextEntry(NamedTuple):
    """An entry of the context that differs between contexts; or the entries of 0 and 1 that tell groups apart.

    Attributes:
        name: of the entry, or of what the groups are groups of.
        places: {column: (number of the leaf, index in the leaf)}, one, or one for each group.
        seen: (C, K), the values of these columns.
        groups: {name of a group: (K,), its values}; empty for one column.
    """

    name: str
    places: dict[str, tuple[int, tuple[int, ...]]]
    seen: np.ndarray
    groups: dict[str, np.ndarray]

    def segments(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names of segments, and which contexts are in each."""
        for name, values in self.groups.items():
            yield name, (self.seen == values).all(axis=1)
        if self.groups:
            return
        seen = self.seen[:, 0]
        values = np.unique(seen)
        if values.size <= _MAX_DISTINCT:
            yield from ((f"{self.name}={value:g}", seen == value) for value in values)
            return
        middle = float(np.median(seen))
        rounded = float(f"{middle:.3g}")
        cut = rounded if values[0] < rounded <= values[-1] else middle if values[0] < middle else values[1]
        yield f"{self.name} < {cut:.6g}", seen < cut
        yield f"{self.name} >= {cut:.6g}", seen >= cut


def context_entries(model: RewardModel, contexts: Any) -> list[ContextEntry]:
    """Return the entries that differ between contexts, apart from a clock.

    Columns of 0 and 1 of one leaf, or with one name before "=", are groups if no two of them are 1 in the same context: one of
    them alone cannot change.

    Args:
        contexts: that were seen, with a leading axis.
    """
    columns = {
        name: place for name, place in context_columns(model).items() if not (model.has_clock and name == "time")
    }
    places = dict(list(columns.items())[:_MAX_COLUMNS])
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(contexts)]
    seen = {name: np.moveaxis(leaves[number], 0, -1)[index] for name, (number, index) in places.items()}
    members = list[list[str]]()
    for name, values in seen.items():
        distinct = np.unique(values)
        if distinct.size < 2:
            continue
        own = next(
            (
                others
                for others in members
                if np.array_equal(distinct, (0, 1))
                and _stem(name, places) == _stem(others[0], places)
                and all(np.array_equal(np.unique(seen[other] + 0.0 + values), (0, 1)) for other in others)
            ),
            None,
        )
        if own is None:
            members.append([name])
        else:
            own.append(name)
    found = []
    for names in members:
        own_seen = np.stack([seen[name] for name in names], axis=1)
        groups = {}
        if len(names) > 1:
            groups = {name if "=" in name else f"{name}=1": np.eye(len(names))[i] for i, name in enumerate(names)}
            if (own_seen == 0).all(axis=1).any():
                groups[f"none of {', '.join(names)}"] = np.zeros(len(names))
        stems = {name.partition("=")[0] for name in names}
        name = names[0] if len(names) == 1 else stems.pop() if len(stems) == 1 else ", ".join(names)
        found.append(ContextEntry(name, {name: places[name] for name in names}, own_seen, groups))
    return found


def _stem(name: str, places: Mapping[str, tuple[int, tuple[int, ...]]]) -> str | int:
    """Return what columns of one group have in common: the name before "=", else the leaf; scalars have none in common."""
    number, index = places[name]
    return name.partition("=")[0] if "=" in name else number if index else ""


@functools.lru_cache(maxsize=8)
def reward_tables(model: RewardModel, has_context: bool) -> Callable[[Any, Any], Any]:
    """Return the function (draws, contexts with a leading axis) -> tables of expected rewards (C, M, A)."""

    def read(draws: Any, contexts: Any) -> Any:
        if not has_context:
            return model.expected_rewards(draws, None)[None]
        return jax.lax.map(lambda context: model.expected_rewards(draws, context), contexts)

    return jax.jit(read)


def slot_note(model: RewardModel) -> str:
    """Return what to say if the arms are places of a list of candidates that changes with every decision; else empty."""
    is_list = any(np.ndim(leaf) and np.shape(leaf)[0] == model.num_arms for leaf in jax.tree.leaves(model.context))
    if not is_list or any(shape[:1] == (model.num_arms,) for shape in model.latent_shapes.values()):
        return ""
    return (
        "the arms are places in a list of candidates that changes with every decision, so numbers by arm mean little; pass "
        "contexts= with one list of candidates"
    )


def subsample_contexts(contexts: Any, most: int = _MAX_CONTEXTS, *, table_size: int = 1) -> Any:
    """Return at most so many of the contexts, evenly spaced in their order; fewer where the tables would fill the memory.

    Args:
        table_size: M times A.
    """
    if contexts is None:
        return None
    num, most = len(jax.tree.leaves(contexts)[0]), min(most, max(1, _MAX_ENTRIES // table_size))
    if num <= most:
        return contexts
    index = np.linspace(0, num - 1, most).round().astype(int)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], contexts)


_INTERVAL = (0.025, 0.5, 0.975)


def closed_form(
    learner: Learner, arms: Sequence[Any], played: np.ndarray, contexts: Any = None, is_open: np.ndarray | None = None
) -> Overview | None:
    """Summarise the arms in closed form; None where their laws have none, or are mixtures over particles.

    P(best) and the expected loss have a closed form if the arms are independent; otherwise they are nan.

    Args:
        played: index of the arm of every learnt reward.
        contexts: one context, with a leading axis; None for a program without context.
        is_open: (A,), the arms that are not retired; None for all.
    """
    capabilities, context = learner.engine.capabilities, jax.tree.map(lambda leaf: leaf[0], contexts)
    if capabilities.marginals is None or not learner.engine.explanation.is_exact:
        return None
    with jax.enable_x64(True):
        found = jax.device_get(_reader(capabilities.marginals)(learner.state, context, is_open))
        if found is None:
            return None
        is_median = np.zeros(len(arms), bool)
        if capabilities.infinite_means is not None:
            is_median = np.asarray(capabilities.infinite_means(learner.state, context), bool)
    low, median, high = found["interval"]
    unknown = np.full(len(arms), np.nan)
    loss = np.asarray(found.get("loss", unknown))
    if is_open is not None:  # the moments leave the others out: E[max] is the same whichever arm it is compared with
        first = int(np.flatnonzero(is_open)[0])
        loss = np.where(is_open, loss, found["mean"][first] + loss[first] - found["mean"])
    return Overview(
        list(arms),
        np.bincount(played, minlength=len(arms)),
        np.where(is_median, median, found["mean"]),
        is_median,
        low,
        high,
        found.get("best_prob", unknown),
        unknown if is_median.any() else loss,
        draws=None,
        num_contexts=0 if contexts is None else 1,
        quantiles=found["quantiles"],
        pseudo_counts=found["pseudo_counts"],
        contexts=contexts,
        is_open=is_open,
    )


def draws_from(found: Overview, num_samples: int, seed: int) -> np.ndarray:
    """Return draws of the expected rewards of independent arms, (M, A), by interpolation between the quantiles."""
    assert found.quantiles is not None
    orders = np.random.default_rng(seed).random((num_samples, len(found.arms)))
    columns = zip(orders.T, found.quantiles.T, strict=True)
    return np.stack([np.interp(own, ORDERS, quantiles) for own, quantiles in columns], axis=1)


@functools.lru_cache(maxsize=8)  # compiled programs
def _reader(marginals_of: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def read(state: Any, context: Any, is_open: Any) -> dict[str, Any] | None:
        marginals = marginals_of(state, context)
        if marginals is None or marginals.is_mixture or marginals.tail is None:
            return None
        orders = jnp.asarray(np.concatenate([_INTERVAL, ORDERS]))
        quantiles = jax.lax.map(marginals.quantile, orders)  # XLA takes minutes to compile its vmap
        moments = None if marginals.best_arm_moments is None else marginals.best_arm_moments(is_open)
        return {
            "mean": marginals.tail().mean,
            "interval": quantiles[: len(_INTERVAL)],
            "quantiles": quantiles[len(_INTERVAL) :],
            "pseudo_counts": None if marginals.pseudo_counts is None else marginals.pseudo_counts(),
        } | ({} if moments is None else {"best_prob": moments.probs, "loss": losses_from_moments(moments)})

    return quick_jit(read)
