"""The file of experiments that `ppl-bandit serve` reads (TOML), and the bandits that it describes."""

import functools
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from ppl_bandit import engines, selectors
from ppl_bandit.deciders.decider import Decider
from ppl_bandit.deciders.sealer import Sealer
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.model_files import ModelFile, load_model
from ppl_bandit.live.bandit import Bandit

SELECTORS = ("bayes_ucb", "double_sampling", "greedy", "information_directed", "thompson", "top_two")
ENGINES = ("collapsed", "conjugate", "laplace", "nuts", "reweight", "svi")
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_PASSED = (
    "allow_changed",
    "arms",
    "burn_in",
    "default_reward",
    "late",
    "num_samples",
    "reward_window",
    "seed",
    "unit_window",
)
_SECONDS_FOR_JOURNAL = 10.0  # for one call; the caller is answered at its own deadline
_FOR_DECIDERS = ("max_staleness", "publish_every", "when_stale")
_FIELDS = {*_PASSED, *_FOR_DECIDERS, "engine", "floor", "journal", "model", "name", "selector", "values"}


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Return {name in the address: settings}.

    Raises:
        ValueError: with the field that is wrong, and what is expected.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    tables = content.get("experiments")
    if set(content) != {"experiments"} or not isinstance(tables, dict) or not tables:
        raise ValueError(f"{path} must have tables [experiments.NAME] and nothing else, got {sorted(content)}")
    found = {}
    for name, table in tables.items():
        where = f"{path}: experiments.{name}"
        if not isinstance(table, dict) or "model" not in table or "journal" not in table:
            raise ValueError(f"{where} needs model and journal")
        if set(table) - _FIELDS:
            raise ValueError(f"{where} has {sorted(set(table) - _FIELDS)}, expected some of {sorted(_FIELDS)}")
        settings = {field: _secret(value, f"{where}.{field}") for field, value in table.items()}
        for field in ("model", "journal"):
            if not isinstance(settings[field], str):
                raise ValueError(f"{where}.{field} must be a text, got {settings[field]!r}")
        if "://" not in settings["journal"]:
            settings["journal"] = str(path.parent / Path(settings["journal"]).expanduser())
        beside = path.parent / Path(settings["model"]).expanduser()  # as written: `file.py` or `file.py:function`
        if ".py" in settings["model"]:
            settings["model"] = str(beside)
        for field in ("max_staleness", "publish_every", "reward_window", "unit_window"):
            if field in settings:
                settings[field] = _span(settings[field], f"{where}.{field}")
        found[name] = settings
    return found


@functools.cache
def _loaded(model: str) -> ModelFile:
    """Load a model file once: experiments of one program share its proof and its compiled functions."""
    return load_model(model)


def open_experiments(
    configured: Mapping[str, Mapping[str, Any]], role: str = "all", progress: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, Bandit | Sealer | Decider], dict[str, dict[Any, Any]]]:
    """Open experiments; return {name in the address: what `create_app` serves}, and {name: {arm: value of its flag}}.

    Args:
        configured: {name: settings}, as `read_config` returns them.
        role: of the process: "decider" opens deciders, "learner" sealers of its bandits.
    """
    journals: dict[str, Journal] = {}
    found: dict[str, Bandit | Sealer | Decider] = {}
    values = {}
    for name, own in configured.items():
        progress(f"{name}: reading the program and opening the journal")
        opened = open_decider(name, own) if role == "decider" else open_bandit(name, own, journals)
        found[name] = open_sealer(opened, own) if role == "learner" else opened
        if "values" in own:  # the keys of TOML are texts, also those of numbered arms
            arms = {str(arm): arm for arm in opened.arms}
            values[name] = {arms.get(key, key): value for key, value in own["values"].items()}
    return found, values


def open_bandit(name: str, settings: Mapping[str, Any], journals: dict[str, Journal]) -> Bandit:
    """Open the bandit of an experiment.

    Args:
        name: in the address, and in the journal unless the settings have another.
        journals: those that are open, by URL; experiments in one journal share its connection.
    """
    file, url = _loaded(settings["model"]), settings["journal"]
    if url not in journals:
        journals[url] = Journal(url, timeout=_SECONDS_FOR_JOURNAL)
    given = {field: settings[field] for field in _PASSED if field in settings}
    if "arms" not in given:
        given["num_arms"] = file.num_arms
    return Bandit(
        file.program,
        context=file.context,
        outcomes=file.outcomes,
        journal=journals[url],
        name=settings.get("name", name),
        selector=_selector(settings, name),
        engine=None
        if "engine" not in settings
        else getattr(engines, _one_of(settings["engine"], ENGINES, "engine", name)),
        **given,
    )


def open_decider(name: str, settings: Mapping[str, Any]) -> Decider:
    """Open the decider of an experiment; its settings are those that the experiment was opened with."""
    file, when_stale = _loaded(settings["model"]), settings.get("when_stale", "decide")
    given = {"max_staleness": settings["max_staleness"]} if "max_staleness" in settings else {}
    return Decider(
        settings["journal"],
        settings.get("name", name),
        file.program,
        context=file.context,
        refuse_stale=_one_of(when_stale, ("decide", "refuse"), "when_stale", name) == "refuse",
        timeout=_SECONDS_FOR_JOURNAL,
        **given,
    )


def open_sealer(bandit: Any, settings: Mapping[str, Any]) -> Sealer:
    """Publish the posterior of an experiment to deciders, and record their decisions."""
    return Sealer(bandit, **({"publish_every": settings["publish_every"]} if "publish_every" in settings else {}))


def _selector(settings: Mapping[str, Any], name: str) -> Any:
    chosen: Any = None
    if "selector" in settings:
        chosen = _one_of(settings["selector"], SELECTORS, "selector", name)
        chosen = getattr(selectors, chosen)()
    if "floor" in settings:
        chosen = selectors.with_floor(selectors.double_sampling() if chosen is None else chosen, settings["floor"])
    return chosen


def _one_of(value: Any, known: tuple[str, ...], field: str, name: str) -> str:
    if value not in known:
        raise ValueError(f"experiments.{name}.{field} is {value!r}, expected one of {', '.join(known)}")
    return value


def _secret(value: Any, where: str) -> Any:
    """Return a value, or what an environment variable has: "env:JOURNAL_URL"."""
    if not isinstance(value, str) or not value.startswith("env:"):
        return value
    variable = value.removeprefix("env:")
    if not os.environ.get(variable):
        raise ValueError(f"{where} is {value!r}, but the environment variable {variable} is not set")
    return os.environ[variable]


def _span(value: Any, where: str) -> timedelta:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return timedelta(seconds=value)
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(second|minute|hour|day|week)s?", value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{where} is {value!r}, expected seconds, or a text such as '7 days' or '30 minutes'")
    return timedelta(seconds=float(found[1]) * _UNITS[found[2]])
