"""Find the split: the smallest set of outer sites that leaves the rest conjugate.

A screening comes first, in numbers: log densities along lines through latent space, one compiled function for all of them.
Given everything else, an inner site must have a log density of its family's form (else it is outer), and two inner sites must
not interact in a way that no family has (else one of them is outer). What is left are few candidates; the first that is proved
and certified is the split. So screening saves time and claims nothing.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpyro.distributions import constraints

from ppl_bandit.engines.collapsed.inspection import Split, inspect, trial_rows
from ppl_bandit.engines.collapsed.outer import dependence, supports_of
from ppl_bandit.engines.exact import report
from ppl_bandit.engines.exact.proof.examination import examine
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Interaction, NotConjugate

__all__ = ["MAX_OUTER_DIMS", "MAX_OUTER_SITES", "find_split"]

MAX_OUTER_SITES = 3
MAX_OUTER_DIMS = 12
_FEW_DIMS = 4  # which particles hold well, whatever is left to integrate out
_MAX_TRIES = 6
_STEPS = 0.6 * np.arange(-3, 4)
_SQUARE = tuple(itertools.product((-1.0, 0.0, 1.0), repeat=2))
_SCREEN = 1e-6  # of how far a log density moves: screening must not reject what rounding explains


class _Screening(NamedTuple):
    """What screening found.

    Attributes:
        alone: sites that are not of a family's form, with the reason.
        conflicts: pairs of sites that no family couples so.
    """

    alone: dict[str, str]
    conflicts: list[tuple[str, str]]


def find_split(
    model: RewardModel,
    outer: Sequence[str] | None,
    examples: Interaction | None = None,
    is_selective: bool = False,
) -> Split:
    """Return a program's split, at `outer` or at the smallest set of sites that works; runs in float64.

    Args:
        examples: rows for which the rest has to be conjugate beside those that are tried here.
        is_selective: whether to look only for splits that integrate out at least as much as they leave, or leave little.

    Raises:
        NotConjugate: where there is none, with what was tried, and where none is needed.
        ValueError: if `outer` names what is no latent site, or every one.
    """
    supports = supports_of(model)
    if outer is not None:
        return inspect(model, _checked(model, outer), supports, examples)
    if len(model.latent_shapes) == 1:
        raise _refusal(model, {}, [], "it has one latent site, and nothing is left to integrate out given it")
    screening = _screen(model, supports, examples)
    if not screening.alone and not screening.conflicts:
        try:
            examine(model)
        except NotConjugate:
            pass
        else:
            raise report.refusal(
                model, "needs no split: it is conjugate as it is", "use engines.conjugate, or name outer sites"
            )
    tried: list[tuple[tuple[str, ...], str]] = []
    for names in _candidates(model, screening):
        num_outer, num_all = _size(model, names), _size(model, tuple(model.latent_shapes))
        if is_selective and num_outer > max(_FEW_DIMS, num_all - num_outer):
            tried.append(
                (names, f"{num_outer} of {num_all} dimensions are left, which draws of all of them hold better")
            )
            continue
        try:
            return inspect(model, names, supports, examples)
        except NotConjugate as refused:
            tried.append((names, str(refused)))
        if len(tried) == _MAX_TRIES:
            break
    raise _refusal(model, screening.alone, tried, "")


def _checked(model: RewardModel, outer: Sequence[str]) -> tuple[str, ...]:
    names = (outer,) if isinstance(outer, str) else tuple(outer)
    known = tuple(model.latent_shapes)
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) < len(names):
        raise ValueError(f"outer must name some of the latent sites {list(known)}, each once; got {list(names)}")
    if len(names) == len(known):
        raise ValueError(
            f"outer names every latent site, {list(known)}: leave one to integrate out, or use engines.reweight"
        )
    size = _size(model, names)
    if size > MAX_OUTER_DIMS:
        raise ValueError(f"outer sites have {size} dimensions, at most {MAX_OUTER_DIMS} can be held by particles alone")
    return tuple(name for name in known if name in names)


def _size(model: RewardModel, names: Sequence[str]) -> int:
    return sum(int(np.prod(model.latent_shapes[name], dtype=int)) for name in names)


def _candidates(model: RewardModel, screening: _Screening) -> Iterator[tuple[str, ...]]:
    """Yield sets of sites that screening does not rule out: the smallest first, those last that expected rewards read."""
    known = tuple(model.latent_shapes)
    read = dependence(model, known)["expected_reward"]
    for count in range(max(1, len(screening.alone)), min(MAX_OUTER_SITES, len(known) - 1) + 1):
        fitting = [
            names
            for names in itertools.combinations(known, count)
            if set(screening.alone) <= set(names)
            and all(a in names or b in names for a, b in screening.conflicts)
            and _size(model, names) <= MAX_OUTER_DIMS
        ]
        yield from sorted(fitting, key=lambda names: (len(read & set(names)), _size(model, names)))


def _refusal(
    model: RewardModel, alone: Mapping[str, str], tried: list[tuple[tuple[str, ...], str]], why: str
) -> NotConjugate:
    parts = [why] if why else []
    if alone:
        parts.append(
            "not of a conjugate form given all others: " + ", ".join(f"'{name}' ({why})" for name, why in alone.items())
        )
    parts += [f"given {', '.join(names)}: {reason}" for names, reason in tried]
    if not tried and not why:
        parts.append("no set of sites that size leaves the rest without such couplings")
    reason = (
        f"is not conjugate given any {MAX_OUTER_SITES} sites or fewer of at most {MAX_OUTER_DIMS} dimensions; tried: "
        + "; ".join(parts)
    )
    refused = report.refusal(model, reason, "engines.reweight needs no conjugacy")
    if refused.explanation is None:
        return refused
    return NotConjugate(str(refused), refused.explanation._replace(engine="collapsed"))


def _screen(model: RewardModel, supports: Mapping[str, Any], examples: Interaction | None) -> _Screening:
    kinds = {name: kind for name, support in supports.items() if (kind := _kind(support)) is not None}
    alone = {name: "its support belongs to no family" for name in supports if name not in kinds}
    rest = list(kinds)
    if not rest:
        return _Screening(alone, [])
    pairs = list(itertools.combinations(rest, 2))
    rng = np.random.default_rng(31)
    directions = {name: rng.standard_normal(model.latent_shapes[name]) for name in rest}

    def moved(latents: Mapping[str, Array], name: str, step: float) -> dict[str, Array]:
        value, kind = latents[name], kinds[name]
        if kind == "real":
            value = value + step * directions[name]
        elif kind == "positive":
            low = jnp.asarray(_bare(supports[name]).lower_bound)
            value = low + (value - low) * jnp.exp(step)
        elif kind == "unit":
            low, high = (jnp.asarray(getattr(_bare(supports[name]), f"{end}_bound")) for end in ("lower", "upper"))
            share = (value - low) / (high - low)
            value = low + (high - low) * jax.nn.sigmoid(jnp.log(share) - jnp.log1p(-share) + step)
        else:
            weights = jnp.exp(step * directions[name]) * value
            value = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return {**latents, name: value}

    def measure() -> tuple[Array, dict[str, Array]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 5)
        rows = trial_rows(model, latents, per_arm=2, seed=37, examples=examples)
        is_possible = jnp.asarray(rows.mask)

        def densities(values: Mapping[str, Array]) -> Array:
            likelihoods = model.log_likelihood(values, rows._replace(mask=None))
            return jnp.append(jnp.where(is_possible, likelihoods, 0.0), model.log_prior(values))

        # All points go through one evaluation of the program, compiled once.
        points = [moved(latents, name, step) for name in rest for step in _STEPS]
        points += [moved(moved(latents, a, s), b, t) for a, b in pairs for s, t in _SQUARE]
        found = jax.lax.map(densities, jax.tree.map(lambda *leaves: jnp.stack(leaves), *points))
        return found, latents

    found, latents = run_once(measure)
    num_lines = len(rest) * _STEPS.size
    lines = dict(zip(rest, found[:num_lines].reshape(len(rest), _STEPS.size, found.shape[1]), strict=True))
    squares = dict(zip(pairs, found[num_lines:].reshape(len(pairs), len(_SQUARE), found.shape[1]), strict=True))
    for name in rest:
        reason = _line_fault(kinds[name], lines[name], latents[name], supports[name])
        if reason:
            alone[name] = reason
    conflicts = [
        (a, b)
        for a, b in pairs
        if a not in alone and b not in alone and _is_conflict(kinds[a], kinds[b], squares[a, b])
    ]
    return _Screening(alone, conflicts)


def _bare(support: Any) -> Any:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _kind(support: Any) -> str | None:
    support = _bare(support)
    if isinstance(support, type(constraints.real)):
        return "real"
    if isinstance(support, type(constraints.simplex)):
        return "simplex"
    if isinstance(support, constraints.greater_than):
        return "positive"
    if isinstance(support, constraints.interval) and not isinstance(support, type(constraints.circular)):
        return "unit"
    return None


def _line_fault(kind: str, values: np.ndarray, start: np.ndarray, support: Any) -> str:
    """Say what is wrong with log densities along a line, (7, densities): the last one is the prior's."""
    values = values[:, np.all(np.isfinite(values), axis=0)]
    reach = np.ptp(values, axis=0)
    if kind == "real":
        return (
            ""
            if np.all(_misfit(_STEPS[:, None] ** np.arange(3), values) <= _SCREEN * reach + 1e-9)
            else "not quadratic"
        )
    if kind == "positive":
        bends = np.diff(values, 2, axis=0)
        largest = np.abs(bends).max(axis=0)
        is_bent = largest > 1e-7 * (1.0 + reach)
        if not np.any(is_bent):
            return "not Gamma in any power"
        first = bends[:, np.flatnonzero(is_bent)[-1]]
        ratio = first[-1] / first[-2] if abs(first[-1]) > abs(first[0]) else first[1] / first[0]
        gaps = np.abs(bends[1:] - ratio * bends[:-1]).max(axis=0)
        return "" if np.all(gaps <= 1e-5 * largest + 1e-7 * (1.0 + reach)) else "not Gamma in one power"
    if kind == "unit":
        low, high = np.asarray(_bare(support).lower_bound), np.asarray(_bare(support).upper_bound)
        share = np.broadcast_to((start - low) / (high - low), np.shape(start)).ravel()
        logits = np.log(share) - np.log1p(-share) + _STEPS[:, None]
        basis = np.concatenate(
            [-np.log1p(np.exp(-logits)), -np.log1p(np.exp(logits)), np.ones((_STEPS.size, 1))], axis=1
        )
        # With many elements the fit is never wrong: then only certificates decide.
        return "" if np.all(_misfit(basis, values) <= _SCREEN * reach + 1e-9) else "not Beta"
    return ""


