"""The explanation of the collapsed engine: what is integrated out, what is drawn, and which checks an update returns."""

from ppl_bandit.engines.collapsed.collapsed_posterior import MAX_ROUNDING
from ppl_bandit.engines.collapsed.inspection import Split
from ppl_bandit.engines.exact.explanation import family_name, residual_text
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT
from ppl_bandit.engines.particles.tempering import max_autocorrelation
from ppl_bandit.engines.particles.weighted_particles import MAX_UNSEEN_MASS
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Explanation

__all__ = ["explain_collapsed"]

_ROWS = "the rows; a refresh reads them again at every outer value that it evaluates"


def explain_collapsed(
    model: RewardModel, split: Split, description: str | None, num_particles: int, discount: float
) -> Explanation:
    """Explain a program that is exact given its outer sites.

    Args:
        description: what is stored of the data; None for the rows.
    """
    name = getattr(model.program, "__name__", "the program")
    outer, inner = ", ".join(split.space.names), ", ".join(site.name for site in split.layout.sites)
    evidence = split.evidence
    sites = {site.name: f"{family_name(split.layout, site)}, given {outer}" for site in split.layout.sites}
    sites |= {site: f"{num_particles} weighted particles" for site in split.space.names}
    sites = {site: sites[site] for site in model.latent_shapes}
    constant_cost = "a step and a refresh cost the same after any number of rows"
    verb, reach = ("is", "reaches") if len(split.layout.sites) == 1 else ("are", "reach")
    lines = [
        f"{name}: EXACT GIVEN {outer}: {inner} {verb} integrated out in closed form.",
        "",
        *(f"  {site}: {family}" for site, family in sites.items()),
        "",
        f"  expected reward: {model.expected_reward_method}",
        f"  proved: for every value of {outer}, all that {inner} {reach} is real-analytic, none of it a branch, an index, a",
        "    comparison or a rounding of a latent",
        f"  certified: prior and likelihood are affine in the sufficient statistics of {inner} at random values of {outer};",
        f"    largest residual {residual_text(evidence)}; every new datum is certified likewise before it is absorbed",
        f"  approximated: {outer} ({split.space.size} dimension{'s' * (split.space.size > 1)}), by particles of the marginal "
        "posterior",
        f"  checks: effective sample size of the weights, at least {num_particles // 2}; Pareto k-hat, at most {MAX_K_HAT}; "
        f"after a refresh,",
        f"    autocorrelation with the starting positions, at most {max_autocorrelation(num_particles):.2f}; rounding of log",
        f"    densities, at most {MAX_ROUNDING} nats",
        f"  not seen: a region of {outer} that no particle reached, and modes that together hold less than "
        f"{MAX_UNSEEN_MASS:.0%} of the mass",
        f"  stored of the data: {_ROWS if description is None else f'{description}; {constant_cost}'}",
    ]
    if discount < 1.0:
        lines.append(f"  discount: the log likelihood of each row has {discount:g} times the weight of the next row's")
    reason = f"exact given {outer}: {inner} integrated out, {outer} represented by {num_particles} particles"
    return Explanation("collapsed", False, reason, sites, "\n".join(lines))
