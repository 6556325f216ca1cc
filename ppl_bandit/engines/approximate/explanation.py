"""The explanation of an approximate engine: what its draws are, what is approximated, which checks an update returns."""

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Explanation

__all__ = ["explain_approximate"]


def explain_approximate(
    model: RewardModel, engine: str, reason: str, posterior: str, discount: float, lines: list[str]
) -> Explanation:
    """Return the explanation of an approximate engine.

    Args:
        reason: one sentence: what the draws are.
        posterior: the representation of the posterior of each site.
        lines: what is approximated, and which checks every update returns.
    """
    name = getattr(model.program, "__name__", "the program")
    sites = {site: f"{posterior}{f', shape {shape}' if shape else ''}" for site, shape in model.latent_shapes.items()}
    text = [f"{name}: APPROXIMATE ({engine}). {reason[0].upper()}{reason[1:]}.", ""]
    text += [f"  {site}: {representation}" for site, representation in sites.items()]
    text += ["", f"  expected reward: {model.expected_reward_method}", *(f"  {line}" for line in lines)]
    if discount < 1.0:
        text.append(f"  discount: the log likelihood of each row has {discount:g} times the weight of the next row's")
    return Explanation(engine, False, reason, sites, "\n".join(text))
