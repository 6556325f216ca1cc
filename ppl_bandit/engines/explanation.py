"""The explanations of all engines, in one order: conclusion, what is exact and given what, what that rests on."""

from collections.abc import Mapping, Sequence

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Explanation

_ORDER = (
    "expected reward",
    "time",
    "proved",
    "certified",
    "approximated",
    "checks",
    "not seen",
    "stored of the data",
    "discount",
)


def explain(
    model: RewardModel,
    engine: str,
    verdict: str,
    reason: str,
    sites: Mapping[str, str],
    facts: Mapping[str, str],
    *,
    is_exact: bool = False,
    site_lines: Sequence[str] | None = None,
    discount: float = 1.0,
) -> Explanation:
    """Return the explanation of an engine.

    Args:
        verdict: the conclusion, which follows the name of the program.
        reason: one sentence: why this engine.
        sites: the representation of the posterior of each site.
        facts: what the conclusion rests on, by the names in `_ORDER`.
        site_lines: lines about the sites in place of `sites`.
        discount: weight of a row's log likelihood relative to the next row's.
    """
    known = {"expected reward": model.expected_reward_method, **facts}
    if discount < 1.0:
        exact = "; the posterior is exact for the likelihood so weighted" if is_exact else ""
        known["discount"] = f"the log likelihood of each row has {discount:g} times the weight of the next row's{exact}"
    lines = [f"{program_name(model)}: {verdict}", ""]
    lines += [f"  {site}: {text}" for site, text in sites.items()] if site_lines is None else site_lines
    lines += ["", *(f"  {name}: {known[name]}" for name in _ORDER if name in known)]
    return Explanation(engine, is_exact, reason, sites, "\n".join(lines))


def explain_approximate(
    model: RewardModel, engine: str, reason: str, posterior: str, discount: float, facts: Mapping[str, str]
) -> Explanation:
    """Return the explanation of an engine that approximates the whole posterior.

    Args:
        reason: one sentence: what the draws are.
        posterior: the representation of the posterior of each site.
    """
    sites = {site: f"{posterior}{f', shape {shape}' if shape else ''}" for site, shape in model.latent_shapes.items()}
    verdict = f"APPROXIMATE ({engine}). {reason[0].upper()}{reason[1:]}."
    return explain(model, engine, verdict, reason, sites, facts, discount=discount)


def program_name(model: RewardModel) -> str:
    """Return the name of a model's program."""
    return getattr(model.program, "__name__", "the program")
