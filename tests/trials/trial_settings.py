"""Programs, designs and rules that the tests and the benchmark of trials share."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Design, RewardModel, selectors, stopping


def rates(num_arms):
    def model(arm):
        with numpyro.plate("arms", num_arms):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    return RewardModel(model, num_arms)


def normal_arms(num_arms):
    def model(arm):
        with numpyro.plate("arms", num_arms):
            mean = numpyro.sample("mean", dist.Normal(0.0, 1000.0))
        numpyro.sample("reward", dist.Normal(mean[arm], 1.0))

    return RewardModel(model, num_arms)


def similar_arms(num_arms):
    def model(arm):
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("arms", num_arms):
            mean = numpyro.sample("mean", dist.Normal(0.0, spread))
        numpyro.sample("reward", dist.Normal(mean[arm], 1.0))

    return RewardModel(model, num_arms)


def adaptr_design(threshold=0.9814318):
    """The design of the README of adaptr (R): outcomes of the last 100 decisions are not known at a look, all at the last."""
    rules = (
        stopping.superiority(threshold),
        stopping.inferiority(1.0 - threshold),
        stopping.equivalence(0.9, delta=0.05),
    )
    return Design(
        range(400, 2001, 100),
        lag=100,
        max_rows=2000,
        selector=selectors.with_limits(selectors.softened(selectors.thompson(), 0.5), floors=0.15),
        allocation="looks",
        stopping=rules,
    )


def widest(look):
    """The width of the widest 95% interval."""
    return jnp.max(jnp.where(look.active, look.posterior.quantile(0.975) - look.posterior.quantile(0.025), 0.0))


# The rules of one design that is judged in worlds from the prior. A claim of any of them holds as often as the posterior says
# where several may end a trial: each trial ends at a stopping time.
LOSS_BOUND = 0.004
PRIOR_RULES = {
    "without a control": (
        stopping.superiority(0.99),
        stopping.equivalence(0.9, delta=0.1),
        stopping.expected_loss(LOSS_BOUND),
        stopping.rule(widest, "precision", at_most=0.2),
    ),
    "with a control": (
        stopping.superiority(0.95),
        stopping.equivalence(0.9, delta=0.1),
        stopping.futility(0.9, delta=0.05),
    ),
}


QUICK_RULES = {"two rules": (stopping.superiority(0.99), stopping.expected_loss(LOSS_BOUND))}  # for the default tests


def prior_design(name, looks=range(50, 501, 50)):
    rules = (PRIOR_RULES | QUICK_RULES)[name]
    return Design(looks, stopping=rules, control="old" if name == "with a control" else None)
