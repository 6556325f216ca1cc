"""Data and contracts: what crosses from one layer to the next.

One letter per axis, for the whole project: `M` posterior draws, `A` arms, `N` rows of data, `D` context features,
`T` steps, `R` realizations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Array, Bool, Float, Int, Key as KeyArray

__all__ = [
    "BestArmMoments",
    "Capabilities",
    "Draws",
    "Engine",
    "Explanation",
    "Interaction",
    "InvalidProgram",
    "Key",
    "Marginals",
    "NotConjugate",
    "Selection",
    "Selector",
    "Tail",
]

Key: TypeAlias = KeyArray[Array, ""]
Draws: TypeAlias = dict[str, Array]  # {latent site: (M, ...)}
State: TypeAlias = Any  # a pytree of fixed shape, private to its engine


class Interaction(NamedTuple):
    """N rows of data; N = 1 in sequential use.

    Attributes:
        arm: index of the arm played in each row.
        reward: (N,), or {outcome: (N,)} for a program with several outcomes.
        context: a pytree whose leaves have a leading axis N, or None for a program without context.
        mask: rows to count; None counts all. A masked row is padding: it may hold anything and changes nothing.
    """

    arm: Int[Array, " N"]
    reward: Any
    context: Any = None
    mask: Bool[Array, " N"] | None = None


class Tail(NamedTuple):
    """What each arm's upper tail is worth, tabulated.

    Attributes:
        mean: (A,), the posterior mean of each arm's expected reward.
        nodes: (A, G), numbers that rise from about the mean, or below, to where nothing is left; G is at least 2.
        excess: (A, G), E max(theta_a - node, 0).
        above: (A, G), P(theta_a > node): how fast the excess falls.
    """

    mean: Float[Array, " A"]
    nodes: Float[Array, "A G"]
    excess: Float[Array, "A G"]
    above: Float[Array, "A G"]


class BestArmMoments(NamedTuple):
    """What the identity of the best arm says about all arms.

    Attributes:
        probs: (A,), P(b is best).
        centred_values: (A,), E[theta_b - level; b is best], the level being the same for all.
        gaps: (A, A), E[theta_b - theta_a; b is best], for b by row; 0 on the diagonal.
    """

    probs: Float[Array, " A"]
    centred_values: Float[Array, " A"]
    gaps: Float[Array, "A A"]


class Marginals(NamedTuple):
    """The posterior law of each arm's expected reward in closed form.

    Attributes:
        cdf: x (A,) -> (A,), the posterior probability that arm a's expected reward is at most x_a.
        quantile: q (scalar) -> (A,), the posterior q-quantile of each arm's expected reward.
        best_arm_probs: mask of allowed arms (A,), or None -> (A,), the posterior probability that each arm is best; None
            where arms are not independent.
        tail: () -> `Tail`; None where it is not offered.
        pseudo_counts: () -> (A,), how many rewards each arm's posterior is worth: E Var(reward | theta) / Var
            E(reward | theta), a + b for Beta(a, b) and Bernoulli rewards; None, before it is called or after, where that has
            no closed form.
        table: (key, M) -> (M, A), draws of all arms' expected rewards from their joint law, without drawing the latents
            behind them; None where that is no shorter.
        best_arm_moments: mask of allowed arms (A,), or None -> `BestArmMoments`; None where it is not offered.
        is_mixture: whether they are averages over particles: `best_arm_probs` then takes longer than M draws, and is for those
            who want the probabilities themselves.
    """

    cdf: Callable[[Float[Array, " A"]], Float[Array, " A"]]
    quantile: Callable[[Float[Array, ""]], Float[Array, " A"]]
    best_arm_probs: Callable[[Bool[Array, " A"] | None], Float[Array, " A"]] | None = None
    tail: Callable[[], Tail] | None = None
    pseudo_counts: Callable[[], Float[Array, " A"] | None] | None = None
    table: Callable[[Key, int], Float[Array, "M A"]] | None = None
    best_arm_moments: Callable[[Bool[Array, " A"] | None], BestArmMoments] | None = None
    is_mixture: bool = False


class Selection(NamedTuple):
    """What a selector decided, and the probabilities it decided by.

    Attributes:
        arm: index of the arm to play; -1 where the table is not finite or no arm is allowed (raised at the edge).
        best_arm_probs: p-hat, the share of draws that each arm wins; ties are shared equally.
        num_candidates: how many candidate arms were drawn (N_{t+1}); 0 for selectors that draw none.
        propensities: probability that this selector plays each arm, given this table.
    """

    arm: Int[Array, ""]
    best_arm_probs: Float[Array, " A"]
    num_candidates: Int[Array, ""]
    propensities: Float[Array, " A"]


@dataclass(frozen=True, eq=False)
class Selector:
    """A rule that turns a table of sampled expected rewards into a decision: a value that can be called.

    `selector(key, table, step, *, allowed=None, marginals=None) -> Selection`; `table` is (M, A), `step` counts from 1.

    Attributes:
        name: the factory that made it.
        settings: what the factory was given, by argument; a selector inside another is itself a setting.
        decide: what a call runs.
        select_from_probs: `(key, shares, step, *, allowed=None, marginals=None) -> Selection`, the same decision from p-hat
            in place of a table; None if the rule reads the table itself.
        uses_marginals: whether marginals change what it does.
        required_marginals: the fields of `Marginals` that `select_from_probs` reads, beside the probabilities themselves.
        is_exact: whether p-hat is the exact probability that each arm is best, wherever the marginals offer it.
        horizon: the last step that it is made for; None if it does not ask. A step beyond it is an error where it can be
            raised, and counts as the last step inside a trace.
    """

    name: str
    settings: Mapping[str, Any]
    decide: Callable[..., Selection] = field(repr=False)
    select_from_probs: Callable[..., Selection] | None = field(default=None, repr=False)
    uses_marginals: bool = field(default=False, repr=False)
    required_marginals: tuple[str, ...] = field(default=(), repr=False)
    is_exact: bool = field(default=False, repr=False)
    horizon: int | None = field(default=None, repr=False)

    def __call__(self, key: Key, table: Any, step: Any, *, allowed: Any = None, marginals: Any = None) -> Selection:
        """Decide; see the class."""
        return self.decide(key, table, step, allowed=allowed, marginals=marginals)

    def can_skip_table(self, marginals: Marginals) -> bool:
        """Tell whether `select_from_probs` can decide with what these marginals offer."""
        has_all = all(getattr(marginals, name) is not None for name in ("best_arm_probs", *self.required_marginals))
        return self.select_from_probs is not None and has_all

    def __str__(self) -> str:
        """Write the call that made it, such as `with_floor(selector=thompson(), floor=0.1)`."""
        given = (
            f"{name}={value if isinstance(value, Selector) else repr(value)}" for name, value in self.settings.items()
        )
        return f"{self.name}({', '.join(given)})"


class Explanation(NamedTuple):
    """Why an engine may be trusted with a program, in words.

    Attributes:
        engine: the engine's name, such as "conjugate".
        is_exact: whether draws come from the exact posterior.
        reason: one sentence: why this engine, or what was refused.
        sites: latent site -> its posterior family, in words.
        report: the whole account, ready to print.
    """

    engine: str
    is_exact: bool
    reason: str
    sites: Mapping[str, str]
    report: str = ""

    def __str__(self) -> str:
        return self.report or self.reason


class Capabilities(NamedTuple):
    """Optional functions of an engine; a field is None where the engine does not offer the function.

    Attributes:
        parameters: state -> {site: {parameter: array}}, for a posterior in closed form.
        reserve: (state, num_rows) -> a state with capacity for num_rows more rows. It changes shapes, so it runs outside of
            jit. None if the size of the state does not depend on the number of rows.
        marginals: (state, context) -> `Marginals`, or None where an arm's expected reward has no closed-form law.
        infinite_means: (state, context) -> (A,), True for each arm whose expected reward has an infinite posterior mean.
        with_wider_prior: (state, scale) -> the state that the same data give under a prior `scale` times as wide.
        quick_update: (key, state, interaction) -> (state, info, is_complete). A small program that equals `update` for one
            row unless particles must be renewed; is_complete is then False and the caller runs `update` instead.
        is_traceable_without_program: whether tracing `update` and `sample` again, for another capacity, does not run the
            NumPyro program. The live bandit then traces them in a background thread.
    """

    parameters: Callable[[State], dict[str, dict[str, Any]]] | None = None
    reserve: Callable[[State, int], State] | None = None
    marginals: Callable[[State, Any], Marginals | None] | None = None
    infinite_means: Callable[[State, Any], Any] | None = None
    with_wider_prior: Callable[[State, Any], State] | None = None
    quick_update: Callable[[Key, State, Interaction], tuple[State, Any, Any]] | None = None
    is_traceable_without_program: bool = False


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


class InvalidProgram(ValueError):
    """The program cannot be read as a reward model; the message says what is wrong and what to write instead."""


class NotConjugate(ValueError):
    """The program is not conjugate, or not provably so; `explanation` carries the evidence."""

    def __init__(self, message: str, explanation: Explanation | None = None):
        super().__init__(message)
        self.explanation = explanation
