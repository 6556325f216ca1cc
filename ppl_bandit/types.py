"""Data types and contracts that several layers share, and checks of single arguments.

One letter per axis, for the whole project: `M` posterior draws, `A` arms, `N` rows of data, `D` context features,
`T` steps, `R` realizations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key as KeyArray

Key: TypeAlias = KeyArray[Array, ""]
Draws: TypeAlias = dict[str, Array]  # {latent site: (M, ...)}
State: TypeAlias = Any  # a pytree of fixed shape, private to its engine


class Interaction(NamedTuple):
    """N rows of data; N = 1 in sequential use.

    Attributes:
        arm: index of the arm played in each row.
        reward: (N,), or {outcome: (N,)} for a program with several outcomes.
        context: a pytree whose leaves have a leading axis N, or None for a program without context.
        mask: True for the rows that count; None counts all. The other rows are padding and have no effect.
    """

    arm: Int[Array, " N"]
    reward: Any
    context: Any = None
    mask: Bool[Array, " N"] | None = None


class Tail(NamedTuple):
    """The expected excess of each arm's expected reward theta_a over a grid of thresholds.

    Attributes:
        mean: (A,), the posterior mean of each arm's expected reward.
        nodes: (A, G), increasing thresholds, from at most about the mean to where the excess vanishes; G is at least 2.
        excess: (A, G), E max(theta_a - node, 0).
        above: (A, G), P(theta_a > node), the negative slope of the excess.
    """

    mean: Float[Array, " A"]
    nodes: Float[Array, "A G"]
    excess: Float[Array, "A G"]
    above: Float[Array, "A G"]


class BestArmMoments(NamedTuple):
    """Moments of the expected rewards theta, restricted to the event that arm b is best.

    Attributes:
        probs: (A,), P(b is best).
        centred_values: (A,), E[theta_b - level; b is best], with one level for all arms.
        gaps: (A, A), E[theta_b - theta_a; b is best], for b by row; 0 on the diagonal.
    """

    probs: Float[Array, " A"]
    centred_values: Float[Array, " A"]
    gaps: Float[Array, "A A"]


class Marginals(NamedTuple):
    """The posterior law of each arm's expected reward in closed form; an optional field is None if it is not offered.

    Attributes:
        cdf: x (A,) -> (A,), the posterior probability that arm a's expected reward is at most x_a.
        quantile: q (scalar) -> (A,), the posterior q-quantile of each arm's expected reward.
        best_arm_probs: mask of allowed arms (A,), or None -> (A,), the posterior probability that each arm is best; offered
            if the arms are independent.
        tail: () -> `Tail`.
        pseudo_counts: () -> (A,), the number of rewards that each arm's posterior is worth: E Var(reward | theta) / Var
            E(reward | theta), which is a + b for Beta(a, b) and Bernoulli rewards; it returns None if there is no closed form.
        table: (key, M) -> (M, A), draws of all arms' expected rewards from their joint law; offered if that takes less time
            than drawing the latents.
        best_arm_moments: mask of allowed arms (A,), or None -> `BestArmMoments`.
        is_mixture: whether the laws are averages over particles; `best_arm_probs` then takes longer than M draws.
        joint_events: difference of two arms -> `numerics.joint_events.JointEvents`; offered if the arms are independent.
    """

    cdf: Callable[[Float[Array, " A"]], Float[Array, " A"]]
    quantile: Callable[[Float[Array, ""]], Float[Array, " A"]]
    best_arm_probs: Callable[[Bool[Array, " A"] | None], Float[Array, " A"]] | None = None
    tail: Callable[[], Tail] | None = None
    pseudo_counts: Callable[[], Float[Array, " A"] | None] | None = None
    table: Callable[[Key, int], Float[Array, "M A"]] | None = None
    best_arm_moments: Callable[[Bool[Array, " A"] | None], BestArmMoments] | None = None
    is_mixture: bool = False
    joint_events: Callable[[float], Any] | None = None


class Selection(NamedTuple):
    """A decision and its probabilities.

    Attributes:
        arm: index of the arm to play; -1 if the table is not finite or no arm is allowed (the caller raises an error).
        best_arm_probs: p-hat, the share of draws that each arm wins; ties are shared equally.
        num_candidates: number of candidate arms that were drawn (N_{t+1}); 0 for selectors that draw none.
        propensities: probability that this selector plays each arm, given this table; averaged over all tables where that
            is known in closed form (`Selector.is_linear`).
    """

    arm: Int[Array, ""]
    best_arm_probs: Float[Array, " A"]
    num_candidates: Int[Array, ""]
    propensities: Float[Array, " A"]


@dataclass(frozen=True, eq=False)
class Selector:
    """A callable rule that makes a decision from a table of sampled expected rewards.

    `selector(key, table, step, *, allowed=None, marginals=None) -> Selection`; `table` is (M, A), `step` counts from 1.

    Attributes:
        name: name of the factory.
        settings: the factory's arguments by name; a selector inside another one is a setting of it.
        decide: the function that a call runs.
        select_from_probs: `(key, shares, step, *, allowed=None, marginals=None) -> Selection`, the same decision from p-hat
            instead of a table; None if the rule reads the table itself.
        uses_marginals: whether marginals change the decision.
        required_marginals: the fields of `Marginals` that `select_from_probs` reads besides the probabilities.
        is_exact: whether p-hat is the exact probability that each arm is best, if the marginals offer it.
        is_linear: whether the propensities are linear in p-hat, so that their mean over tables follows from the exact
            probability that each arm is best.
        is_deterministic: whether the table decides the arm, up to ties: a log of its decisions says nothing about the arms
            that it did not play.
        horizon: the last step that the rule is made for; None if there is no last step. A later step raises an error; inside
            a trace, which cannot raise, it counts as the last step.
    """

    name: str
    settings: Mapping[str, Any]
    decide: Callable[..., Selection] = field(repr=False)
    select_from_probs: Callable[..., Selection] | None = field(default=None, repr=False)
    uses_marginals: bool = field(default=False, repr=False)
    required_marginals: tuple[str, ...] = field(default=(), repr=False)
    is_exact: bool = field(default=False, repr=False)
    is_linear: bool = field(default=False, repr=False)
    is_deterministic: bool = field(default=False, repr=False)
    horizon: int | None = field(default=None, repr=False)

    def __call__(self, key: Key, table: Any, step: Any, *, allowed: Any = None, marginals: Any = None) -> Selection:
        """Make a decision."""
        return self.decide(key, table, step, allowed=allowed, marginals=marginals)

    def can_skip_table(self, marginals: Marginals) -> bool:
        """Return whether `select_from_probs` can decide with these marginals."""
        has_all = all(getattr(marginals, name) is not None for name in ("best_arm_probs", *self.required_marginals))
        return self.select_from_probs is not None and has_all

    def __str__(self) -> str:
        """Return the call of the factory, such as `with_floor(selector=thompson(), floor=0.1)`."""
        given = (
            f"{name}={value if isinstance(value, Selector) else repr(value)}" for name, value in self.settings.items()
        )
        return f"{self.name}({', '.join(given)})"


DETAILS = "  details: "  # begins a line of a report with measures and with what was tried
_IN_SENTENCE = " (details: "  # begins the measures at the end of a sentence


def with_remedy(sentence: str, remedy: str) -> str:
    """Return a sentence with a remedy before its details."""
    text, mark, details = sentence.partition(_IN_SENTENCE)
    return f"{text}; {remedy}{mark}{details}"


def without_details(sentence: str) -> str:
    """Return a sentence without the measures at its end."""
    return sentence.partition(_IN_SENTENCE)[0]


class Explanation(NamedTuple):
    """Why an engine fits a program, as text.

    Attributes:
        engine: the engine's name, such as "conjugate".
        is_exact: whether draws come from the exact posterior.
        reason: one sentence: why this engine was chosen, or why the program was refused.
        sites: latent site -> name of its posterior family.
        report: the full text for the user; lines that begin with `DETAILS`, and deeper ones after them, are shown on request.
    """

    engine: str
    is_exact: bool
    reason: str
    sites: Mapping[str, str]
    report: str = ""

    def __str__(self) -> str:
        return self.report or self.reason

    @property
    def summary(self) -> str:
        """The report without its details."""
        kept, is_detail = list[str](), False
        for line in str(self).splitlines():
            is_detail = line.startswith(DETAILS) or (is_detail and line.startswith("    "))
            if not is_detail:
                kept.append(line)
        if len(kept) < len(str(self).splitlines()):
            kept.append("  `explain(details=True)` adds the measures, and what was tried")
        return "\n".join(kept)


class Capabilities(NamedTuple):
    """Optional functions of an engine; a field is None where the engine does not offer the function.

    Attributes:
        parameters: state -> {site: {parameter: array}}, for a posterior in closed form.
        reserve: (state, num_rows) -> a state with capacity for num_rows more rows. It changes shapes, so it runs outside of
            jit. None if the size of the state does not depend on the number of rows.
        marginals: (state, context) -> `Marginals`, or None where an arm's expected reward has no closed-form law.
        infinite_means: (state, context) -> (A,), True for each arm whose expected reward has an infinite posterior mean.
        quick_update: (key, state, interaction) -> (state, info, is_complete). A small program that equals `update` for one
            row unless particles must be renewed; is_complete is then False and the caller runs `update` instead.
        advance: (key, state, context) -> the state predicted to the time of a decision, for programs whose latents move.
        add_rows: (state, interaction) -> (state, whether all rows could be read), an update without certificates for rows
            that the program itself has simulated.
        record_readings: state -> None. After it, tracing `quick_update` and then `update` of one row does not run the NumPyro
            program for `update`. The live bandit then traces that in a background thread.
        log_evidence: state -> (log p(rows learnt), its standard error, 0 if it is exact). With a discount it is the sum of the
            log predictive densities of the batches; it runs outside of jit.
    """

    parameters: Callable[[State], dict[str, dict[str, Any]]] | None = None
    reserve: Callable[[State, int], State] | None = None
    marginals: Callable[[State, Any], Marginals | None] | None = None
    infinite_means: Callable[[State, Any], Any] | None = None
    quick_update: Callable[[Key, State, Interaction], tuple[State, Any, Any]] | None = None
    advance: Callable[[Key, State, Any], State] | None = None
    add_rows: Callable[[State, Interaction], tuple[State, Any]] | None = None
    record_readings: Callable[[State], None] | None = None
    log_evidence: Callable[[State], tuple[float, float]] | None = None


class Engine(NamedTuple):
    """Posterior inference as three pure functions over a state of fixed shape.

    Attributes:
        init: key -> state, the prior.
        update: (key, state, interaction) -> (state, info); all inference work happens here.
        sample: (key, state, M) -> draws {site: (M, ...)}; a cheap read, M is static.
        explanation: which engine this is and why it fits the program.
        settings: the factory's arguments by name.
        capabilities: optional functions.
    """

    init: Callable[[Key], State]
    update: Callable[[Key, State, Interaction], tuple[State, Any]]
    sample: Callable[[Key, State, int], Draws]
    explanation: Explanation
    settings: Mapping[str, Any] = MappingProxyType({})
    capabilities: Capabilities = Capabilities()


class BanditError(ValueError):
    """What was passed cannot be used; the base of the errors that callers can tell apart."""


class UnknownDecision(BanditError):
    """No decision of this experiment has this id."""


class AlreadyRewarded(BanditError):
    """The decision has another reward already."""


class UnknownArm(BanditError):
    """No arm of this experiment has this name."""


class InvalidContext(BanditError):
    """A context does not fit the example context.

    Attributes:
        entry: path of the wrong entry, such as "['age']"; "" if the context as a whole is wrong.
    """

    def __init__(self, message: str, entry: str = ""):
        super().__init__(message)
        self.entry = entry


class RequestIdReused(BanditError):
    """The id of a request was given again with other arguments."""


class ExperimentStopped(BanditError):
    """The experiment has stopped, or its design has a look before the next decision."""


class InvalidProgram(BanditError):
    """The program is not a valid reward model; the message says what is wrong and what to write instead."""


class NotConjugate(BanditError):
    """The program is not conjugate, or the proof failed; `explanation` contains the evidence."""

    def __init__(self, message: str, explanation: Explanation | None = None):
        super().__init__(message)
        self.explanation = explanation


def check_flag(value: Any, argument: str) -> bool:
    """Return a flag as a bool.

    Raises:
        ValueError: for anything but True or False; a text such as "no" is true in Python.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{argument} must be True or False, got {value!r}")
    return bool(value)


def check_number(value: Any, argument: str) -> Any:
    """Return one number as it is.

    Raises:
        ValueError: for a text, a sequence, None, and a bool.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ValueError(f"{argument} must be a number, got {value!r}")
    return value


def check_function(value: Any, argument: str, what: str) -> Callable[..., Any]:
    """Return a function as it is.

    Args:
        what: the function does, for the message.

    Raises:
        ValueError: for anything that cannot be called.
    """
    if not callable(value):
        raise ValueError(f"{argument} must be a function {what}, got {value!r}")
    return value
