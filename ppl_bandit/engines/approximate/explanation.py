"""What an engine that is not exact says about itself, in honest words."""

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Explanation

__all__ = ["explain"]


def explain(
    model: RewardModel, engine: str, reason: str, posterior: str, discount: float, lines: list[str]
) -> Explanation:
    """Return the account of an approximate engine.

    Args:
        reason: one sentence: what the draws are.
        posterior: what the posterior of each site is represented by.
        lines: what is approximated, and what evidence every update returns.
    """
    name = getattr(model.program, "__name__", "the program")
    sites = {site: f"{posterior}{f', shape {shape}' if shape else ''}" for site, shape in model.latent_shapes.items()}
    text = [f"{name}: APPROXIMATE ({engine}). {reason[0].upper()}{reason[1:]}.", ""]
    text += [f"  {site}: {words}" for site, words in sites.items()]
    text += ["", f"  expected reward: {model.expected_reward_method}", *(f"  {line}" for line in lines)]
    if discount < 1.0:
        text.append(f"  forgetting: each row's log likelihood counts {discount:g} times what the next row's does")
    return Explanation(engine, False, reason, sites, "\n".join(text))
