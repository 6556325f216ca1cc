"""Counts by arm: orders a day, calls an hour, defects a piece.

Use it for a table of whole numbers that vary about as much as Poisson counts do. The posterior is exact: a Gamma for the mean
of each arm, whose prior is worth one row at the mean of the table.
"""

import numpyro
import numpyro.distributions as dist

num_arms = 2
centre = 1.0  # mean of the table


def model(arm):
    with numpyro.plate("arms", num_arms):
        mean = numpyro.sample("mean", dist.Gamma(1.0, 1.0 / centre))
    numpyro.sample("reward", dist.Poisson(mean[arm]))
