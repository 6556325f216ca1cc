"""`ppl-bandit serve`: experiments behind an address."""

import argparse
import logging
from pathlib import Path
from typing import Any

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.files.experiments_file import open_experiments, read_config


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        from ppl_bandit.files.keys import KeyFile
        from ppl_bandit.serving.app import create_app
        from ppl_bandit.serving.server import check_address, serve
    except ModuleNotFoundError as error:
        raise ValueError(f"serving needs {error.name}: python -m pip install 'ppl_bandit[serve]'") from None
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("ppl_bandit").setLevel(logging.INFO)  # not of jax, which tells of processors that are not there
    keys = None if arguments.keys is None else KeyFile(arguments.keys)
    check_address(arguments.host, keys)
    configured = _experiments(arguments)
    bandits, values = open_experiments(configured, arguments.role, progress)
    app = create_app(bandits, keys=keys, flag_values=values, closes=True)
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    progress(f"http://{host}:{arguments.port} has the dashboard; /docs lists the endpoints")
    try:
        serve(app, arguments.host, arguments.port, proxies=arguments.proxies)
    except KeyboardInterrupt:
        pass
    return {"experiments": list(bandits)}, 0


def _experiments(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return {name: settings}, from a file of experiments or from the arguments."""
    if arguments.model.endswith(".toml"):
        given = [option for option in ("journal", "name", "selector") if getattr(arguments, option) is not None]
        given += ["allow_changed"] * arguments.allow_changed
        if given:
            option = given[0].replace("_", "-")
            raise ValueError(f"--{option} was given with a file of experiments: set it in {arguments.model}")
        return read_config(Path(arguments.model))
    settings: dict[str, Any] = {"model": arguments.model, "journal": arguments.journal or "ppl_bandit.db"}
    if arguments.allow_changed:
        settings["allow_changed"] = True
    if arguments.selector is not None:
        settings["selector"] = arguments.selector
    return {arguments.name or "default": settings}
