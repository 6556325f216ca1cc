"""One look at an experiment: apply all stopping rules of a design to the posterior, in a fixed order.

`check_look` is a pure function that runs inside `jit` and `vmap`: the live bandit and the simulation of a design both call it.

Without a control: arms that are best with a probability below inferiority's threshold are dropped, and the probabilities are
computed again, until none is left to drop; then superiority; then equivalence of all arms that are left. With a control, all
by comparison with it: inferior arms are dropped; if an arm is superior it becomes the control, the old one is dropped, and
all is checked again; if none is, equivalent arms are dropped, then futile ones; the experiment ends when one arm is left.
Then the other rules follow in the order of the design.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.trials.design import Design
from ppl_bandit.trials.setting import ArmPosterior

ENDINGS = ("continue", "superiority", "equivalence", "futility", "expected_loss", "undecided")
CONTINUE, NO_ARM = 0, -1


class AtLook(NamedTuple):
    """What a rule that a user writes reads at a look.

    Attributes:
        posterior: of the arms' expected rewards, an `ArmPosterior`.
        active: the arms that are left.
        leader: the one of these that is most likely best.
        control: index of the present control; -1 without one.
        num_decisions: planned number of decisions at this look.
    """

    posterior: ArmPosterior
    active: Bool[Array, " A"]
    leader: Int[Array, ""]
    control: Int[Array, ""]
    num_decisions: Int[Array, ""]


class Look(NamedTuple):
    """The verdict of a look.

    Attributes:
        ending: index into `endings(design)`; 0 if the experiment continues.
        arm: the arm that the experiment selects if it ends here: the superior one, else the active arm most likely best.
        active: the arms that are left after this look.
        control: the control after this look; -1 without one.
        best_arm_probs: P(a is best among the arms left).
        evidence: the criterion of each rule of the design: the probability compared with its threshold; the expected loss; the
            greatest width of an interval. For inferiority the least probability of an arm before any is dropped.
    """

    ending: Int[Array, ""]
    arm: Int[Array, ""]
    active: Bool[Array, " A"]
    control: Int[Array, ""]
    best_arm_probs: Float[Array, " A"]
    evidence: Float[Array, " rules"]

    @property
    def is_stop(self) -> Bool[Array, ""]:
        """Whether the experiment ends."""
        return self.ending != CONTINUE


def endings(design: Design) -> tuple[str, ...]:
    """Return the names of all endings: those that every design has, then its own rules'."""
    return (*ENDINGS, *(rule.name for rule in design.rules if rule.function is not None))


def check_look(
    design: Design,
    look: int | Int[Array, ""],
    posterior: ArmPosterior,
    active: Bool[Array, " A"],
    control: int | Int[Array, ""] | None = None,
    *,
    first_control: int | None = None,
    thresholds: Float[Array, "rules looks"] | None = None,
) -> Look:
    """Apply the stopping rules of a design at one look.

    Args:
        look: index of the look, from 0; the last one ends the experiment ("undecided" if no rule does).
        posterior: of the arms' expected rewards, given the outcomes that are known at the look.
        active: arms that were left after the look before.
        control: index of the present control; None or -1 without one.
        first_control: index of the control at the start, for rules that compare with that one only; None is the present one.
        thresholds: in place of the design's own, for a search.

    Returns:
        The verdict. If no arm is active, or the posterior is not finite, its ending is meaningless; callers check before.
    """
    limits = jnp.asarray(design.thresholds() if thresholds is None else thresholds)[:, look]
    at = {rule.name: limits[index] for index, rule in enumerate(design.rules)}
    active = jnp.asarray(active)
    if control is None or (isinstance(control, int) and control < 0):
        found = _compare_all(design, posterior, active, at)
    else:
        control = jnp.asarray(control)
        is_first = jnp.asarray(True) if first_control is None else control == first_control
        found = _compare_with_control(design, posterior, active, control, is_first, at)
    ending, active, control_now, probs, evidence = found
    leader = jnp.argmax(jnp.where(active, probs, -1.0))
    arm = leader if design.control is None else jnp.where(jnp.sum(active) == 1, jnp.argmax(active), leader)
    seen = AtLook(posterior, active, leader, jnp.asarray(control_now), jnp.asarray(design.look_rows)[look])
    for rule in design.rules:
        if rule.name == "expected_loss":
            losses = jnp.where(active, posterior.expected_losses(active), jnp.inf)
            value, own_arm = jnp.min(losses), jnp.argmin(losses)
        elif rule.function is not None:
            value, own_arm = jnp.asarray(rule.function(seen), probs.dtype), leader
        else:
            continue
        is_low = rule.name == "expected_loss" or rule.settings["stops"] == "at_most"
        is_met = value <= at[rule.name] if is_low else value >= at[rule.name]
        name = endings(design).index(rule.name)
        evidence[rule.name] = value
        arm = jnp.where((ending == CONTINUE) & is_met, own_arm, arm)
        ending = jnp.where((ending == CONTINUE) & is_met, name, ending)
    is_last = jnp.asarray(look) == design.num_looks - 1
    ending = jnp.where((ending == CONTINUE) & is_last, ENDINGS.index("undecided"), ending)
    values = [jnp.asarray(evidence[rule.name], probs.dtype) for rule in design.rules]
    return Look(ending, arm, active, control_now, probs, jnp.stack(values) if values else jnp.zeros(0, probs.dtype))


