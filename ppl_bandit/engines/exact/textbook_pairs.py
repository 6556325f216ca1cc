"""Whether a program looks like a pair of the textbooks: it decides what is done first, and proves nothing."""

from typing import Any

import numpyro.distributions as dist

from ppl_bandit.engines.exact.families.families import Layout
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.sites import traced

__all__ = ["is_textbook"]

# Kinds of latents, and the distributions of outcomes that have conjugate priors of these kinds alone.
_PAIRS: tuple[tuple[set[str], tuple[type, ...]], ...] = (
    ({"unit"}, (dist.BernoulliProbs, dist.BinomialProbs, dist.GeometricProbs, dist.NegativeBinomialProbs)),
    ({"positive"}, (dist.Poisson, dist.Exponential, dist.Gamma, dist.InverseGamma)),
    ({"real", "positive"}, (dist.Normal, dist.LogNormal, dist.MultivariateNormal)),
    ({"simplex"}, (dist.CategoricalProbs, dist.MultinomialProbs)),
)
_PRIORS = dist.Beta, dist.Uniform, dist.Gamma, dist.InverseGamma, dist.Normal, dist.MultivariateNormal, dist.Dirichlet


def is_textbook(model: RewardModel, layout: Layout) -> bool:
    """Tell whether outcomes and priors have the distributions of a conjugate pair, whatever their parameters are."""
    kinds = {site.kind for site in layout.sites}
    sites = traced(model.program, model.context, 2)
    outcomes, priors = (
        {type(_base(sites[name]["fn"])) for name in names} for names in (model.outcomes, model.latent_shapes)
    )
    return priors <= set(_PRIORS) and any(kinds <= own and outcomes <= set(partners) for own, partners in _PAIRS)


def _base(fn: Any) -> Any:
    while type(fn) in (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution):
        fn = fn.base_dist
    return fn
