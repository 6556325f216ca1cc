"""Run the application with uvicorn: limits of connections, quiet logs, and a stop that loses no answer."""

import logging
import warnings
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ppl_bandit.files.keys import KeyFile
from ppl_bandit.serving.access import is_loopback
from ppl_bandit.serving.hot import MAX_HEADERS

logger = logging.getLogger("ppl_bandit.serving")

_SECONDS_FOR_REQUEST = 10.0
_SECONDS_FOR_ANSWERS = 6  # of open requests, at the end; the lifespan takes 3 of the 10 s
_MAX_CONNECTIONS = 4096


class LimitedProtocol(HttpToolsProtocol):
    """HTTP that ends a connection whose headers are too large, or whose request does not arrive whole in time."""

    def connection_made(self, transport: Any) -> None:  # noqa: D102
        super().connection_made(transport)
        self._is_within_headers, self._is_whole, self._header_bytes = True, False, 0
        self._patience: Any = self.loop.call_later(_SECONDS_FOR_REQUEST, self._give_up)

    def on_message_begin(self) -> None:  # noqa: D102
        super().on_message_begin()
        self._is_within_headers, self._is_whole, self._header_bytes = True, False, 0

    def on_headers_complete(self) -> None:  # noqa: D102
        self._is_within_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:  # noqa: D102
        self._is_whole = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        super().data_received(data)
        if self._is_whole:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None
        elif self._patience is None:
            self._patience = self.loop.call_later(_SECONDS_FOR_REQUEST, self._give_up)
        if self._is_within_headers:
            self._header_bytes += len(data)
            if self._header_bytes > 2 * MAX_HEADERS and not self.transport.is_closing():
                self.send_400_response("The headers are too large.")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def check_address(host: str, keys: KeyFile | None) -> None:
    """Refuse an address that others reach, without keys.

    Raises:
        ValueError: with the remedy.
    """
    if keys is None and not is_loopback(host):
        raise ValueError(
            f"--host {host} is an address that others reach, and there are no keys: make one with `ppl-bandit keys create "
            "--role decide --file keys.toml`, and give --keys keys.toml"
        )
    if keys is None:
        logger.warning("no keys: everything on this machine may decide, read and change; give --keys to serve others")


def serve(app: Any, host: str, port: int, *, proxies: str = "127.0.0.1") -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        proxies: addresses of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed.
    """
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # addresses hold the names of units
        server_header=False,
        date_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=_SECONDS_FOR_ANSWERS,
        limit_concurrency=_MAX_CONNECTIONS,
        backlog=2048,
        forwarded_allow_ips=proxies,
    )
    uvicorn.Server(config).run()