def _compare_all(design: Design, posterior: ArmPosterior, active: Array, at: dict[str, Array]) -> Any:
    """Drop inferior arms until none is left to drop, then check superiority and equivalence."""
    probs = posterior.best_arm_probs(active)
    evidence: dict[str, Array] = {}
    if "inferiority" in at:
        evidence["inferiority"] = jnp.min(jnp.where(active, probs, 1.0))

        def is_inferior(state: tuple[Array, Array]) -> Bool[Array, " A"]:
            active, probs = state
            is_leader = jnp.arange(active.size) == jnp.argmax(jnp.where(active, probs, -1.0))
            return active & (probs < at["inferiority"]) & ~is_leader

        def drop(state: tuple[Array, Array]) -> tuple[Array, Array]:
            left = state[0] & ~is_inferior(state)
            return left, posterior.best_arm_probs(left)

        active, probs = jax.lax.while_loop(lambda state: jnp.any(is_inferior(state)), drop, (active, probs))
    ending = jnp.where(jnp.sum(active) == 1, ENDINGS.index("superiority"), CONTINUE)
    if "superiority" in at:
        evidence["superiority"] = jnp.max(probs)
        ending = jnp.where(evidence["superiority"] >= at["superiority"], ENDINGS.index("superiority"), ending)
    rule = design.rule("equivalence")
    if rule is not None:
        evidence["equivalence"] = posterior.range_prob(rule.settings["delta"], active)
        is_met = (ending == CONTINUE) & (evidence["equivalence"] >= at["equivalence"])
        ending = jnp.where(is_met, ENDINGS.index("equivalence"), ending)
    return ending, active, jnp.asarray(NO_ARM), probs, evidence


class _Comparison(NamedTuple):
    """State of the comparisons with a control: `is_new` if the control has just changed."""

    ending: Array
    active: Array
    control: Array
    is_first: Array
    is_new: Array


def _compare_with_control(
    design: Design, posterior: ArmPosterior, active: Array, control: Array, is_first: Array, at: dict[str, Array]
) -> Any:
    """Drop inferior arms, replace the control by a superior arm and start again, else drop equivalent and futile arms."""
    arms = jnp.arange(active.size)
    equivalence, futility = design.rule("equivalence"), design.rule("futility")

    def compare(control: Array, is_first: Array) -> tuple[Array, Array, Array]:
        """Return the probabilities of each arm to be better than the control, close to it, and futile."""
        better = posterior.gap_probs(0.0, control)
        if design.margin:  # of the first control alone
            better = jnp.where(is_first, posterior.gap_probs(-design.margin, control), better)
        close = futile = jnp.zeros_like(better)
        if equivalence is not None:
            delta = equivalence.settings["delta"]
            close = posterior.gap_probs(-delta, control) - posterior.gap_probs(delta, control)
        if futility is not None:
            futile = 1.0 - posterior.gap_probs(futility.settings["delta"], control)
        return better, close, futile

    def others(state: _Comparison) -> Bool[Array, " A"]:
        return state.active & (arms != state.control)

    def check(state: _Comparison) -> _Comparison:
        rivals, (better, close, futile) = others(state), compare(state.control, state.is_first)
        if "inferiority" in at:
            rivals &= better >= at["inferiority"]
        is_new = jnp.asarray(False)
        winner = jnp.argmax(jnp.where(rivals, better, -1.0))
        if "superiority" in at:
            is_new = jnp.any(rivals & (better >= at["superiority"]))
        ending = jnp.where(jnp.any(rivals), CONTINUE, ENDINGS.index("superiority"))
        left = rivals
        for rule, probs in ((equivalence, close), (futility, futile)):
            if rule is None:
                continue
            counts = state.is_first if rule.settings["only_first"] else jnp.asarray(True)
            kept = left & ~(counts & (probs >= at[rule.name]))
            is_end = jnp.any(left) & ~jnp.any(kept)
            ending, left = jnp.where(is_end, ENDINGS.index(rule.name), ending), kept
        # With a new control the rules of equivalence and futility wait for the next round.
        control = jnp.where(is_new, winner, state.control)
        left = jnp.where(is_new, rivals, left | (arms == state.control))
        ending = jnp.where(is_new, jnp.where(jnp.sum(left) == 1, ENDINGS.index("superiority"), CONTINUE), ending)
        return _Comparison(ending, left, control, state.is_first & ~is_new, is_new & (ending == CONTINUE))

    rivals = others(_Comparison(control, active, control, is_first, is_first))
    better, close, futile = compare(control, is_first)
    evidence = {
        "inferiority": jnp.min(jnp.where(rivals, better, 1.0)),
        "superiority": jnp.max(jnp.where(rivals, better, 0.0)),
        "equivalence": jnp.max(jnp.where(rivals, close, 0.0)),
        "futility": jnp.max(jnp.where(rivals, futile, 0.0)),
    }
    start = _Comparison(jnp.asarray(CONTINUE), active, control, is_first, jnp.asarray(True))
    found = jax.lax.while_loop(lambda state: state.is_new, check, start)
    return found.ending, found.active, found.control, posterior.best_arm_probs(found.active), evidence
