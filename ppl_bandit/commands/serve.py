"""`ppl-bandit serve`: experiments behind an address."""

import argparse
import logging
from pathlib import Path
from typing import Any

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.experiments_file import open_bandit, open_decider, open_sealer, read_config
from ppl_bandit.deciders.decider import Decider
from ppl_bandit.deciders.sealer import Sealer
from ppl_bandit.journal.journal import Journal
from ppl_bandit.live.bandit import Bandit


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        from ppl_bandit.serving.app import create_app
        from ppl_bandit.serving.keys import KeyFile
        from ppl_bandit.serving.server import check_address, serve
    except ModuleNotFoundError as error:
        raise ValueError(f"serving needs {error.name}: python -m pip install 'ppl_bandit[serve]'") from None
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("ppl_bandit").setLevel(logging.INFO)  # not of jax, which tells of processors that are not there
    keys = None if arguments.keys is None else KeyFile(arguments.keys)
    check_address(arguments.host, keys)
    configured = _experiments(arguments)
    journals: dict[str, Journal] = {}
    bandits: dict[str, Bandit | Decider] = {}
    for name, own in configured.items():
        progress(f"{name}: reading the program and opening the journal")
        is_decider = arguments.role == "decider"
        bandits[name] = open_decider(name, own) if is_decider else open_bandit(name, own, journals)
    values = {
        name: _flag_values(own["values"], bandits[name].arms) for name, own in configured.items() if "values" in own
    }
    served: dict[str, Bandit | Sealer | Decider] = dict(bandits)
    if arguments.role == "learner":
        served = {name: open_sealer(bandit, configured[name]) for name, bandit in bandits.items()}
    app = create_app(served, keys=keys, flag_values=values, closes=True)
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


def _flag_values(values: dict[str, Any], arms: list[Any]) -> dict[Any, Any]:
    """Return {arm: value}: the keys of TOML are texts, also those of numbered arms."""
    return {next((arm for arm in arms if str(arm) == name), name): value for name, value in values.items()}
