"""What to write instead of a program that is not conjugate. The tests build a program from every remedy."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.numpyro_adapter import distribution_name

__all__ = ["ANALYTIC_REMEDY", "CONJUGATE", "KEEP", "outcome_remedy"]

KEEP = "keep the program: Bandit and engines.choose draw by an engine that needs no conjugacy"

ANALYTIC_REMEDY = (
    "let latents reach the outcome through arithmetic and smooth functions alone; branches, indices, clips and rounding may "
    f"depend on arm and context; or {KEEP}"
)

_GAUSSIAN = (
    "Normal priors on latents in which {} is linear, its standard deviation known, or its variance under an InverseGamma prior "
    "and the Normal priors scaled by it"
)
CONJUGATE: Mapping[str, str] = {  # outcome -> the prior that it is conjugate to
    "Bernoulli": "a Beta prior on its probability itself",
    "Binomial": "a Beta prior on its probability itself",
    "Geometric": "a Beta prior on its probability itself",
    "Categorical": "a Dirichlet prior on its probabilities themselves",
    "Poisson": "a Gamma prior on its rate, or on the rate per unit of a known exposure",
    "Exponential": "a Gamma prior on its rate, or an InverseGamma prior on its mean",
    "Gamma": "a Gamma prior on its rate, its concentration known",
    "Normal": _GAUSSIAN.format("its mean"),
    "LogNormal": _GAUSSIAN.format("the mean of its logarithm"),
}


def outcome_remedy(model: RewardModel) -> str:
    """Return which priors are conjugate to the outcomes of a program, and that other engines accept it as it is."""
    known, unknown = [], []
    for name in dict.fromkeys(_outcome_names(model)):
        article = "an" if name[0] in "AEIOU" else "a"
        if name in CONJUGATE:
            known.append(f"{article} {name} outcome is conjugate to {CONJUGATE[name]}")
        else:
            unknown.append(f"no prior is known that is conjugate to {article} {name} outcome")
    return "; ".join([*known, *unknown, f"or {KEEP}" if not unknown else KEEP])


def _outcome_names(model: RewardModel) -> list[str]:
    names: list[str] = []

    def trace_program() -> None:
        trace = model.trace({}, jnp.zeros(1, int), model.context_rows(1))
        names.extend(distribution_name(trace[name]["fn"]) for name in model.outcomes)

    jax.eval_shape(trace_program)
    return names
