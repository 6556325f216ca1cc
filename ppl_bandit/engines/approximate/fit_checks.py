"""Checks of a fitted distribution, a Gaussian or a variational guide, by importance weights of its draws."""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.checks import Info, checks_text, make_info
from ppl_bandit.engines.particles.diagnostics import (
    moment_shifts,
    pareto_k_hat,
)
from ppl_bandit.engines.particles.weights import weight_ess

NUM_CHECK_DRAWS = (
    1000  # their Monte Carlo errors, 0.03 of a mean and 2% of a standard deviation, are a fifth of the bounds
)
FIT_CHECKS_TEXT = checks_text(("k_hat", "mean_shift", "sd_shift"))


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

    def as_info(self, has_room: Bool[Array, ""], **checks: Any) -> Info:
        """Return the measures of an update.

        Args:
            checks: further checks, by name.
        """
        own = {"k_hat": self.k_hat, "mean_shift": self.mean_shift, "sd_shift": self.sd_shift, "capacity": has_room}
        return make_info({**own, **checks}, permanent=["capacity"], is_full=~has_room, ess=self.ess)


def measure_fit(positions: Float[Array, "M K"], log_weights: Float[Array, " M"]) -> FitMeasures:
    """Measure a fit by its draws and their log weights to the posterior."""
    return FitMeasures(pareto_k_hat(log_weights), *moment_shifts(positions, log_weights), weight_ess(log_weights))
