"""`ppl-bandit journal`: inspect an experiment or one decision, replay all decisions, verify and export the data."""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.names import find_experiment
from ppl_bandit.display.terminal import progress_reporter, safe_frame
from ppl_bandit.inputs.numbers import as_seconds
from ppl_bandit.journal.audit import decision_details, decision_table, experiment_status, utc_time
from ppl_bandit.journal.identity import arguments_from_identity, experiment_identity, identity_differences
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.model_files import find_program, load_model
from ppl_bandit.journal.open_experiment import ExperimentHeader, read_header
from ppl_bandit.journal.replay import ReplayResult, recompute_posteriors, replay
from ppl_bandit.journal.stores.store import DamagedEvent, JournalError, ReadingEvent
from ppl_bandit.live.alarms import AlarmSettings, AlarmWatch
from ppl_bandit.live.bandit import Bandit

_WITH_PROGRAM = ("look", "report", "replay", "erase", "expire", "verify")


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Run an action; the status is 1 if the journal is damaged or a replayed decision differs."""
    is_writing = arguments.action in ("look", "erase", "expire")
    with Journal(arguments.url, must_exist=is_writing, read_only=not is_writing) as journal:
        name = find_experiment(journal, arguments.name)
        is_figure = arguments.action == "status" and arguments.out is not None
        needs_program = arguments.action in _WITH_PROGRAM or is_figure
        arguments.is_model_given = needs_program and arguments.model is not None
        if needs_program and not arguments.is_model_given:
            try:
                arguments.model = find_program(read_header(journal.store, name), arguments.url, arguments.action)
                progress(f"program: {arguments.model}, as the journal says; --model names another")
            except JournalError as error:
                if arguments.action != "verify":
                    raise
                arguments.why_no_model = str(error)
        action: Callable[..., CommandResult] = globals()[f"_{arguments.action}"]  # one function below for each action
        return action(journal, name, arguments, show)


def _status(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    found = experiment_status(journal.store, name)
    show(
        f"{name}: {found['num_events']} events since {found['opened']}, the last at {found['last_event']}; "
        f"{found['engine']} engine, {found['selector']}, M = {found['num_samples']}"
    )
    width = max(3, *(len(str(arm["arm"])) for arm in found["arms"]))
    mean = next(key for key in found["arms"][0] if key.startswith("mean_"))
    show(f"  {'arm':<{width}}  decisions  pending  rewards  {mean}")
    for arm in found["arms"]:
        value = "-" if arm[mean] is None else f"{arm[mean]:.4g}"
        note = "  (retired)" if arm["is_retired"] else ""
        show(
            f"  {arm['arm']!s:<{width}}  {arm['num_decisions']:9d}  {arm['num_pending']:7d}  {arm['num_rewards']:7d}  "
            f"{value}{note}"
        )
    if arguments.model is None:
        shares = found["last_best_arm_probs"]
        if shares is not None:
            show(
                f"  P(best) at the last decision: {', '.join(f'{share:.3f}' for share in shares)}; "
                f"`ppl-bandit journal {arguments.url} report` computes the present ones"
            )
    else:
        bandit = _recorded_bandit(journal, name, arguments.model)
        found["explanation"] = bandit.explain()
        found["posterior"] = bandit.summary().to_dict("records")
        show(found["explanation"])
        if arguments.out is not None:
            found["out"] = _write_figure(bandit.plot(), arguments.out)
            show(f"wrote {found['out']}")
    if found["damage"] is not None:
        show(f"  DAMAGED at position {found['first_broken_position']}: {found['damage']}")
        return found, 1
    return found, 0


def _look(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    found = _recorded_bandit(journal, name, arguments.model).look()
    show(found.verdict)
    return found.to_dict(), 0


def _report(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    report = _recorded_bandit(journal, name, arguments.model).report(more=arguments.more)
    result = report.to_dict()
    show(report.text)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        report.to_html(arguments.out / "report.html")
        result["out"] = [str(arguments.out / "report.html"), _write_figure(report.plot(), arguments.out / "report.png")]
        show(f"wrote {' and '.join(result['out'])}")
    return result, 0


def _write_figure(figure: Any, path: Path) -> str:
    path = path / "posterior.png" if path.is_dir() else path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return str(path)


def _recorded_bandit(journal: Journal, name: str, model: str) -> Bandit:
    return _bandit(read_header(journal.store, name), model, journal=journal, name=name)


def _show(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    story = decision_details(journal.store, name, arguments.id)
    show(
        f"decision {story['decision']}, made {story['decided']} as number {story['number']} (event {story['position']})"
    )
    show(
        f"  arm {story['arm']!r}, played with probability {story['propensity']:.4g}; {story['num_candidates']} candidates"
    )
    for arm, prob, share in zip(story["arms"], story["propensities"], story["best_arm_probs"], strict=True):
        show(f"    {arm!s}: probability {prob:.4g}, P(best) {share:.4g}")
    if story["allowed"] is not None:
        show(f"  allowed: {[arm for arm, fits in zip(story['arms'], story['allowed'], strict=True) if fits]}")
    if story["context"]:
        show(f"  context: {story['context']}")
    show(f"  the posterior had learnt from all events up to {story['absorbed']}")
    for event in story["events"]:
        rest = {key: value for key, value in event.items() if key not in ("position", "kind", "time")}
        show(f"  event {event['position']}, {event['time']}: {event['kind']} {rest}")
    show(f"  {story['status']}" + (f", reward {story['reward']}" if story["reward"] else ""))
    return story, 0


def _replay(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    damage = journal.store.find_damage(name)
    header = read_header(journal.store, name)
    # Start with the initial arms: the replay adds later arms at the events that added them.
    bandit = _bandit(header, arguments.model)
    names = list(header.identity["arms"])
    task, prior = bandit._build(names)
    found: ReplayResult = replay(
        journal.store,
        name,
        header.last_change,
        task,
        prior,
        bandit._build,
        _progress(journal, name),
        bandit._look_difference,
    )
    result = found._asdict() | {"first_broken_position": None if damage is None else damage.position}
    if damage is not None:
        show(f"DAMAGED at position {damage.position}: {damage.reason}")
    skipped = found.num_decisions - found.num_checked - found.num_erased
    if found.position is not None:
        show(f"the record at position {found.position} differs: {found.difference}")
        return result, 1
    before = f"; {skipped} from before the change at event {header.last_change} were not checked" if skipped else ""
    erased = f"; {found.num_erased} were erased, or follow a reward that was" if found.num_erased else ""
    show(f"all agree: {found.num_checked} of {found.num_decisions} decisions recomputed{before}{erased}")
    return result, 0 if damage is None else 1


def _export(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    table = decision_table(journal.store, name)
    suffix = {"csv": ".csv", "parquet": ".parquet", "netcdf": ".nc"}[arguments.to]
    path = arguments.out or Path(re.sub(r"[^\w.-]|^\.+", "_", name) + suffix)  # a name may look like another folder
    if arguments.to == "csv":
        safe_frame(table).to_csv(path, index=False)
    elif arguments.to == "netcdf":
        table.to_xarray().to_netcdf(path)
    else:
        try:
            table.to_parquet(path, index=False)
        except ImportError:
            raise JournalError("parquet needs pyarrow: pip install 'ppl_bandit[parquet]', or export --to csv") from None
    show(f"wrote {len(table)} rows to {path}")
    return {"out": str(path), "num_rows": len(table)}, 0


def _pending(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    given = arguments.older_than
    until = None if given is None else time.time() - as_seconds(given, "--older-than")
    rows = []
    for event in journal.store.pending(name, until):
        with ReadingEvent(name, event.position):
            rows.append(
                {
                    "decision": event.decision,
                    "decided": utc_time(event.time),
                    "arm": str(event.body["name"]),
                    "propensity": event.body["propensities"][event.arm],
                }
            )
    for row in rows:
        show(f"{row['decision']}  {row['decided']}  {row['arm']}")
    show(f"{len(rows)} decisions without a reward")
    return rows, 0


def _alarms(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    overdue_after = arguments.overdue_after
    if arguments.model is not None:
        table = _recorded_bandit(journal, name, arguments.model).alarms(
            missing=arguments.missing, overdue_after=overdue_after
        )
    else:
        header = read_header(journal.store, name)
        identity = header.identity
        window, default = identity.get("reward_window"), identity.get("default_reward")
        if overdue_after is None and default is None:
            overdue_after = window
        settings = AlarmSettings(
            tuple(identity["outcomes"]),
            identity["num_samples"],
            bool(header.context_columns),
            header.is_moving,
            arguments.missing,
            overdue_after,
            is_ordered=window is not None or overdue_after is not None,
        )
        watch = AlarmWatch(settings)
        watch.read(journal.store, name, time.time())
        table = watch.table(header.names)
    rows = []
    for row in table.to_dict("records"):
        since = None if row["since"] != row["since"] else row["since"].isoformat()
        rows.append(row | {"since": since, "arm": None if row["arm"] is None else str(row["arm"])})
        whose = "" if row["arm"] is None else f" of {row['arm']}"
        level = f" (level {row['level']:.2g})" if math.isfinite(row["level"]) else ""
        figure = f"{row['figure']:.3g} against {row['threshold']:.3g}{level}"
        show(f"{row['alarm']}{whose} since {since}, {figure}: {row['what_to_do']}")
    more = "; --model also checks what needs the program" if arguments.model is None else ""
    show(f"{len(rows)} alarms; checked: {', '.join(table.attrs['checked'])}{more}")
    return rows, 0


def _erase(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    with _recorded_bandit(journal, name, arguments.model) as bandit:
        num_decisions = bandit.erase(arguments.unit)
    show(f"erased {num_decisions} decisions of the unit" if num_decisions else "no decision of this unit is recorded")
    return {"name": name, "num_decisions": num_decisions}, 0


def _expire(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    with _recorded_bandit(journal, name, arguments.model) as bandit:
        num_expired = bandit.expire(arguments.older_than, arguments.reward)
        num_pending = len(bandit.pending())
    show(f"settled {num_expired} decisions whose reward is overdue; {num_pending} are pending")
    return {"name": name, "num_expired": num_expired, "num_pending": num_pending}, 0


def _head(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    head = journal.head(name)
    show(head)
    return {"name": name, "head": head}, 0


def _verify(journal: Journal, name: str, arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    why_not = ""
    try:
        found = journal.verify(name, arguments.head)
        if found.num_posteriors:
            bandit, why_not = _bandit_to_verify(journal, name, arguments)
            if bandit is not None:
                found = recompute_posteriors(journal.store, found, bandit._build, _progress(journal, name))
    except DamagedEvent as error:
        show(f"DAMAGED: {error}")
        return {"name": name, "damage": str(error)}, 1
    show(found.text)
    if why_not:
        show(why_not)
    counts = {"num_posteriors": found.num_posteriors, "num_recomputed": found.num_recomputed}
    return {"name": name, "damage": None, "head": found.head, "num_unsealed": found.num_unsealed, **counts}, 0


def _bandit_to_verify(journal: Journal, name: str, arguments: argparse.Namespace) -> tuple[Bandit | None, str]:
    """Return the recorded bandit; None, and why, if the journal alone names its program, and that is not what it was."""
    if arguments.model is None:
        return None, arguments.why_no_model
    try:
        return _bandit(read_header(journal.store, name), arguments.model), ""
    except Exception as error:  # loading a program executes it
        if arguments.is_model_given:
            raise
        return None, str(error)


def _progress(journal: Journal, name: str) -> Callable[[int], None] | None:
    return progress_reporter(name, journal.store.last_position(name), "events") if sys.stderr.isatty() else None


def _bandit(header: ExperimentHeader, spec: str, **place: Any) -> Bandit:
    """Build the recorded bandit from a model file; `place` is its journal and name, empty for the initial state."""
    file = load_model(spec)
    identity = header.identity
    arguments = arguments_from_identity(identity)
    if arguments["engine"] is None and not identity["engine"]["may_fall_back"]:
        raise JournalError(
            f"the engine {identity['engine']['name']!r} is not part of this library: replay it in Python"
        )
    bandit = Bandit(file.program, context=file.context, **arguments, **place)
    if not place:
        projection = bandit._experiment.projection
        given = experiment_identity(projection.task, projection.prior.engine, identity["burn_in"])
        differences = identity_differences(identity, given)
        if differences:
            raise JournalError(f"{spec} is not what the experiment was recorded with: {'; '.join(differences)}")
    return bandit
