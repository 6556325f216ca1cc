"""Open an experiment: begin its stream, or continue it as the same experiment, or refuse."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ppl_bandit import engines, selectors
from ppl_bandit.inputs.data_files import context_columns
from ppl_bandit.journal import checkpoints
from ppl_bandit.journal.events import ARMS, CHANGED, OPENED, Event, new_event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.identity import differences, identity_of, versions
from ppl_bandit.journal.lessons import Standing, before_all
from ppl_bandit.journal.stores.contract import Conflict, JournalError, Store
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.posterior.task import Task
from ppl_bandit.types import Engine, Selector

__all__ = ["Facts", "can_grow", "engine_from", "facts_of", "grown", "open_experiment", "selector_from"]

Grow = Callable[[list[Any]], tuple[Task, Learner]]


class Facts(NamedTuple):
    """What a stream says about its experiment.

    Attributes:
        identity: as it was opened, or last changed.
        versions: that this was recorded under.
        names: the arms now, the retired ones among them.
        settled: position up to which nothing needs to be learnt one by one: of the last change, or of the last new arm.
        changed: position of the last change; 0 if there was none.
        context_columns: names of the numbers in a context, in the order of its leaves.
    """

    identity: Mapping[str, Any]
    versions: Mapping[str, str]
    names: list[Any]
    retired: frozenset[int]
    settled: int
    changed: int
    context_columns: list[str]


def facts_of(store: Store, name: str) -> Facts | None:
    """Read what a stream says about its experiment; None if there is no such stream."""
    found = None
    for event in store.read(name, kinds=(OPENED, CHANGED, ARMS)):
        if event.kind != ARMS:
            identity, place = event.body["identity"], event.position if event.kind == CHANGED else 0
            columns = event.body["context_columns"]
            found = Facts(identity, event.body["versions"], list(identity["arms"]), frozenset(), place, place, columns)
        elif found is not None:
            is_growing = len(event.body["arms"]) > len(found.names)
            found = found._replace(
                names=event.body["arms"],
                retired=frozenset(event.body["retired"]),
                settled=event.position if is_growing else found.settled,
            )
    return found


def open_experiment(
    store: Store, name: str, task: Task, prior: Learner, grow: Grow, burn_in: int, allow_changed: bool
) -> Experiment:
    """Begin an experiment, or continue it with all that was decided and learnt.

    Raises:
        JournalError: if the program or a setting differs from the recorded ones.
    """
    standing = before_all(task, prior)
    if not store.is_durable:
        return Experiment(store, name, standing, grow, burn_in)
    facts = facts_of(store, name)
    if facts is None:
        identity = identity_of(task, prior.engine, burn_in)
        try:
            store.append(name, [_identity_event(OPENED, task, identity)], after=0)
        except Conflict:  # another process was faster
            pass
        facts = facts_of(store, name)
        assert facts is not None  # it was opened just now
    return _continue(store, name, standing, grow, burn_in, allow_changed, facts)


def _continue(
    store: Store, name: str, standing: Standing, grow: Grow, burn_in: int, allow_changed: bool, facts: Facts
) -> Experiment:
    task, prior = standing.task, standing.prior
    names = list(task.arms.names)
    opened = list(facts.identity["arms"])
    has_grown = len(facts.names) > len(opened) and facts.names[: len(names)] == names
    if has_grown and names != opened:  # what was recorded is the program with the arms of then
        then, then_prior = grow(opened)
        identity = identity_of(then, then_prior.engine, burn_in)
    else:
        identity = identity_of(task, prior.engine, burn_in)
    found = differences(facts.identity, identity)
    if found and not allow_changed:
        why = "; ".join(found)
        hint = (
            ""
            if facts.versions == versions()
            else f" (it was recorded under {dict(facts.versions)}, this is {versions()}: the same program may read otherwise)"
        )
        raise JournalError(
            f"the experiment {name!r} is another one: {why}{hint}. Pass what it was opened with, give another name=, or "
            "allow_changed=True to go on, which is recorded"
        )
    if found:
        if len(names) < len(facts.names):
            raise JournalError(
                f"the experiment {name!r} has the arms {facts.names}, {names} were given: retire an arm, do not leave it out"
            )
        event = _identity_event(CHANGED, task, identity, found)
        try:
            store.append(name, [event], after=store.last_position(name))
        except Conflict:
            pass
        facts = facts_of(store, name) or facts
        if facts.identity != identity:
            raise JournalError(
                f"the experiment {name!r} was changed by another process at the same time: open it again"
            )
    if len(facts.names) > len(names):
        task, prior = grow(facts.names)
        standing = before_all(task, prior)
    elif len(facts.names) < len(names):
        raise JournalError(f"the experiment {name!r} has the arms {facts.names}, {names} were given: use add_arm")
    experiment = Experiment(store, name, standing, grow, burn_in, identity)
    kept = checkpoints.kept(store, name, identity, standing)
    if kept is not None and kept[0] >= facts.settled:
        experiment.resume(*kept)
    else:
        experiment.resume(facts.settled, None)
    return experiment


def can_grow(program: Any) -> bool:
    """Tell whether a program can be written out for any number of arms: whether it takes `num_arms`."""
    try:
        return "num_arms" in inspect.signature(program).parameters
    except (TypeError, ValueError):
        return False


def grown(program: Any, num_arms: int) -> Any:
    """Return a program for a number of arms; one that does not take `num_arms` is returned as it is."""
    if not can_grow(program):
        return program
    bound = functools.partial(program, num_arms=num_arms)
    bound.__name__ = getattr(program, "__name__", "program")  # type: ignore[attr-defined]  # messages call it by its name
    return bound


def engine_from(description: Mapping[str, Any]) -> Callable[..., Engine] | None:
    """Return the factory of an engine that was described; None leaves the choice to the library, or says it is not known."""
    if description.get("may_fall_back"):
        return None
    factory = getattr(engines, description["name"], None)
    return None if factory is None else functools.partial(factory, **description["settings"])


def selector_from(description: Mapping[str, Any]) -> Selector:
    """Return a selector that was described.

    Raises:
        ValueError: for one that this library does not have.
    """
    factory = getattr(selectors, description["name"], None)
    if factory is None:
        raise ValueError(f"the selector {description['name']!r} is not one of this library: pass the same selector=")
    settings = {
        name: selector_from(value) if isinstance(value, Mapping) and {"name", "settings"} <= set(value) else value
        for name, value in description["settings"].items()
    }
    return factory(**settings)


def _identity_event(kind: str, task: Task, identity: Mapping[str, Any], found: list[str] | None = None) -> Event:
    body = {"identity": dict(identity), "versions": versions(), "context_columns": list(context_columns(task.model))}
    return new_event(kind, body | {"differences": found or []})
