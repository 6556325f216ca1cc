"""Find the split: the smallest set of outer sites that leaves the rest conjugate.

A numerical screening comes first. It evaluates log densities along lines through latent space, with one compiled function for
all of them. Given everything else, an inner site must have a log density of its family's form (else it is outer), and two inner
sites must not interact in a way that no family has (else one of them is outer). Of the few candidates left, the first that is
proved and certified is the split. Screening saves time and proves nothing.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpyro.distributions import biject_to

from ppl_bandit.engines.inner.layout import POSITIVE, REAL, misfit
from ppl_bandit.engines.inner.registry import FAMILIES
from ppl_bandit.engines.proof.assignment import kind_of_support, supports_of
from ppl_bandit.engines.proof.examination import examine, prove
from ppl_bandit.engines.proof.inspection import Split, inspect, masked_trial_rows
from ppl_bandit.engines.proof.outer import dependence
from ppl_bandit.engines.refusals import KEEP, refusal
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Interaction, NotConjugate

MAX_OUTER_SITES = 3  # in a set that is tried; the sets of n sites grow as the cube of n
# Of outer sites. In a horseshoe regression with 14, an evaluation of the marginal density takes 5 ms for 1,000 particles, and
# most stages end within 100; with 32 it takes 28 ms, and 240 did not suffice.
MAX_OUTER_DIMS = 16
_FEW_DIMS = 4  # outer dimensions that particles represent well, however few are integrated out
_MAX_RATIO = 1.25  # of outer to inner dimensions otherwise: a horseshoe has a scale for every weight and two for all
_MAX_TRIES = 6  # sets that are inspected, at some seconds each
_STEPS = 0.6 * np.arange(-3, 4)
_SQUARE = tuple(itertools.product((-1.0, 0.0, 1.0), repeat=2))


class _Screening(NamedTuple):
    """The result of screening.

    Attributes:
        alone: sites whose log density is not of a family's form, with the reason.
        conflicts: pairs of sites that interact in a way that no family has.
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
        examples: rows for which the rest has to be conjugate beside the trial rows.
        is_selective: whether to accept only splits with few outer dimensions, or with hardly more outer than inner ones.

    Raises:
        NotConjugate: if there is none, with what was tried, or if none is needed.
        ValueError: if `outer` names a site that is not latent, or every one.
    """
    supports = supports_of(model)
    if outer is not None:
        return inspect(model, _check_outer(model, outer), supports, examples)
    if len(model.latent_shapes) == 1:
        raise _split_refusal(model, {}, [], "it has one latent site, and nothing is left to integrate out given it")
    screening = _screen(model, supports, examples)
    if not screening.alone and not screening.conflicts:
        try:
            examine(model, prove(model))
        except NotConjugate:
            pass
        else:
            raise refusal(
                model, "needs no split: it is conjugate as it is", "use engines.conjugate, or name outer sites"
            )
    tried: list[tuple[tuple[str, ...], str]] = []
    for names in _candidates(model, screening):
        num_outer, num_all = _size(model, names), _size(model, tuple(model.latent_shapes))
        if is_selective and num_outer > max(_FEW_DIMS, _MAX_RATIO * (num_all - num_outer)):
            tried.append(
                (
                    names,
                    f"{num_outer} of {num_all} dimensions would be outer; particles of all latents represent these better",
                )
            )
            continue
        try:
            return inspect(model, names, supports, examples)
        except NotConjugate as refused:
            tried.append((names, str(refused)))
        if len(tried) == _MAX_TRIES:
            break
    raise _split_refusal(model, screening.alone, tried, "")


def _check_outer(model: RewardModel, outer: Sequence[str]) -> tuple[str, ...]:
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
        raise ValueError(f"outer sites have {size} dimensions, at most {MAX_OUTER_DIMS} are supported")
    return tuple(name for name in known if name in names)


def _size(model: RewardModel, names: Sequence[str]) -> int:
    return sum(int(np.prod(model.latent_shapes[name], dtype=int)) for name in names)


def _candidates(model: RewardModel, screening: _Screening) -> Iterator[tuple[str, ...]]:
    """Yield sets of sites that screening allows: small ones first, then those on which expected rewards depend least."""
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


def _split_refusal(
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
    reason = f"is approximate: no closed form was found, even with up to {MAX_OUTER_SITES} sites sampled"
    details = f"sets of at most {MAX_OUTER_DIMS} dimensions were tried: " + "; ".join(parts)
    refused = refusal(model, reason, KEEP, details)
    if refused.explanation is None:
        return refused
    return NotConjugate(str(refused), refused.explanation._replace(engine="collapsed"))


def _screen(model: RewardModel, supports: Mapping[str, Any], examples: Interaction | None) -> _Screening:
    kinds = {name: kind for name, support in supports.items() if (kind := _kind(support)) is not None}
    alone = {name: "its support belongs to no family" for name in supports if name not in kinds}
    if not kinds:
        return _Screening(alone, [])
    pairs = list(itertools.combinations(kinds, 2))
    rng = np.random.default_rng(31)

    def direction(name: str, shape: tuple[int, ...]) -> np.ndarray:
        is_scalar = kinds[name] != REAL and FAMILIES[kinds[name]].num_event_dims == 0
        return np.ones(shape) if is_scalar else rng.standard_normal(shape)

    shapes = {name: biject_to(supports[name]).inverse_shape(model.latent_shapes[name]) for name in kinds}
    directions = {name: direction(name, shape) for name, shape in shapes.items()}

    def moved(latents: Mapping[str, Array], name: str, step: float) -> dict[str, Array]:
        """Return latents with one site moved along a line in its unconstrained space."""
        transform = biject_to(supports[name])
        return {**latents, name: transform(transform.inv(latents[name]) + step * directions[name])}

    def measure() -> tuple[Array, dict[str, Array]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 5)
        rows = masked_trial_rows(model, latents, per_arm=2, seed=37, examples=examples)
        is_possible = jnp.asarray(rows.mask)

        def log_densities(values: Mapping[str, Array]) -> Array:
            likelihoods = model.log_likelihood(values, rows._replace(mask=None))
            return jnp.append(jnp.where(is_possible, likelihoods, 0.0), model.log_prior(values))

        # All points go through one evaluation of the program, compiled once.
        points = [moved(latents, name, step) for name in kinds for step in _STEPS]
        points += [moved(moved(latents, a, s), b, t) for a, b in pairs for s, t in _SQUARE]
        found = jax.lax.map(log_densities, jax.tree.map(lambda *leaves: jnp.stack(leaves), *points))
        positions = {name: jnp.ravel(biject_to(supports[name]).inv(latents[name])) for name in kinds}
        return found, positions

    found, positions = run_once(measure)
    num_lines = len(kinds) * _STEPS.size
    lines = dict(zip(kinds, found[:num_lines].reshape(len(kinds), _STEPS.size, found.shape[1]), strict=True))
    squares = dict(zip(pairs, found[num_lines:].reshape(len(pairs), len(_SQUARE), found.shape[1]), strict=True))
    for name, kind in kinds.items():
        values = lines[name][:, np.all(np.isfinite(lines[name]), axis=0)]
        if kind == REAL:
            reason = "not quadratic" if misfit(_STEPS[:, None] ** np.arange(3), values) else ""
        else:
            line = positions[name] + _STEPS[:, None] * directions[name].ravel()
            reason = FAMILIES[kind].screen(values, line)
        if reason:
            alone[name] = reason
    rest = [pair for pair in pairs if not set(pair) & set(alone)]
    return _Screening(alone, [(a, b) for a, b in rest if _is_conflict(kinds[a], kinds[b], squares[a, b])])


def _kind(support: Any) -> str | None:
    return None if support is None else kind_of_support(support)


def _is_conflict(kind: str, other: str, values: np.ndarray) -> bool:
    """Return whether two sites interact as no family allows.

    Args:
        values: log densities on a square of steps -1, 0, 1 of both sites, (9, densities).
    """
    values = values[:, np.all(np.isfinite(values), axis=0)]
    s, t = np.array(_SQUARE).T
    if kind == other == REAL:
        return misfit(np.stack([np.ones(9), s, t, s * s, s * t, t * t], axis=1), values)
    if {kind, other} == {REAL, POSITIVE}:
        square = values.reshape(3, 3, -1)
        along = square if kind == REAL else square.swapaxes(0, 1)  # real first
        bend = along[0] - 2.0 * along[1] + along[2]  # (3 scales, densities)
        slope = along[2] - along[0]
        small = 1e-7 * (1.0 + np.ptp(values, axis=0))
        is_bent = np.abs(bend).max(axis=0) > small
        drift = np.abs(slope - slope[1]).max(axis=0)
        if np.any(~is_bent & (drift > small)):
            return True
        profiles = bend[:, is_bent] / bend[1, is_bent]
        return bool(profiles.shape[1] and np.any(np.ptp(profiles, axis=1) > 1e-5 * np.abs(profiles).max()))
    # The others must not interact: a sum of a function of each.
    return misfit(np.stack([np.ones(9), s, t, s * s, t * t], axis=1), values)
