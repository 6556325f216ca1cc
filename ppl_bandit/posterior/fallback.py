"""Learn rows, and replace the engine by a fallback if its evidence is insufficient."""

import contextlib
import functools
import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ppl_bandit import engines
from ppl_bandit.engines.particles.weighted_particles import MIN_ESS_SHARE
from ppl_bandit.engines.proof.certificate import is_affine, resolution
from ppl_bandit.posterior.learning import RENEWED, UPDATE_SIZES, Learner, batch_sizes, row_batches, start
from ppl_bandit.posterior.task import History, Rows, Task, counted_rows
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.packed_state import unpack, with_changes
from ppl_bandit.types import BanditError, Engine, Interaction, NotConjugate, with_remedy

# The fallback of each engine; that of `conjugate` depends on the rows that it refused (`_exact_fallback`). `laplace`
# and `svi` have none: a bandit uses them only if the user chose them, for their speed.
LADDER: Mapping[str, str] = {
    "kalman": "particle_filter",
    "collapsed_kalman": "particle_filter",
    "collapsed": "reweight",
    "reweight": "nuts",
}
_MAX_EXAMPLES = 8  # refused rows that the fallback is tested with
_MAX_DOUBTED = 10  # times in a row that draws may be renewed and still lack evidence

_LOGGER = logging.getLogger("ppl_bandit")

_FITTED = "leave engine out, and the bandit chooses one that draws from the posterior itself"
_MORE = "give it more particles, as in engine=functools.partial(engines.particle_filter, num_particles=20_000)"
_REMEDIES = {  # of draws that are used although their checks failed
    "laplace": _FITTED,
    "svi": _FITTED,
    "reweight": "engine=engines.nuts draws anew from all rewards, in more time",
    "collapsed": "engine=engines.nuts draws anew from all rewards, in more time",
    "particle_filter": _MORE,
}
_OTHER_REMEDY = "a prior whose middle and width fit the rewards helps most, and ppl_bandit.compare measures the error"


class NotCertified(BanditError):
    """A row that an exact engine cannot certify; the state of the bandit has not changed."""


def learn(task: Task, learner: Learner, history: History, rows: Rows) -> tuple[Learner, Any, list[str]]:
    """Learn rows; if the evidence is insufficient, learn the whole history with the fallback engine.

    Without a fallback the draws are used with one warning. `collapsed` and `reweight` are kept until their draws were renewed a
    few more times: a posterior is hardest while there are few rewards, and the fallback takes many times as long for each row.

    Returns:
        The learner after these rows, the engine's evidence, and warnings for the user.

    Raises:
        ValueError: for a reward that the program cannot produce.
        NotCertified: for a row that is not conjugate, if the user chose the exact engine.
    """
    explanation = learner.engine.explanation
    num_seen = history.num_rows + history.num_completed
    stored, info = _fold(task, learner, num_seen, rows)
    if bool(info.is_trusted):
        after = learner._replace(stored=stored, doubts="", num_doubted=0)
        num_refreshes = int(getattr(info, "num_refreshes", 0))
        if num_refreshes > learner.num_refreshes:
            after = after._replace(num_refreshes=num_refreshes)
            _LOGGER.info("the draws of the %s engine were renewed after %d rewards", explanation.engine, len(history))
        return after, info, []
    why = _uncertified(task, rows, info) if explanation.is_exact else _doubts(explanation.engine, info)
    if explanation.is_exact and not task.may_fall_back:
        remedy = "nothing was learnt from it: leave engine out, or choose an approximate one"
        raise NotCertified(with_remedy(why, remedy))
    fallback, refused = LADDER.get(explanation.engine), None
    factory = None if fallback is None else getattr(engines, fallback)
    if explanation.engine == "conjugate":
        refused = _refused(counted_rows(task, rows), info)
        factory = functools.partial(_exact_fallback, refused)
    num_refreshes = int(getattr(info, "num_refreshes", 0))
    # Moves that ended at their budget continue with a later update; the fallback would take longer still.
    num_doubted = 0 if _is_unfinished(info) else learner.num_doubted + (num_refreshes > learner.num_refreshes)
    is_kept = _is_unfinished(info) or (num_doubted < _MAX_DOUBTED and _may_recover(learner, rows, info))
    if factory is None or is_kept:
        rest = "they are renewed as rewards come" if is_kept else "no other engine is left"
        doubts = with_remedy(why, _REMEDIES.get(explanation.engine, _OTHER_REMEDY)) if not _is_unfinished(info) else why
        after = learner._replace(
            stored=stored, has_warned=True, doubts=doubts, num_doubted=num_doubted, num_refreshes=num_refreshes
        )
        return (
            after,
            info,
            [] if learner.has_warned else [with_remedy(doubts, f"{rest}, so these draws are used with caution")],
        )
    above = start(task, factory)._replace(has_warned=learner.has_warned)
    if above.engine.explanation.engine == "collapsed":
        above = above._replace(examples=refused)
    replayed, warnings = History(task.model.outcomes), list[str]()
    if len(history):
        past = history.rows()
        above, _, warnings = learn(task, above, replayed, past)
        replayed = replayed.extended(past)
    above, info, more = learn(task, above, replayed, rows)
    moved = (
        f"from here on the bandit uses the {above.engine.explanation.engine} engine, with all "
        f"{len(history) + rows.arms.size} rewards replayed, because {why}"
    )
    _LOGGER.info(moved)
    return above, info, [*warnings, *more, moved]


