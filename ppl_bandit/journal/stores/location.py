"""Where a journal is: a SQLite file or a PostgreSQL database, from a path, a URL or a libpq connection string.

Messages show the scheme, the host, the port and the database only. A text whose parts cannot be told apart is refused
without being shown, because any part of it may be a password.
"""

import os
import re
from pathlib import Path
from typing import Any

_EXPECTED = "expected a path, sqlite:///path or postgresql://user@host/database"
_SCHEMES_WITHOUT_SLASHES = ("file", "sqlite", "postgres", "postgresql")
_KEYWORD = re.compile(
    r"(?:^|\s)(?:host|hostaddr|port|dbname|user|password|passfile|service|ssl\w+|options|connect_timeout)\s*=", re.I
)

_SECRET = re.compile(r"(?::|%3a).*(?:@|%40)|(?:password|passwd|passphrase|pwd|secret|token)\s*(?:=|:|%3d)", re.I | re.S)


def check_location(url: Any) -> str:
    """Return a path, a URL or a connection string as a text; an error does not show it.

    Raises:
        ValueError: for anything else, and for a text that no file and no database can have.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        what = "a text that is empty or blank" if isinstance(text, str) else type(url).__name__
        raise ValueError(f"url must be a path, sqlite:///path or postgresql://user@host/database, got {what}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("url holds half of a surrogate pair, which is not valid text: give another path") from None
    if "\0" in text:
        raise ValueError("url holds a null character, which no path and no URL can have: remove it")
    return text


def parse_location(text: str) -> Path | str:
    """Return the path of a SQLite file, or the URL or connection string of a PostgreSQL database, as libpq reads it.

    Raises:
        ValueError: for a text that names neither a file nor a PostgreSQL database without ambiguity.
    """
    scheme, colon, rest = text.partition(":")
    scheme = scheme.lower()
    is_url = rest.startswith("//") or scheme in _SCHEMES_WITHOUT_SLASHES
    if colon and is_url and re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme):
        return _from_url(scheme, rest)
    if text.strip() == ":memory:":
        raise ValueError("url=':memory:' has no file: leave journal=None to keep an experiment in memory")
    if _KEYWORD.search(text):
        return text
    if _SECRET.search(re.sub(r"^[a-z]:[/\\]", "", text, flags=re.I)):  # without the drive of a Windows path
        raise ValueError(
            f"url looks like the address or the settings of a database, {_EXPECTED}; for a file whose path has ':' and '@', or "
            "'password=', give a pathlib.Path"
        )
    return Path(text).expanduser()


def _from_url(scheme: str, rest: str) -> Path | str:
    if scheme == "sqlite":
        return _sqlite_path(rest)
    if scheme not in ("postgres", "postgresql") or not rest.startswith("//"):
        raise ValueError(f"url has the scheme {scheme!r}, {_EXPECTED}")
    rest = rest[2:]
    if "@" in rest.partition("@")[2] or "@" in rest.partition("/")[2]:
        raise ValueError(
            "url of a PostgreSQL database has an '@' or '/' in its user, password or options: write these characters as %40 "
            "and %2F, or use urllib.parse.quote(password, safe='')"
        )
    return f"postgresql://{rest}"


def _sqlite_path(rest: str) -> Path:
    if rest in ("", "//", "///") or rest.endswith(":memory:"):
        raise ValueError("url has the scheme 'sqlite' and no file: leave journal=None to keep an experiment in memory")
    if not rest.startswith("///"):
        raise ValueError("url has the scheme 'sqlite': write sqlite:///path, or sqlite:////path from the root")
    if "?" in rest or "#" in rest:
        raise ValueError(
            "url has the scheme 'sqlite' and options after the path: leave them out, or give the path alone"
        )
    return Path(rest[3:]).expanduser()
