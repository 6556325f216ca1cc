"""What people take along: DataFrames of the history, and ArviZ data."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.display.terminal import shown_name
from ppl_bandit.inputs.checks import as_interaction
from ppl_bandit.inputs.data_frames import column_values, key_names
from ppl_bandit.journal.events import IMPORTED, DecisionRecord, fold_decision
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.posterior.task import why_not_in_part
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.outcomes import separable_outcomes
from ppl_bandit.runtime.compile_ahead import quick_jit, run_once
from ppl_bandit.runtime.numpyro_adapter import mask_of
from ppl_bandit.types import Interaction, Key

_BATCH_SIZE = 32  # draws whose likelihoods are computed together


def export(
    model: RewardModel,
    arms: Sequence[Any],
    posterior: Mapping[str, np.ndarray],
    prior: Mapping[str, np.ndarray],
    rows: tuple[np.ndarray, dict[str, np.ndarray], Any],
    num_chains: int = 1,
) -> Any:
    """Return draws and data in ArviZ's groups.

    The groups are posterior, prior, sample_stats (`lp`, the log joint density) and, if there are rows, observed_data,
    constant_data, log_likelihood and posterior_predictive. An outcome that the program masks in a row (no spend without a
    sale) is 0 there. With several outcomes the log likelihood of a row is their sum, named `reward`. The first axis of a
    latent is named `arm` if its length is the number of arms; other axes are named after the site.

    If latents move, the draws are those of the step after the last row, and say nothing about the latents of earlier rows. So
    sample_stats, log_likelihood and posterior_predictive are left out, and `posterior.attrs["step"]` says which step it is.

    Args:
        posterior: {site: (M, ...)}; M is a multiple of num_chains.
        num_chains: number of independent runs in the draws, one after another.
    """
    import arviz as az

    indices, _, contexts = rows

    def in_chains(values: Any) -> np.ndarray:
        array = np.asarray(values)
        return array.reshape(num_chains, -1, *array.shape[1:])

    groups: dict[str, Any] = {
        "posterior": {name: in_chains(value) for name, value in posterior.items()},
        "prior": {name: np.asarray(value)[None] for name, value in prior.items()},
    }
    dims = {name: _latent_dims(name, shape, len(arms)) for name, shape in model.latent_shapes.items()}
    dims |= {name: ["row"] for name in (*model.outcomes, "played_arm", "reward")}
    coords: dict[str, Any] = {"arm": list(arms)} if any("arm" in names for names in dims.values()) else {}
    if indices.size:
        groups["observed_data"] = observed_outcomes(model, as_interaction(model, *rows))
        constants = {"played_arm": np.asarray(arms)[indices]}
        for path, leaf in jax.tree_util.tree_flatten_with_path(contexts)[0]:
            name = "_".join(["context", *key_names(path)])
            constants[name] = np.asarray(leaf)
            dims[name] = ["row", *(f"{name}_dim_{axis}" for axis in range(np.ndim(leaf) - 1))]
        groups["constant_data"] = constants
        coords["row"] = np.arange(indices.size)
    if not model.moving_sites:
        per_draw = _read_draws(model, posterior, rows)
        groups["sample_stats"] = {"lp": in_chains(per_draw["lp"])}
        if indices.size:
            joint = model.outcomes[0] if len(model.outcomes) == 1 else "reward"
            groups["log_likelihood"] = {joint: in_chains(per_draw["log_likelihood"])}
            groups["posterior_predictive"] = {name: in_chains(per_draw[f"drawn {name}"]) for name in model.outcomes}
    if int(az.__version__.split(".")[0]) >= 1:
        tree = az.from_dict(groups, dims=dims, coords=coords)
    else:
        tree = az.from_dict(**groups, dims=dims, coords=coords)
    if model.moving_sites:
        tree["posterior"].attrs["step"] = f"the one after {indices.size} rows; latents of earlier steps are not kept"
    return tree


def _latent_dims(name: str, shape: tuple[int, ...], num_arms: int) -> list[str]:
    """Name the axes of a latent site."""
    return ["arm" if axis == 0 and size == num_arms else f"{name}_dim_{axis}" for axis, size in enumerate(shape)]


def _read_draws(model: RewardModel, draws: Mapping[str, np.ndarray], rows: tuple) -> dict[str, np.ndarray]:
    """Return, for each draw, the log joint density, the log likelihood of each row, and replicated outcomes."""
    num_rows = rows[0].size
    with jax.enable_x64(True):
        data = jax.tree.map(jnp.asarray, as_interaction(model, *rows))
        latents = {name: jnp.asarray(value) for name, value in draws.items()}
        keys = jr.split(jr.key(0), len(next(iter(latents.values()))))

        def read(one: tuple[Key, dict[str, Array]]) -> dict[str, Array]:
            key, latents = one
            log_prior = model.log_prior(latents)
            if num_rows == 0:
                return {"lp": log_prior}
            density = model.log_likelihood(latents, data)
            drawn = {f"drawn {name}": v for name, v in replicate_outcomes(model, key, latents, data).items()}
            return {"lp": log_prior + density.sum(), "log_likelihood": density, **drawn}

        return jax.device_get(quick_jit(lambda xs: jax.lax.map(read, xs, batch_size=_BATCH_SIZE))((keys, latents)))


def replicate_outcomes(
    model: RewardModel, key: Key, latents: Mapping[str, Array], data: Interaction
) -> dict[str, Array]:
    """Draw the outcomes of every row again, {outcome: (N,)}; an outcome that the program masks is 0."""
    trace = model.trace(latents, data.arm, data.context, key=key)
    return {name: jnp.broadcast_to(_unmasked(trace[name]), data.arm.shape) for name in model.outcomes}


def observed_outcomes(model: RewardModel, data: Interaction) -> dict[str, np.ndarray]:
    """Return the outcomes of the rows in the dtype of their distribution; an outcome that the program masks is 0."""

    def read() -> dict[str, Array]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)
        rows = jax.tree.map(jnp.asarray, data)
        trace = model.trace(latents, rows.arm, rows.context, model.outcome_values(rows.reward))
        return {name: _unmasked(trace[name]) for name in model.outcomes}

    with jax.enable_x64(True):
        return run_once(read)


def _unmasked(site: Any) -> Array:
    fn, value = site["fn"], site["value"]
    while (mask := mask_of(fn)) is not None:
        value, fn = jnp.where(mask, value, 0), fn.base_dist
    return value


if TYPE_CHECKING:
    import pandas


def history_table(experiment: Experiment) -> "pandas.DataFrame":
    """Return one row per learnt reward, in the order of learning; imported plays have no decision."""
    import pandas

    with experiment.fold_lock:
        task = experiment.projection.task
        arms, rewards, contexts, _, positions = experiment.history.rows()
    ids, propensity = np.full(arms.size, None, object), np.full(arms.size, np.nan)
    decided, rewarded = propensity.copy(), propensity.copy()
    for record in experiment.store.decisions(experiment.name):
        row = np.searchsorted(positions, record.row or 0)
        if row < arms.size and positions[row] == record.row:
            ids[row], decided[row] = shown_name(record.decided.decision), record.decided.time
            rewarded[row], propensity[row] = record.settled, record.propensity
    for event in experiment.store.read(experiment.name, kinds=(IMPORTED,)):
        propensity[positions == event.position] = event.body.get("propensity", np.nan)
    columns: dict[str, Any] = {
        "decision": ids,
        "decided": _times(decided),
        "rewarded": _times(rewarded),
        "arm": [shown_name(task.arms.names[i]) for i in arms],
        "propensity": propensity,
    }
    return pandas.DataFrame(columns | rewards | _context_values(task.model, jax.tree.leaves(contexts)))


def pending_table(experiment: Experiment, until: float | None) -> "pandas.DataFrame":
    """Return one row per decision with a pending reward, oldest first."""
    import pandas

    model = experiment.projection.task.model
    pending = experiment.store.pending(experiment.name, until)
    found = experiment.store.find(experiment.name, [str(event.decision) for event in pending])
    records = [fold_decision(found[str(event.decision)]) for event in pending]
    columns: dict[str, Any] = {
        "decision": [shown_name(event.decision) for event in pending],
        "decided": _times([event.time for event in pending]),
        "arm": [shown_name(event.body["name"]) for event in pending],
        "propensity": [record.propensity for record in records],
    }
    if len(model.outcomes) > 1:
        columns |= {name: [record.reward.get(name, np.nan) for record in records] for name in model.outcomes}
        columns["learnt"] = [", ".join(o for o in model.outcomes if o in record.counted) for record in records]
    needed = (*model.outcomes, *experiment.projection.task.late)
    if len(needed) > 1:
        unknown = [[one for one in needed if one not in r.reward and one not in r.late] for r in records]
        columns["waiting_for"] = [", ".join(names) for names in unknown]
    note = _why_waiting(experiment, records)
    num_leaves = len(jax.tree.leaves(model.context)) if pending else 0
    leaves = [np.asarray([record.context[i] for record in records]) for i in range(num_leaves)]
    table = pandas.DataFrame(columns | _context_values(model, leaves))
    table.attrs |= {"note": note} if note else {}
    return table


def _why_waiting(experiment: Experiment, records: list[DecisionRecord]) -> str:
    """Return why outcomes that are known are not learnt before the others, in words; empty if that does not happen."""
    projection = experiment.projection
    task = projection.task
    known = [separable_outcomes(task.model, frozenset(r.reward)) for r in records if r.reward and r.row is None]
    why = why_not_in_part(task, projection.prior.engine) if any(known) else ""
    return f"outcomes wait until all are known: {why}" if why else ""


def _times(values: Any) -> Any:
    import pandas

    return pandas.to_datetime(pandas.Series(values, dtype=float), unit="s", utc=True)


def _context_values(model: RewardModel, leaves: list[Any]) -> dict[str, Any]:
    """Return the columns of contexts; empty columns if there are no leaves, because there are no rows."""
    if not leaves:
        leaves = [np.zeros((0, *np.shape(leaf))) for leaf in jax.tree.leaves(model.context)]
    return column_values(model, leaves)
