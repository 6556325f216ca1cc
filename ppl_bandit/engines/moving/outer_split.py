"""Find the static latents given which a program is linear Gaussian, and prove it for every value that they can take.

The proof is that of the collapsed engine, on the program of two steps in a row: given the outer latents, the latents of
both steps and the likelihood are Gaussian.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from ppl_bandit.engines.checks import checks_text
from ppl_bandit.engines.collapsed.inspection import inspect
from ppl_bandit.engines.collapsed.outer import OuterSpace, given, outer_space
from ppl_bandit.engines.exact.certificate.certificate import Evidence
from ppl_bandit.engines.exact.explanation import explain, residual_text
from ppl_bandit.engines.exact.families.layout import REAL, Layout
from ppl_bandit.engines.exact.proof.assignment import kind_of_support, read_supports, split_gaussian_blocks, supports_of
from ppl_bandit.engines.exact.refusals import refusal
from ppl_bandit.engines.moving.linear_step import PREFIX, time_text, two_steps
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Explanation, NotConjugate

_MAX_OUTER_DIMS = 6  # of particles that moves replay
_MAX_TRIES = 4


class FilterSplit(NamedTuple):
    """A program divided into outer latents, which are static, and others, which are Gaussian given them.

    Attributes:
        space: the unconstrained space of the outer latents.
        layout: the Gaussian blocks of the others.
        centre: the point about which likelihoods are expanded.
        evidence: that the program of two steps is Gaussian given the outer latents.
        values: of the outer latents, at which the program was examined.
    """

    space: OuterSpace
    layout: Layout
    centre: Float[np.ndarray, " D"]
    evidence: Evidence
    values: dict[str, Any]


def split_program(model: RewardModel, outer: tuple[str, ...] | None) -> FilterSplit:
    """Return the split of a program at `outer`, or at the smallest set of static latents that works; runs in float64.

    Raises:
        NotConjugate: if there is none.
        ValueError: if `outer` does not name static latents.
    """
    static = [name for name in model.latent_shapes if name not in model.moving_sites]
    if outer is not None and (not outer or not set(outer) <= set(static)):
        raise ValueError(f"outer must name some of the static latents {static}, got {list(outer)}")
    if not static:
        raise _refused(model, "all latents move, so there is no static latent for particles", [])
    supports = supports_of(model)
    kinds = {name: None if support is None else kind_of_support(support) for name, support in supports.items()}
    bent = [name for name in model.moving_sites if kinds[name] != REAL]
    if bent:
        raise _refused(model, f"'{bent[0]}' moves and is not real", [])
    joint = two_steps(model)
    joint_supports, tried = supports_of(joint), list[str]()
    for names in [tuple(outer)] if outer is not None else itertools.islice(_candidates(model, kinds), _MAX_TRIES):
        try:
            split = inspect(joint, tuple(f"{PREFIX}/{name}" for name in names), joint_supports)
        except NotConjugate as refused:
            tried.append(f"given {', '.join(names)}: {refused}")
            continue
        if any(site.kind != REAL for site in split.layout.sites):
            tried.append(f"given {', '.join(names)}: other latents are not Gaussian")
            continue
        values = {name: split.values[f"{PREFIX}/{name}"][0] for name in names}
        view = given(model, values)
        layout = split_gaussian_blocks(view, read_supports(view))
        space = outer_space(model, names, supports)
        return FilterSplit(space, layout, np.zeros(layout.count(REAL)), split.evidence, values)
    raise _refused(model, "no few static latents leave the rest linear Gaussian", tried)


def _candidates(model: RewardModel, kinds: dict[str, str | None]) -> Iterator[tuple[str, ...]]:
    """Yield sets of static latents: those that are not real, then with one, two, ... real ones."""
    static = [name for name in model.latent_shapes if name not in model.moving_sites]
    always = [name for name in static if kinds[name] != REAL]
    real = [name for name in static if kinds[name] == REAL]
    for count in range(len(real) + 1):
        for more in itertools.combinations(real, count):
            names = tuple(name for name in static if name in (*always, *more))
            size = sum(int(np.prod(model.latent_shapes[name], dtype=int)) for name in names)
            if names and size <= _MAX_OUTER_DIMS:
                yield names


def _refused(model: RewardModel, reason: str, tried: list[str]) -> NotConjugate:
    details = "; ".join(tried)
    return refusal(
        model, f"has no Kalman filters over particles: {reason}", "engines.particle_filter needs no proof", details
    )


def explain_split(model: RewardModel, split: FilterSplit, num_own: int, window: int) -> Explanation:
    """Explain a program that is linear Gaussian given its outer latents."""
    outer, inner = ", ".join(split.space.names), ", ".join(site.name for site in split.layout.sites)
    sites = {site.name: f"Gaussian, given {outer}" for site in split.layout.sites}
    sites |= {name: f"{2 * num_own} weighted particles" for name in split.space.names}
    facts = {
        "time": time_text(model),
        "proved": f"for every value of {outer}, the step and the likelihood are real-analytic in {inner}",
        "certified": f"two steps in a row and the likelihood are Gaussian at random values of {outer};\n"
        f"    largest residual {residual_text(split.evidence)}; every new datum is certified at two particles",
        "approximated": f"{outer}, by 2 independent sets of {num_own} particles; Markov steps after a resampling replay the "
        f"last rows\n    (at most {window}) from the filters at the start of the window",
        "checks": checks_text(("ess", "k_hat", "law_disagreement")),
    }
    reason = f"exact given {outer}: {inner} by Kalman filters, {outer} represented by {2 * num_own} particles"
    verdict = f"EXACT GIVEN {outer}: {inner} by a Kalman filter at each particle."
    ordered = {name: sites[name] for name in model.latent_shapes}
    return explain(model, "collapsed_kalman", verdict, reason, ordered, facts)
