"""What is kept of the data, so that its statistics can be had at any outer value.

*Shared*: no outer site reaches the likelihood, so that one sum of statistics serves all particles. *Rows*: the data
themselves, read again at every new outer value; each particle carries its own sum from row to row.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_bandit.engines.approximate.buffer import Data
from ppl_bandit.engines.collapsed.inspection import Split
from ppl_bandit.engines.collapsed.outer import given
from ppl_bandit.engines.collapsed.statistics import Statistics, no_statistics, recentre, statistics_of
from ppl_bandit.engines.exact.families import Coordinates, latents_at
from ppl_bandit.program.reward_model import RewardModel

__all__ = ["Store", "read_prior", "read_rows", "shared_store"]


class Store(NamedTuple):
    """Sums of statistics that do not grow with the data: functions of a pytree `kept`, in which sums are linear.

    Attributes:
        words: what is kept, for people.
        empty: centre -> kept, of no data.
        read: (centre, data) -> kept, of rows; kept of more rows is the sum.
        statistics: (kept, centre, values) -> the statistics of all rows at outer values, without the common constant.
        common: kept -> the constant that all outer values share.
        recentred: (kept, old centre, new centre) -> kept; None where the centre must stay.
    """

    words: str
    empty: Callable[[Coordinates], Any]
    read: Callable[[Coordinates, Data], Any]
    statistics: Callable[[Any, Coordinates, Mapping[str, Array]], Statistics]
    common: Callable[[Any], Float[Array, ""]]
    recentred: Callable[[Any, Coordinates, Coordinates], Any] | None


def read_prior(model: RewardModel, split: Split, centre: Coordinates, values: Mapping[str, Array]) -> Statistics:
    """Return the statistics of the prior of inner and outer sites, at outer values."""
    view = given(model, values)
    return statistics_of(split.layout, lambda point: view.log_prior(latents_at(split.layout, point)), centre)


def read_rows(
    model: RewardModel, split: Split, centre: Coordinates, values: Mapping[str, Array], data: Data
) -> Statistics:
    """Return the statistics of weighted rows, all together, at outer values."""
    view = given(model, values)

    def log_likelihood(point: Coordinates) -> Float[Array, ""]:
        return data.weights @ view.log_likelihood(latents_at(split.layout, point), data.rows)

    return statistics_of(split.layout, log_likelihood, centre)


def shared_store(model: RewardModel, split: Split) -> Store:
    """Return the store of a program whose likelihood no outer site reaches: one sum for all outer values."""
    anywhere = {name: value[0] for name, value in split.values.items()}

    def read(centre: Coordinates, data: Data) -> Statistics:
        return read_rows(model, split, centre, jax.tree.map(jnp.asarray, anywhere), data)

    return Store(
        "one sum of statistics, shared by all particles: a step and a refresh cost the same after any number of rows",
        lambda centre: no_statistics(split.layout, centre),
        read,
        # What all particles share is left out of their targets, where it would only cost digits.
        lambda kept, centre, values: kept._replace(constant=jnp.zeros_like(kept.constant)),
        lambda kept: kept.constant,
        lambda kept, old, new: recentre(split.layout, kept, old, new),
    )