def _fold(task: Task, learner: Learner, num_seen: int, rows: Rows) -> tuple[Any, Any]:
    """Return the stored state after an update with rows, and the engine's evidence.

    An engine that stores no rows gets them in batches of a few fixed sizes. Other engines read all their data at an update,
    so they get all rows at once. One row is learnt by `quick_update`, if that is sufficient.

    Args:
        num_seen: number of rows learnt before these; the engine's random keys depend on it.

    Raises:
        ValueError: for a reward that the program cannot produce.
    """
    engine, run, stored, num_rows = learner.engine, learner.run, learner.stored, rows.arms.size
    if task.is_partial:
        rows = counted_rows(task, rows)
    reserve = engine.capabilities.reserve
    infos: list[Any] = []
    with jax.enable_x64(True):
        if reserve is not None:
            stored = reserve(stored, num_rows)
        batches = [(0, 1, rows)]
        if num_rows > 1:
            sizes = batch_sizes(num_rows, UPDATE_SIZES) if reserve is None else [_rounded_up(num_rows)]
            batches = row_batches(rows, num_rows, sizes)
        for first, num_batch, batch in batches:
            # `_unpack_rows` of `compiled_functions` undoes this: `jax.tree` would sort the outcomes.
            values = [batch.rewards[name] for name in task.model.outcomes]
            numbers = np.concatenate([(num_seen + first, num_batch), batch.arms, *values], dtype=np.float64)
            after = None
            if batch.arms.size == 1 and run.quick_update is not None:
                changes, packed = run.quick_update(learner.seed, stored, numbers, batch.contexts)
                result = unpack(packed)
                if result.is_complete or not result.is_possible:
                    after = with_changes(changes, stored)
            if after is None:
                after, packed = run.update(learner.seed, stored, numbers, batch.contexts)
                result = unpack(packed)
            if not result.is_possible:  # padding repeats the last row, so it is impossible only if that row is
                raise _impossible_reward(task, rows, result.possible, first)
            stored = after
            infos.append(result.info)
            num_done = first + num_batch
            if engine.explanation.is_exact and not result.info.is_trusted:
                break  # the caller discards the whole update
    return stored, infos[0] if len(infos) == 1 else _joined(infos, num_done)


def _impossible_reward(task: Task, rows: Rows, possible: Mapping[str, np.ndarray], start: int) -> ValueError:
    name = next(name for name, fits in possible.items() if not fits.all())
    row = start + int(np.argmin(possible[name]))
    where = f" in row {row}" if rows.arms.size > 1 else ""
    return ValueError(
        f"{name}={rows.rewards[name][row]:g}{where} is outside the support of the outcome '{name}' on arm "
        f"{task.arms.names[rows.arms[row]]!r}: the program cannot produce it; correct the reward or the program"
    )


def _joined(infos: list[Any], num_rows: int) -> Any:
    """Join the evidence of several batches: concatenate fields with a row axis, take the last value of the others."""

    def join(*leaves: Any) -> Any:
        return np.concatenate(leaves)[:num_rows] if np.ndim(leaves[0]) else leaves[-1]

    joined = jax.tree.map(join, *infos)
    return joined._replace(is_trusted=np.all([info.is_trusted for info in infos]))


