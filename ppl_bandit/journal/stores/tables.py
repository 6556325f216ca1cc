"""The tables of a journal in a relational database, the same for SQLite and PostgreSQL, and how an event becomes a row.

The digest of an event covers the event and the digest before it, so that an edited, removed or inserted event is detected.

The head of an experiment, in a table of its own, is the position and the digest of its last event. It is written in the
transaction that appends the event, so that the removal of the last events is detected.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from ppl_bandit.journal.events import Event
from ppl_bandit.journal.stores.store import ReadingEvent

VERSION_WITH_HEADS = 2
VERSION_WITH_OPENINGS = 4
VERSION = 4
TABLES = (
    """CREATE TABLE IF NOT EXISTS ppl_bandit_events (
        experiment TEXT NOT NULL, position BIGINT NOT NULL, kind TEXT NOT NULL, decision TEXT, batch TEXT NOT NULL,
        number BIGINT, lane TEXT NOT NULL, arm BIGINT, settles INTEGER NOT NULL, time DOUBLE PRECISION NOT NULL,
        body TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (experiment, position))""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_by_decision ON ppl_bandit_events (experiment, decision)
        WHERE decision IS NOT NULL""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_learnt ON ppl_bandit_events (experiment, position) WHERE kind <> 'decided'""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_settings ON ppl_bandit_events (experiment, position)
        WHERE kind IN ('opened', 'changed', 'arms', 'looked', 'checkpoint')""",
    """CREATE UNIQUE INDEX IF NOT EXISTS ppl_bandit_ids ON ppl_bandit_events (experiment, decision)
        WHERE kind = 'decided'""",
    """CREATE TABLE IF NOT EXISTS ppl_bandit_checkpoints (
        experiment TEXT NOT NULL, position BIGINT NOT NULL, contents {blob} NOT NULL, PRIMARY KEY (experiment, position))""",
    # The personal parts of events, blanked when their unit is erased, and the keys of units and requests.
    """CREATE TABLE IF NOT EXISTS ppl_bandit_personal (
        experiment TEXT NOT NULL, position BIGINT NOT NULL, owner TEXT NOT NULL, salt TEXT NOT NULL, contents TEXT NOT NULL,
        PRIMARY KEY (experiment, position))""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_personal_of ON ppl_bandit_personal (experiment, owner)""",
    """CREATE TABLE IF NOT EXISTS ppl_bandit_keys (
        experiment TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, owner TEXT, arguments TEXT NOT NULL,
        PRIMARY KEY (experiment, name))""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_keys_of ON ppl_bandit_keys (experiment, owner) WHERE owner IS NOT NULL""",
    """CREATE TABLE IF NOT EXISTS ppl_bandit_heads (
        experiment TEXT NOT NULL PRIMARY KEY, position BIGINT NOT NULL, digest TEXT NOT NULL)""",
    # How often an experiment was opened: every opening draws from a random number stream of its own.
    """CREATE TABLE IF NOT EXISTS ppl_bandit_openings (experiment TEXT NOT NULL PRIMARY KEY, num BIGINT NOT NULL)""",
)
# A journal of version 1 has no heads: they are written when it is opened.
_HEADS_OF_EVENTS = """INSERT INTO ppl_bandit_heads
    SELECT last.experiment, last.position, last.digest FROM ppl_bandit_events last
    JOIN (SELECT experiment, MAX(position) AS position FROM ppl_bandit_events GROUP BY experiment) ends
    ON last.experiment = ends.experiment AND last.position = ends.position"""
# Before version 4 processes shared the first stream, and an index refused a number of it that was taken.
_OPENINGS_OF_EXPERIMENTS = (
    "INSERT INTO ppl_bandit_openings SELECT experiment, 1 FROM ppl_bandit_heads",
    "DROP INDEX IF EXISTS ppl_bandit_numbers",
)
# The same words as in the index ppl_bandit_settings, which is used for this condition.
IS_SETTING = "kind IN ('opened', 'changed', 'arms', 'looked', 'checkpoint')"
COLUMNS = "position, kind, decision, batch, number, lane, arm, settles, time, body"


def upgrades_from(version: int) -> tuple[str, ...]:
    """Return the statements that fill the tables which a journal of an earlier version did not have."""
    heads = (_HEADS_OF_EVENTS,) if version < VERSION_WITH_HEADS else ()
    return (*heads, *_OPENINGS_OF_EXPERIMENTS) if version < VERSION_WITH_OPENINGS else heads


def event_from_row(experiment: str, row: Sequence[Any]) -> Event:
    """Return the event in a row of `COLUMNS`."""
    position, kind, decision, batch, number, stream, arm, settles, time, body = row
    try:
        return Event(position, kind, decision, batch, number, stream, arm, bool(settles), time, orjson.loads(body))
    except ValueError:
        with ReadingEvent(experiment, position):
            raise


def encode(body: dict[str, Any]) -> str:
    """Write a body as JSON; floats are restored to the last bit by `decode`."""
    text = orjson.dumps(body, default=_as_list, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    if b"null" in text:  # orjson writes a number that is not finite as null
        _refuse_nan(body)
    return text.decode()


def decode(text: str) -> dict[str, Any]:
    """Read a body written by `encode`."""
    return orjson.loads(text)


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _refuse_nan(value: Any) -> None:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_nan(item)
    elif isinstance(value, float | np.ndarray | np.floating) and not np.all(np.isfinite(value)):
        raise ValueError(f"{value} is not finite: an event cannot hold it")


def digest_of(before: str, experiment: str, event: Event, body: str) -> str:
    """Return the digest of an event at its position, given the digest before it."""
    fields = [before, experiment, *event[:8], repr(float(event.time)), body]
    return hashlib.sha256("\x1f".join(map(str, fields)).encode()).hexdigest()
