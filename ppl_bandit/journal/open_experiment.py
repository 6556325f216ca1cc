"""Open an experiment: start its stream, or continue it if program and settings are the recorded ones."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ppl_bandit.inputs.data_frames import context_columns
from ppl_bandit.journal.checkpoints import load_checkpoint
from ppl_bandit.journal.events import CHANGED, OPENED, Event, new_event, retired_after
from ppl_bandit.journal.experiment import BuildTask, Experiment
from ppl_bandit.journal.identity import experiment_identity, identity_differences, library_versions, program_source
from ppl_bandit.journal.projection import Projection, initial_projection
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.store import Conflict, DamagedEvent, JournalError, ReadingEvent
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.posterior.task import Task


class ExperimentHeader(NamedTuple):
    """Identity and arms of an experiment, from the few events that set them.

    Attributes:
        identity: program and settings as opened, or as last changed.
        versions: of the libraries that computed the identity.
        names: the arms now, the retired ones included.
        retired: indices of the retired arms.
        last_refit: position of the last event that refits the posterior to all rows: a change or a new arm; 0 if none.
        last_change: position of the last change of the identity; 0 if none.
        context_columns: names of the numbers in a context, in the order of its leaves.
        source: file and name of the program's function, where it was opened or last changed; None if that is not known.
    """

    identity: Mapping[str, Any]
    versions: Mapping[str, str]
    names: list[Any]
    retired: frozenset[int]
    last_refit: int
    last_change: int
    context_columns: list[str]
    source: tuple[str, str] | None = None

    @property
    def is_moving(self) -> bool:
        """Whether latents of the program move."""
        return self.identity["engine"]["name"] in ("kalman", "collapsed_kalman", "particle_filter")


def read_header(store: SqlStore, name: str) -> ExperimentHeader:
    """Return the header of an experiment.

    Raises:
        JournalError: if it does not exist.
    """
    header = _find_header(store, name)
    if header is None:
        store.check_name(name)
        raise DamagedEvent(f"the experiment {name!r} has no event that opened it: restore the journal from a copy")
    return header


def _find_header(store: SqlStore, name: str) -> ExperimentHeader | None:
    header = None  # an experiment in memory may be opened after its first events
    for event in sorted(store.settings(name), key=lambda event: event.kind != OPENED):
        with ReadingEvent(name, event.position):
            header = _fold_header(header, event)
    return header


def _fold_header(header: ExperimentHeader | None, event: Event) -> ExperimentHeader | None:
    body = event.body
    if event.kind in (OPENED, CHANGED):
        identity, position = body["identity"], event.position if event.kind == CHANGED else 0
        names, columns = list(identity["arms"]), body["context_columns"]
        if header is not None and header.names[: len(names)] == names:
            names = header.names  # arms that were added stay
        source = tuple(body["source"]) if body.get("source") else None  # older journals have none
        return ExperimentHeader(identity, body["versions"], names, frozenset(), position, position, columns, source)
    if header is None:
        return None
    names, retired = body.get("arms", header.names), retired_after(header.retired, event)
    last_refit = event.position if len(names) > len(header.names) else header.last_refit
    return header._replace(names=names, retired=retired, last_refit=last_refit)


def record_identity(experiment: Experiment) -> None:
    """Record the program and the settings of an experiment in memory, which begins without: a fingerprint takes a while."""
    if experiment.identity is None:
        task, prior = experiment.initial.task, experiment.initial.prior
        experiment.identity = experiment_identity(task, prior.engine, experiment.burn_in)
        experiment.store.append(experiment.name, [_identity_event(OPENED, task, experiment.identity)])
    experiment.catch_up()


def open_experiment(
    store: SqlStore,
    name: str,
    task: Task,
    prior: Learner,
    build: BuildTask,
    burn_in: int,
    allow_changed: bool,
) -> Experiment:
    """Start an experiment, or continue it with all recorded decisions and rewards.

    Raises:
        JournalError: if the program or a setting differs from the recorded ones, or an event was edited or removed.
    """
    projection = initial_projection(task, prior)
    header = _find_header(store, name)
    if header is None:
        store.check(name)
        identity = experiment_identity(task, prior.engine, burn_in)
        try:
            store.append(name, [_identity_event(OPENED, task, identity)], after=0)
        except Conflict:  # another process has opened it at the same time
            pass
        header = read_header(store, name)
    return _continue(store, name, projection, build, burn_in, allow_changed, header)


def _continue(
    store: SqlStore,
    name: str,
    projection: Projection,
    build: BuildTask,
    burn_in: int,
    allow_changed: bool,
    header: ExperimentHeader,
) -> Experiment:
    task, prior = projection.task, projection.prior
    names, opened = list(task.arms.names), list(header.identity["arms"])
    has_added_arms = len(header.names) > len(opened) and header.names[: len(names)] == names
    if has_added_arms and names != opened:  # the identity was recorded with fewer arms: compare with as many
        opened_task, opened_prior = build(opened)
        identity = experiment_identity(opened_task, opened_prior.engine, burn_in)
    else:
        identity = experiment_identity(task, prior.engine, burn_in)
    differences = identity_differences(header.identity, identity)
    if differences:
        store.check(name)  # an edited event may be the reason
    if differences and not allow_changed:
        hint = (
            ""
            if header.versions == library_versions()
            else f" (it was recorded with {dict(header.versions)}, this process has {library_versions()}: another version can "
            "change the fingerprint of the same program)"
        )
        raise JournalError(
            f"the experiment {name!r} was recorded with other settings: {'; '.join(differences)}{hint}. Pass those that it was "
            "opened with, give another name=, or continue with allow_changed=True (`ppl-bandit serve "
            "--allow-changed`), which records the change"
        )
    if differences:
        if len(names) < len(header.names) and not has_added_arms:
            raise JournalError(
                f"the experiment {name!r} has the arms {header.names}, and {names} were given: give all arms, and use "
                "retire_arm to stop playing one"
            )
        event = _identity_event(CHANGED, task, identity, differences)
        try:
            store.append(name, [event], after=store.last_position(name))
        except Conflict:
            pass
        header = read_header(store, name)
        if header.identity != identity:
            raise JournalError(
                f"the experiment {name!r} was changed by another process at the same time: open it again"
            )
    if len(header.names) > len(names):
        projection = initial_projection(*build(header.names))
    elif len(header.names) < len(names):
        raise JournalError(
            f"the experiment {name!r} has the arms {header.names}, and {names} were given: use add_arm for a new one"
        )
    stream = store.new_stream(name)
    experiment = Experiment(store, name, projection, build, burn_in, identity, stream)
    checkpoint = load_checkpoint(store, name, identity, projection, header.last_refit)
    if checkpoint is None:
        store.check(name)
        experiment.resume(header.last_refit)
        return experiment
    stored, *counters = checkpoint
    store.check(name, since=(stored.position, stored.digest))
    experiment.restore(stored._replace(digest=""), *counters)  # only deciders name the snapshot they decide from
    experiment.catch_up()
    return experiment


def _identity_event(kind: str, task: Task, identity: Mapping[str, Any], differences: list[str] | None = None) -> Event:
    columns = list(context_columns(task.model))
    body = {"identity": dict(identity), "versions": library_versions(), "context_columns": columns}
    return new_event(kind, body | {"differences": differences or [], "source": program_source(task.model)})
