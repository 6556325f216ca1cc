"""Positive amounts by arm, with a common relative spread: durations, order values, latencies.

Use it for a table of positive numbers whose spread grows with their mean. The posterior is exact given the shape: the mean of
each arm is integrated out as an InverseGamma, and particles represent the shape. Larger is better; if smaller is, add
`numpyro.deterministic("expected_reward", -mean[arm])`.
"""

import numpyro
import numpyro.distributions as dist

num_arms = 2
centre = 1.0  # mean of the table


def model(arm):
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("arms", num_arms):
        mean = numpyro.sample("mean", dist.InverseGamma(2.0, centre))
    numpyro.sample("reward", dist.Gamma(shape, shape / mean[arm]))
