"""The personal part of an event: the unit, and the contexts of its decisions and rewards.

It is stored beside the event, with a random salt. The event itself, and so the chain of digests, holds a digest of both, which
tells nothing once the salt is blanked.
"""

import hashlib
import os
from typing import Any, NamedTuple

from ppl_bandit.journal.events import ERASED, Event
from ppl_bandit.journal.stores.tables import decode, encode


class Personal(NamedTuple):
    """The personal part of an event, as it is stored."""

    salt: str
    contents: str


def unit_key(unit: str) -> str:
    """Return the key of a unit."""
    return f"unit:{hashlib.sha256(unit.encode()).hexdigest()}"


def split(event: Event) -> tuple[dict[str, Any], Personal]:
    """Return the body to store with an event, and its personal part: the entries that `body["personal"]` names."""
    names = event.body["personal"]
    part = Personal(os.urandom(16).hex(), encode({name: event.body[name] for name in names}))
    rest = {name: value for name, value in event.body.items() if name not in names}
    return rest | {"personal": _digest(part)}, part


def joined(event: Event, part: Personal | None) -> Event:
    """Return an event with its personal part; without it, the event says that it was erased.

    Raises:
        ValueError: if the part is not the one that was recorded.
    """
    if part is None or not part.contents.strip():
        return event._replace(body=event.body | {ERASED: True})
    if _digest(part) != event.body["personal"]:
        raise ValueError("its personal part is not the one that was recorded")
    own = decode(part.contents)
    return event._replace(body=event.body | own | {"personal": list(own)})


def _digest(part: Personal) -> str:
    return hashlib.sha256((part.salt + part.contents).encode()).hexdigest()
