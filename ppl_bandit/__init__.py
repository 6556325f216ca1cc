"""Write the reward model; get the bandit.

A reward model is a NumPyro program. The library draws from the posterior of its parameters - exactly where the program is
proved conjugate - and plays arms by double sampling or by another selector.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppl_bandit import engines, selectors
    from ppl_bandit.comparison import compare
    from ppl_bandit.deciders.decider import Decider
    from ppl_bandit.deciders.sealer import Sealer
    from ppl_bandit.evaluation.evaluate import evaluate, evaluate_arms
    from ppl_bandit.evaluation.evaluation import Evaluation
    from ppl_bandit.evaluation.rejection import evaluate_by_rejection
    from ppl_bandit.journal.journal import Journal
    from ppl_bandit.journal.stores.store import JournalError, JournalTimeout
    from ppl_bandit.live.bandit import Bandit
    from ppl_bandit.live.decisions import Decision, Slate
    from ppl_bandit.online import Online
    from ppl_bandit.posterior.fallback import NotCertified
    from ppl_bandit.program.model.reward_model import RewardModel
    from ppl_bandit.simulation.environment import Environment
    from ppl_bandit.simulation.simulate import simulate
    from ppl_bandit.simulation.standings import Tuned
    from ppl_bandit.simulation.tune import tune
    from ppl_bandit.trials import stopping
    from ppl_bandit.trials.calibrate import adjusted_estimates, calibrate, rows_for_power
    from ppl_bandit.trials.design import Design
    from ppl_bandit.trials.operating_characteristics import (
        OperatingCharacteristics,
        operating_characteristics,
        sweep_priors,
    )
    from ppl_bandit.types import (
        AlreadyRewarded,
        BanditError,
        Capabilities,
        Engine,
        ExperimentStopped,
        Explanation,
        Interaction,
        InvalidContext,
        InvalidProgram,
        NotConjugate,
        RequestIdReused,
        Selection,
        Selector,
        UnknownArm,
        UnknownDecision,
    )

__all__ = [
    "AlreadyRewarded",
    "Bandit",
    "BanditError",
    "Capabilities",
    "Decider",
    "Decision",
    "Design",
    "Engine",
    "Environment",
    "Evaluation",
    "ExperimentStopped",
    "Explanation",
    "Interaction",
    "InvalidContext",
    "InvalidProgram",
    "Journal",
    "JournalError",
    "JournalTimeout",
    "NotCertified",
    "NotConjugate",
    "Online",
    "OperatingCharacteristics",
    "RequestIdReused",
    "RewardModel",
    "Sealer",
    "Selection",
    "Selector",
    "Slate",
    "Tuned",
    "UnknownArm",
    "UnknownDecision",
    "adjusted_estimates",
    "calibrate",
    "compare",
    "engines",
    "evaluate",
    "evaluate_arms",
    "evaluate_by_rejection",
    "operating_characteristics",
    "rows_for_power",
    "selectors",
    "simulate",
    "stopping",
    "sweep_priors",
    "tune",
]

# Names are imported on first use, so that the command line prints its help without importing JAX.
_HOMES = {
    "Bandit": "live.bandit",
    "Decider": "deciders.decider",
    "Decision": "live.decisions",
    "Slate": "live.decisions",
    "Design": "trials.design",
    "OperatingCharacteristics": "trials.operating_characteristics",
    "adjusted_estimates": "trials.calibrate",
    "calibrate": "trials.calibrate",
    "operating_characteristics": "trials.operating_characteristics",
    "rows_for_power": "trials.calibrate",
    "sweep_priors": "trials.operating_characteristics",
    "Environment": "simulation.environment",
    "Evaluation": "evaluation.evaluation",
    "evaluate": "evaluation.evaluate",
    "evaluate_arms": "evaluation.evaluate",
    "evaluate_by_rejection": "evaluation.rejection",
    "Journal": "journal.journal",
    "JournalError": "journal.stores.store",
    "JournalTimeout": "journal.stores.store",
    "NotCertified": "posterior.fallback",
    "RewardModel": "program.model.reward_model",
    "Sealer": "deciders.sealer",
    "Online": "online",
    "compare": "comparison",
    "Tuned": "simulation.standings",
    "simulate": "simulation.simulate",
    "tune": "simulation.tune",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("engines", "selectors"):
        return importlib.import_module(f"{__name__}.{name}")
    if name == "stopping":
        return importlib.import_module(f"{__name__}.trials.stopping")
    # Cached in the globals: a function may have the name of its module, which the import system would set there.
    globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'types')}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