def _rounded_up(num_rows: int) -> int:
    """Round up to one of four sizes between powers of two, so that few sizes are compiled; at most a quarter is padding."""
    step = 1 << max((num_rows - 1).bit_length() - 3, 0)
    return -(-num_rows // step) * step


def _may_recover(learner: Learner, rows: Rows, info: Any) -> bool:
    """Return whether draws without evidence can be used for now: enough have weight, and more rewards renew them."""
    engine = learner.engine
    if engine.explanation.engine not in RENEWED or rows.arms.size > 1:
        return False
    is_sound = bool(getattr(info, "may_recover", True)) and not bool(info.is_full)
    return is_sound and bool(info.ess >= MIN_ESS_SHARE * engine.settings["num_particles"])


def _exact_fallback(refused: Interaction | None, model: RewardModel) -> Engine:
    """Return `collapsed` if it is exact for the refused rows given a few sites, else `reweight`."""
    if refused is not None:
        with contextlib.suppress(NotConjugate):
            return engines.collapsed(model, examples=refused)
    return engines.reweight(model)


def _refused(rows: Rows, info: Any) -> Interaction | None:
    """Return the first rows that are not certified; None if another check failed."""
    failed = _not_certified(rows, info)[:_MAX_EXAMPLES]
    if not failed.size:
        return None
    arms, rewards, contexts = jax.tree.map(lambda leaf: np.asarray(leaf)[failed], rows[:3])
    return Interaction(arms, rewards, contexts)


def _not_certified(rows: Rows, info: Any) -> np.ndarray:
    """Return the indices of rows that are not certified."""
    return np.flatnonzero(~np.asarray(is_affine(info.residual))[: rows.arms.size])


def _uncertified(task: Task, rows: Rows, info: Any) -> str:
    failed, prior = _not_certified(rows, info), info.prior_residual
    if not failed.size and not bool(is_affine(prior)):
        if task.model.moving_sites:  # of a Kalman filter it is the residual of the steps
            nats, tolerance = float(prior.nats), float(prior.tolerance)
            return (
                f"the step to the time of these rewards is not linear Gaussian (residual {nats:.1e} nats, tolerance "
                f"{tolerance:.1e} nats), or rounding hides whether it is, although steps of other lengths are"
            )
        if float(prior.rounding) > resolution(np.float64):
            return f"the prior cannot be certified where these rewards take the posterior: {_rounded(prior.rounding)}"
        return (
            "the prior is not conjugate where these rewards take the posterior, although it is where the bandit began"
        )
    if not failed.size:
        return "the posterior after these rewards is beyond the precision of numbers: a matrix cancels, or a count is too large"
    row = int(failed[0])
    shown = ", ".join(f"{name} {value[row]:g}" for name, value in rows.rewards.items())
    nats, tolerance, rounding = (float(np.asarray(found)[row]) for found in info.residual)
    what = f"the likelihood of {shown} on arm {task.arms.names[rows.arms[row]]!r}"
    if nats <= tolerance:
        return f"{what} cannot be certified: {_rounded(rounding)}"
    bent = "is not conjugate, although every reward tried when the bandit was built was"
    return f"{what} {bent} (details: residual {nats:.1e} nats)"


def _rounded(nats: Any) -> str:
    """Describe the rounding that hides a deviation, and how to reduce it."""
    return (
        "the rewards are so far from what the program expects, in units of its noise, that rounding could hide a deviation; a "
        "prior whose middle and width fit the rewards, or rewards less a constant, leave less to round (details: up to "
        f"{float(nats):.1e} nats)"
    )


def _doubts(engine: str, info: Any) -> str:
    """Say what failed checks of an approximate update mean; the details are their values and bounds."""
    failed = info.failed_checks() if hasattr(info, "failed_checks") else []
    text = f"the draws of the {engine} engine are not trusted: intervals and P(best) may be wrong"
    if _is_unfinished(info):
        text += (
            "; they improve with later rewards, and engine=engines.laplace fits a Gaussian at the mode in less time "
            "(ppl_bandit.compare measures what that loses on this program)"
        )
    return f"{text} (details: {'; '.join(failed)})" if failed else text


def _is_unfinished(info: Any) -> bool:
    return bool(getattr(info, "is_unfinished", False))
