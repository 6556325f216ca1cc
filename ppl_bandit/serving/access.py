"""Who may call: the key of a request, or a loopback address where the service has no keys."""

import functools
import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ppl_bandit.files.keys import Access, KeyFile
from ppl_bandit.serving.experiments import ServedExperiment
from ppl_bandit.serving.problems import Problem

COOKIE = "ppl_bandit_key"
_EVERYTHING = Access(None)


@functools.lru_cache(64)
def is_loopback(host: str) -> bool:
    """Return whether an address is one of this machine that others cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: one such as 127.example.org may stand for any machine
        return host == "localhost"


def is_own_origin(headers: Mapping[bytes, bytes], *, default: bool) -> bool:
    """Return whether a request comes from a page of this service; browsers say where from, others are as `default`."""
    if b"origin" not in headers:
        return default
    return urlsplit(headers[b"origin"].decode("latin-1")).netloc == headers.get(b"host", b"").decode("latin-1")


class Gate:
    """Decides what a request may do.

    Args:
        experiments: {name: experiment}.
        keys: None serves callers on this machine alone. Their `Host` must name it too, so that no page in a browser reaches
            the service through a domain of its own that resolves to this machine.
    """

    def __init__(self, experiments: Mapping[str, ServedExperiment], keys: KeyFile | None):
        self.experiments, self.keys = experiments, keys

    def open(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], role: str, name: str, cookie: str | None = None
    ) -> tuple[Access, ServedExperiment]:
        """Return what the caller may do, and the experiment with a name, if the caller has a role for it.

        Raises:
            Problem: as `enter` and `check`; 404 for an experiment that is not served.
        """
        access = self.enter(scope, headers, cookie)
        self.check(access, role, name)
        if name not in self.experiments:
            raise Problem(404, "unknown_experiment", f"there is no experiment {name!r}: GET /v1/experiments lists them")
        return access, self.experiments[name]

    def opened(self, access: Access) -> list[ServedExperiment]:
        """Return the experiments that a caller may use."""
        return [experiment for name, experiment in self.experiments.items() if access.opens(name)]

    def enter(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], cookie: str | None = None) -> Access:
        """Return what the caller may do.

        Args:
            cookie: the key that the dashboard keeps in a cookie; the endpoints do not read it, so no other site can use it.

        Raises:
            Problem: 401 without a known key; 403 from another machine where there are no keys.
        """
        if self.keys is None:
            client = scope.get("client")
            name = headers.get(b"host", b"").decode("latin-1")
            if not name.endswith("]"):
                name = name.rpartition(":")[0] or name
            if (client is not None and not is_loopback(client[0])) or not is_loopback(name.strip("[]")):
                raise Problem(
                    403, "no_keys", "without keys, the service answers this machine alone: start it with --keys"
                )
            if not is_own_origin(headers, default=True):
                raise Problem(403, "foreign_page", "without keys, no page of another site may use the service")
            return _EVERYTHING
        key = cookie
        if key is None:
            scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
            if scheme.lower() != "bearer" or not key:
                raise Problem(401, "no_key", "a key is missing: send it as `Authorization: Bearer KEY`")
        access = self.keys.find(key.strip())
        if access is None:
            raise Problem(401, "unknown_key", "this key is not known: it was revoked, or it is misspelt")
        return access

    def check_role(self, access: Access, role: str) -> None:
        """Check that the caller has a role.

        Raises:
            Problem: 403.
        """
        if not access.has_role(role):
            raise Problem(
                403, "wrong_role", f"this needs a key with the role {role}; this key has the role {access.role}"
            )

    def check(self, access: Access, role: str, experiment: str | None) -> None:
        """Check that the caller has a role, for an experiment.

        Args:
            experiment: None for what concerns all of them, which a key that is bound to some does not open.

        Raises:
            Problem: 403, before it is looked up whether the experiment exists.
        """
        self.check_role(access, role)
        if experiment is None and access.experiments is not None:
            raise Problem(403, "bound_key", "this key is bound to experiments, and this endpoint shows all of them")
        if experiment is not None and not access.opens(experiment):
            raise Problem(403, "bound_key", f"this key is not for the experiment {experiment!r}")