def _misfit(basis: np.ndarray, values: np.ndarray) -> np.ndarray:
    fitted = basis @ np.linalg.lstsq(basis, values, rcond=1e-12)[0]
    return np.abs(values - fitted).max(axis=0)


def _is_conflict(kind: str, other: str, values: np.ndarray) -> bool:
    """Tell whether two sites interact as no family allows; values (9, densities) on a square of steps -1, 0, 1."""
    values = values[:, np.all(np.isfinite(values), axis=0)]
    reach = np.ptp(values, axis=0)
    square = values.reshape(3, 3, -1)
    if kind == other == "real":
        s, t = np.repeat([-1.0, 0.0, 1.0], 3), np.tile([-1.0, 0.0, 1.0], 3)
        basis = np.stack([np.ones(9), s, t, s * s, s * t, t * t], axis=1)
        return bool(np.any(_misfit(basis, values) > _SCREEN * reach + 1e-9))
    if {kind, other} == {"real", "positive"}:
        along = square if kind == "real" else square.swapaxes(0, 1)  # real first
        bend = along[0] - 2.0 * along[1] + along[2]  # (3 scales, densities)
        slope = along[2] - along[0]
        small = 1e-7 * (1.0 + reach)
        is_bent = np.abs(bend).max(axis=0) > small
        drift = np.abs(slope - slope[1]).max(axis=0)
        if np.any(~is_bent & (drift > small)):
            return True
        profiles = bend[:, is_bent] / bend[1, is_bent]
        return bool(profiles.shape[1] and np.any(np.ptp(profiles, axis=1) > 1e-5 * np.abs(profiles).max()))
    mixed = square[2, 2] - square[2, 0] - square[0, 2] + square[0, 0]
    return bool(np.any(np.abs(mixed) > _SCREEN * reach + 1e-9))
