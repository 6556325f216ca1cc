"""Programs, designs and rules that the tests and the benchmark of trials share."""

import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Design, Environment, RewardModel, selectors, stopping
from ppl_bandit.trials.looks import ENDINGS
from ppl_bandit.trials.simulated.simulator import TrialSimulator


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


# The rules of one design that is judged in worlds from the prior. A claim of any of them holds as often as the posterior says
# where several may end a trial: each trial ends at a stopping time.
LOSS_BOUND = 0.004
PRIOR_RULES = {
    "without a control": (
        stopping.superiority(0.99),
        stopping.equivalence(0.9, delta=0.1),
        stopping.value_remaining(0.1),
        stopping.expected_loss(LOSS_BOUND),
        stopping.precision(0.2),
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


# Designs whose only rule is predicted success at the last look.
PREDICTION_DESIGNS = {
    "complete": Design([50, 100, 150], stopping=stopping.predictive_success(0.5, 150, success=0.95)),
    # At the first look 15 outcomes are known and 45 are late; 10 more decisions follow.
    "late": Design([60], lag=45, max_rows=70, stopping=stopping.predictive_success(0.5, 70, success=0.95)),
    # A tenth of the outcomes never arrives.
    "delays": Design(
        [50, 100],
        lag=(0.5, 0.1, 0.1, 0.2),
        max_rows=150,
        stopping=stopping.predictive_success(0.5, 150, success=0.95),
    ),
}


def predicted_and_found(model, design, num_trials, num_futures):
    """Return the predictions at which trials in worlds from the prior stopped, and whether each would have succeeded.

    The same trials are run again to the last look without the rule: a trial uses the same random numbers in both runs, until
    it stops.
    """
    simulator, world = TrialSimulator(model, design, num_futures=num_futures), Environment.from_prior(model)
    stopped = simulator.run(world, num_trials, 0)
    ended = simulator.run(world, num_trials, 0, thresholds=np.full((1, design.num_looks), np.inf))
    is_early = np.asarray(design.look_rows)[stopped.look] < design.last_rows
    chosen = is_early & (stopped.ending == ENDINGS.index("predictive_success"))
    is_success = ended.best_arm_probs.max(axis=1) >= design.rules[0].settings["success"]
    return stopped.evidence[chosen, 0], is_success[chosen].astype(float)
