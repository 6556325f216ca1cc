"""The collapsed engine in words: what is integrated out, what is drawn and how, and with what evidence."""

from ppl_bandit.engines.collapsed.collapsed_posterior import MAX_ROUNDING
from ppl_bandit.engines.collapsed.inspection import Split
from ppl_bandit.engines.exact.report import family, nats_words
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT
from ppl_bandit.engines.particles.tempering import max_memory
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Explanation

__all__ = ["explain_collapsed"]

_ROWS = "the rows themselves: a refresh reads them again at every outer value that it tries"


def explain_collapsed(
    model: RewardModel, split: Split, words: str | None, num_particles: int, discount: float
) -> Explanation:
    """Explain an accepted program.

    Args:
        words: what is kept of the data; None for the rows.
    """
    name = getattr(model.program, "__name__", "the program")
    outer, inner = ", ".join(split.space.names), ", ".join(site.name for site in split.layout.sites)
    evidence = split.evidence
    sites = {site.name: f"{family(split.layout, site)}, given {outer}" for site in split.layout.sites}
    sites |= {site: f"{num_particles} weighted particles" for site in split.space.names}
    sites = {site: sites[site] for site in model.latent_shapes}
    flat = "a step and a refresh cost the same after any number of rows"
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
        f"    largest residual {nats_words(evidence)}; every new datum is certified likewise before it is absorbed",
        f"  approximated: {outer} ({split.space.size} dimension{'s' * (split.space.size > 1)}), by particles that follow the "
        "posterior with the rest integrated out",
        f"  evidence: effective sample size of the weights, at least {num_particles // 2}; Pareto k-hat, at most {MAX_K_HAT}; "
        f"after a refresh,",
        f"    correlation of the particles with where they started, at most {max_memory(num_particles):.2f}; rounding of log",
        f"    densities, at most {MAX_ROUNDING} nats",
        f"  kept of the data: {_ROWS if words is None else f'{words}; {flat}'}",
    ]
    if discount < 1.0:
        lines.append(f"  forgetting: each row's log likelihood counts {discount:g} times what the next row's does")
    reason = f"exact given {outer}: {inner} integrated out, {outer} held by {num_particles} particles"
    return Explanation("collapsed", False, reason, sites, "\n".join(lines))
