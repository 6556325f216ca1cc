"""Checks of a fitted distribution, a Gaussian or a variational guide, by importance weights of its draws."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.particles.checks import Check
from ppl_bandit.engines.particles.diagnostics import (
    MAX_K_HAT,
    MAX_MEAN_SHIFT,
    MAX_SD_SHIFT,
    moment_shifts,
    pareto_k_hat,
)
from ppl_bandit.engines.particles.weights import weight_ess
from ppl_bandit.engines.row_buffer import ROOM_CHECK

__all__ = ["FIT_CHECKS", "FIT_CHECKS_TEXT", "NUM_CHECK_DRAWS", "FitMeasures", "measure_fit"]

NUM_CHECK_DRAWS = 1000
FIT_CHECKS = (
    Check("Pareto k-hat of the posterior relative to the fit", MAX_K_HAT),
    Check("the largest error of a mean, in posterior standard deviations,", MAX_MEAN_SHIFT),
    Check("the largest relative error of a standard deviation", MAX_SD_SHIFT),
    ROOM_CHECK,
)
FIT_CHECKS_TEXT = (
    f"Pareto k-hat of the posterior relative to the fit, at most {MAX_K_HAT}, the largest error of a mean, at most "
    f"{MAX_MEAN_SHIFT} standard deviations, and of a standard deviation, at most {MAX_SD_SHIFT:.0%}"
)


class FitMeasures(NamedTuple):
    """Measures of a fit.

    Attributes:
        k_hat: Pareto k-hat of the posterior density relative to the fitted one.
        mean_shift: largest error of a mean in posterior standard deviations, estimated by importance weights.
        sd_shift: largest relative error of a standard deviation, estimated likewise.
        ess: effective sample size of the weighted draws.
    """

    k_hat: Float[Array, ""]
    mean_shift: Float[Array, ""]
    sd_shift: Float[Array, ""]
    ess: Float[Array, ""]

    def check_values(self, has_room: Bool[Array, ""]) -> Float[Array, " checks"]:
        """Return the values of `FIT_CHECKS`."""
        return jnp.stack([self.k_hat, self.mean_shift, self.sd_shift, has_room.astype(self.k_hat.dtype)])


def measure_fit(positions: Float[Array, "M K"], log_weights: Float[Array, " M"]) -> FitMeasures:
    """Measure a fit by its draws and their log weights to the posterior."""
    return FitMeasures(pareto_k_hat(log_weights), *moment_shifts(positions, log_weights), weight_ess(log_weights))
