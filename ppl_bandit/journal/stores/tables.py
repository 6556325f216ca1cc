"""The tables of a journal in a relational database, the same for SQLite and PostgreSQL.

The head of an experiment, in a table of its own, is the position and the digest of its last event. It is written in the
transaction that appends the event, so that the removal of the last events is detected.
"""

from collections.abc import Sequence
from typing import Any

from ppl_bandit.journal.events import Event, decode
from ppl_bandit.journal.stores.store import ReadingEvent

__all__ = ["COLUMNS", "HEADS_OF_EVENTS", "IS_SETTING", "TABLES", "VERSION", "VERSION_WITH_HEADS", "event_from_row"]

VERSION_WITH_HEADS = 2
VERSION = 3
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
    """CREATE UNIQUE INDEX IF NOT EXISTS ppl_bandit_numbers ON ppl_bandit_events (experiment, number)
        WHERE kind = 'decided' AND lane = ''""",
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
)
# A journal of version 1 has no heads: they are written when it is opened.
HEADS_OF_EVENTS = """INSERT INTO ppl_bandit_heads SELECT last.experiment, last.position, last.digest FROM ppl_bandit_events last
    JOIN (SELECT experiment, MAX(position) AS position FROM ppl_bandit_events GROUP BY experiment) ends
    ON last.experiment = ends.experiment AND last.position = ends.position"""
# The same words as in the index ppl_bandit_settings, which is used for this condition.
IS_SETTING = "kind IN ('opened', 'changed', 'arms', 'looked', 'checkpoint')"
COLUMNS = "position, kind, decision, batch, number, lane, arm, settles, time, body"


def event_from_row(experiment: str, row: Sequence[Any]) -> Event:
    """Return the event in a row of `COLUMNS`."""
    position, kind, decision, batch, number, lane, arm, settles, time, body = row
    with ReadingEvent(experiment, position):
        contents = decode(body)
    return Event(position, kind, decision, batch, number, lane, arm, bool(settles), time, contents)
