"""What a design fixes for a live bandit: selector, burn-in, the record in the journal, and the end of decisions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.inputs.numbers import Arms
from ppl_bandit.journal.identity import to_json
from ppl_bandit.journal.projection import Projection
from ppl_bandit.posterior.learning import Learner, draw_expected_rewards
from ppl_bandit.posterior.task import DesignRecord, Task
from ppl_bandit.program.keywords import takes
from ppl_bandit.trials.design import Design, design_settings
from ppl_bandit.trials.looks import CONTINUE, ENDINGS
from ppl_bandit.trials.setting import Setting
from ppl_bandit.trials.simulator import NUM_PRIOR_DRAWS, check_units
from ppl_bandit.types import ExperimentStopped, Key, Selector


def settings_of_design(
    design: Design, selector: Selector | None, burn_in: int, num_arms: int
) -> tuple[Selector | None, int]:
    """Return the selector and the burn-in per arm of a design; others beside it are refused.

    Raises:
        ValueError: if the bandit was given others, or something that is no design.
    """
    if not isinstance(design, Design):
        raise ValueError(f"design must be a Design, got {design!r}: build one with Design(looks, stopping=...)")
    if selector is not None and to_json(selector) != to_json(design.selector):
        raise ValueError(f"selector is {selector}, but the design has {design.selector}: give it to the design alone")
    own = -(-design.burn_in // num_arms)
    if burn_in not in (0, own):
        raise ValueError(f"burn_in is {burn_in}, but the design has its own of {design.burn_in} decisions in all")
    return design.selector, own


def design_record(design: Design, task: Task, prior: Learner) -> DesignRecord:
    """Return what the journal stores of a design.

    Raises:
        ValueError: if the design does not fit the arms.
    """
    num_arms = len(task.arms)
    design.control_index(task.arms.names)
    check_units(design, lambda: draw_expected_rewards(prior, task.model.context, NUM_PRIOR_DRAWS))
    if design.allocation == "each":
        return DesignRecord(design_settings(design), None)
    probs = np.full(num_arms, 1.0 / num_arms)
    if design.burn_in == 0 and (design.selector.name != "fixed" or design.selector.settings["probs"] is not None):
        with jax.enable_x64(True):
            setting = Setting(task.model, prior.engine, design, -1, task.num_samples)

            @jax.jit
            def allocate(key: Key, state: Any) -> Array:
                allowed = jnp.ones(num_arms, bool)
                best_arm_probs = setting.posterior(key, state).best_arm_probs(allowed)
                return setting.allocation(key, state, allowed, best_arm_probs, 0)

            probs = np.asarray(allocate(jr.key(task.seed), prior.state))
    return DesignRecord(design_settings(design), tuple(probs.tolist()))


def due_look(projection: Projection, design: Design) -> int | None:
    """Return the last look whose number of decisions is reached, if it was not taken; None after a stop."""
    last, num_decisions = projection.look, int(projection.num_played.sum())
    index = sum(rows <= num_decisions for rows in design.look_rows) - 1
    is_done = last is not None and (index <= last["look"] or last["ending"] != ENDINGS[CONTINUE])
    return None if index < 0 or is_done else index


def refuse_stopped(projection: Projection, design: Design, num_new: int = 1) -> None:
    """Refuse decisions after the experiment has stopped or while a look is due, and several that pass the next planned look.

    Raises:
        ExperimentStopped: says what to do instead.
    """
    look, names = projection.look, projection.task.arms.names
    if look is not None and look["ending"] != ENDINGS[CONTINUE]:
        raise ExperimentStopped(
            f"the experiment stopped at look {look['look'] + 1} ({look['ending']}): play {names[look['arm']]!r} without the "
            "bandit, or start a new experiment with another name=; pending rewards may still be reported"
        )
    num_played = int(projection.num_played.sum())
    if num_played >= design.last_rows:
        raise ExperimentStopped(f"the design ends after {design.last_rows} decisions, of which 0 are left: call look()")
    due = due_look(projection, design)
    if due is not None:
        raise ExperimentStopped(
            f"look {due + 1} of {design.num_looks} is due since {design.look_rows[due]} decisions: call look(), which takes it "
            "with the rewards that are known, and decide then"
        )
    next_look = min(rows for rows in design.look_rows if rows > num_played)
    left = next_look - num_played
    if num_new > left:
        after = "the design ends" if next_look == design.last_rows else "the design has a look"
        raise ValueError(
            f"{num_new} decisions were asked for, but {after} after {next_look} decisions, of which {left} are left: ask for "
            f"at most {left}, then call look()"
        )


def arms_with(projection: Projection, program: Callable, name: str | None) -> dict[str, Any]:
    """Return what changes of the arms when one is added or brought back.

    Args:
        program: as the user wrote it, with or without the keyword `num_arms`.
        name: of the arm; None if the arms are numbered.

    Raises:
        ValueError: if the name does not fit the others, or the program or a design fixes the arms.
    """
    names, retired = list(projection.task.arms.names), projection.retired
    if name in names and names.index(name) in retired:
        return {"retired": sorted(retired - {names.index(name)})}
    if (name is None) != isinstance(names[0], int):
        raise ValueError(f"name is {name!r}, but the arms are {names}: give a name if and only if the arms have names")
    if name is not None:
        Arms(None, [*names, name])  # raises unless it is a new name
    if projection.task.design is not None:
        raise ValueError("the experiment has a design, whose arms are fixed: start a new experiment with the new arm")
    if not takes(program, "num_arms"):
        raise ValueError(
            "the program has a fixed number of arms: let it take num_arms, as in `def model(arm, *, num_arms): "
            'with numpyro.plate("arms", num_arms): ...`, and give each new arm its own latents'
        )
    return {"arms": [*names, len(names) if name is None else name]}


def retired_with(projection: Projection, arm: Any) -> list[int]:
    """Return the retired arms after one more is retired.

    Raises:
        ValueError: if it is the last arm that is played.
    """
    retired = projection.retired | {projection.task.arms.index(arm)}
    if len(retired) == len(projection.task.arms):
        raise ValueError(f"arm={arm!r} is the last one that is played: add another arm before retiring it")
    return sorted(retired)
