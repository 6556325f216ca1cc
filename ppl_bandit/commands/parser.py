"""Command-line arguments of every command.

This module imports neither jax nor the commands, so `--help` and refused arguments answer at once.
"""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

_MODEL = "path/to/file.py, file.py:function, or the name of a bundled model"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; it stores the name of the chosen command in `command`."""
    parser = argparse.ArgumentParser(
        prog="ppl-bandit", description="Write the reward model as a NumPyro program; get the bandit."
    )
    parser.add_argument("--version", action="version", version=f"ppl_bandit {version('ppl_bandit')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (describe, text) in {
        "demo": (_demo, "prove six bundled models exact, simulate them and draw a figure (about a minute)"),
        "check": (_check, "report for each model whether its posterior is exact, and why"),
        "run": (_run, "simulate selectors on a model: table, figures, data"),
        "tune": (_tune, "find the selector with the least regret in worlds drawn from the model's prior"),
        "reproduce": (_reproduce, "run the paper's evaluation: its figures, and a verdict on each number"),
        "compare": (_compare, "measure engines against the exact posterior, or rank several models"),
        "report": (_report, "answer from a table (CSV): which arm leads, by how much, how certain that is"),
        "import": (_import, "record the rows of a table (CSV) in a journal, to continue as an experiment"),
        "init": (_init, "write a project: a program, the settings of its service, a test"),
        "journal": (_journal, "inspect, replay, verify or export a recorded experiment"),
        "evaluate": (_evaluate, "say what may be concluded from a table (CSV) or a recorded experiment"),
        "design": (_design, "plan an experiment: how large, when to stop, how often it is wrong"),
        "serve": (_serve, "an HTTP service of experiments: decisions, rewards, dashboard, metrics"),
        "keys": (_keys, "make, list and revoke the keys of a service"),
    }.items():
        own = commands.add_parser(name, help=text)
        describe(own)
        if name not in ("journal", "keys"):  # their actions take it
            _add(own, "--json", "print the results as JSON", action="store_true")
    return parser


def _demo(demo: argparse.ArgumentParser) -> None:
    _add_common(demo, out="ppl-bandit-demo")


def _check(check: argparse.ArgumentParser) -> None:
    _add(check, "models", _MODEL, nargs="+", metavar="MODEL")
    _add(check, "--explain", "print the full report of each model", action="store_true")


def _run(run: argparse.ArgumentParser) -> None:
    _add(run, "model", _MODEL, metavar="MODEL")
    selectors = (
        "comma-separated: ds (double sampling), ds-lowest and ds-exact (variants of it), ts (Thompson sampling), bucb "
        "(Bayesian upper confidence bounds), greedy, top-two, ids (information-directed sampling), ogi or "
        "ogi:PATIENCE (optimistic Gittins index)"
    )
    _add(run, "--selectors", selectors, "ds,ts")
    _add_engine(run)
    _add(run, "--steps", "decisions per realization", 1000)
    _add(run, "--horizon", "horizon given to ogi (default: --steps)", type=int)
    worlds = "the file's truth, or latents from the prior anew in every realization"
    _add(run, "--worlds", worlds, "truth", choices=["truth", "prior"])
    _add(run, "--realizations", "independent repetitions", 1000)
    _add(run, "--devices", "spread realizations over N devices; 0 for all", type=_whole, metavar="N")
    _add_workers(run)
    _add_common(run, out="ppl-bandit-run", has_samples=True)


def _tune(tune: argparse.ArgumentParser) -> None:
    _add(tune, "model", _MODEL, metavar="MODEL")
    _add(tune, "--horizon", "decisions in the experiment", type=int, required=True)
    _add(tune, "--selectors", "candidates, as for run (default: every selector, and ogi at six patiences)")
    _add(tune, "--criterion", "mean, or a quantile such as 0.95", "mean")
    _add_engine(tune)
    _add(tune, "--num-worlds", "worlds that each candidate plays", 256)
    _add_workers(tune)
    _add_common(tune, out="ppl-bandit-tune", has_samples=True)


def _reproduce(reproduce: argparse.ArgumentParser) -> None:
    figures = "execution, correct-actions, bernoulli-regret, bernoulli-kl, linear-regret, linear-kl, claims (all)"
    _add(reproduce, "figures", figures, nargs="*", metavar="FIGURE")
    size = reproduce.add_mutually_exclusive_group()
    _add(size, "--quick", "fewer realizations: about 3 minutes on two cores (the default)", action="store_true")
    _add(size, "--full", "the paper's sizes, 5,000 realizations: use a GPU", action="store_true")
    _add_workers(reproduce)
    _add_common(reproduce, out="ppl-bandit-paper")


def _compare(compare: argparse.ArgumentParser) -> None:
    models = "one model: compare engines on it; several: rank them on the same rows, by log evidence and LOO"
    _add(compare, "models", models, nargs="+", metavar="MODEL")
    rows = compare.add_mutually_exclusive_group()
    _add(rows, "--data", "your rows: arm, outcome and context columns", type=Path, metavar="FILE.csv")
    _add(rows, "--simulate", "simulate N rows from the (first) model's truth", 200, metavar="N")
    _add(compare, "--play", "selector that plays simulated rows, such as ds (default: round robin)", metavar="SELECTOR")
    all_engines = (
        "exact,collapsed,nuts,svi,laplace,reweight; of latents that move: kalman,collapsed-kalman,particle-filter"
    )
    _add(compare, "--engines", f"for one model, comma-separated (all: {all_engines})", type=_names)
    _add(compare, "--arms", "names of the arms, in the program's order, comma-separated", type=_names)
    _add(compare, "--report", "write a self-contained HTML report too", action="store_true")
    _add_common(compare, out="ppl-bandit-compare", has_samples=True)


def _report(report: argparse.ArgumentParser) -> None:
    _add_table(report)
    report.set_defaults(propensity="none")  # a report needs none
    _add(report, "--html", "write one page with a figure, to open in a browser", type=Path, metavar="FILE")
    _add(report, "--save-model", "write the program that was used, to change it", type=Path, metavar="FILE.py")
    _add(report, "--more", "further rows after which to state the expected loss", type=int, nargs="+", metavar="N")


def _import(rows: argparse.ArgumentParser) -> None:
    _add_table(rows)
    _add(rows, "--journal", "path, sqlite:///path or postgresql://...", required=True, metavar="URL")
    _add(rows, "--name", "of the experiment in the journal (default)")


def _init(init: argparse.ArgumentParser) -> None:
    _add(init, "name", "a new folder, such as price-test", metavar="NAME")


def _add_table(parser: argparse.ArgumentParser) -> None:
    _add(parser, "table", "a header, and one row per play", type=Path, metavar="LOG.csv")
    _add(parser, "--arm", "which arm was played (found by names such as arm, variant)", metavar="COLUMN")
    _add_columns(parser)
    context = "columns known before the play: numbers or groups; region:groups for numbers that are codes"
    _add(parser, "--context", context, [], type=_names, metavar="A,B")
    _add(parser, "--kind", "of outcome (found)", choices=("binary", "counts", "positive", "real"))
    _add(parser, "--model", f"a program of your own: {_MODEL}", metavar="MODEL")


def _add_columns(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--arms", "names of the arms in a program's order (sorted)", type=_names, metavar="A,B")
    _add(parser, "--reward", "what it earned (found by names such as reward, converted)", metavar="COLUMN")
    _add(parser, "--value", "what it earned, arithmetic on columns: 'price*sold - 0.5'", metavar="EXPRESSION")
    propensity = (
        'probability of the arm that was played; "equal" if all arms had the same; "none" to look for no column'
    )
    _add(parser, "--propensity", propensity, metavar="COLUMN")


def _journal(journal: argparse.ArgumentParser) -> None:
    _add(journal, "url", "path of a journal, sqlite:///path or postgresql://...", metavar="URL")
    common = argparse.ArgumentParser(add_help=False)
    _add(common, "--name", "the experiment (default: the only one, or 'default')")
    _add(common, "--json", "print JSON", action="store_true")
    model = argparse.ArgumentParser(add_help=False)
    _add(model, "--model", f"the program: {_MODEL} (default: the one that the journal records)", metavar="MODEL")
    actions = journal.add_subparsers(dest="action", required=True, metavar="ACTION")
    status = actions.add_parser(
        "status",
        parents=[common, model],
        help="arms, counts, pending; with --model intervals, P(best) and expected loss of each arm",
    )
    actions.add_parser("look", parents=[common, model], help="take the look that is due by the design")
    _add(status, "--out", "write a figure of the posterior to this PNG file", type=Path)
    report = actions.add_parser("report", parents=[common, model], help="the answer in five lines")
    _add(report, "--more", "further decisions after which to state the expected loss", type=int, nargs="+", metavar="N")
    _add(report, "--out", "folder for report.html and report.png", type=Path)
    show = actions.add_parser("show", parents=[common], help="everything recorded about one decision")
    _add(show, "id", "the decision's id", metavar="ID")
    actions.add_parser("replay", parents=[common, model], help="recompute every decision")
    export = actions.add_parser("export", parents=[common], help="write a table: one row per decision")
    _add(export, "--to", "the format", choices=("csv", "parquet", "netcdf"), required=True)
    _add(export, "--out", "the file (NAME.csv, .parquet or .nc)", type=Path)
    pending = actions.add_parser("pending", parents=[common], help="decisions without a reward")
    alarms = actions.add_parser(
        "alarms",
        parents=[common, model],
        help="what is wrong with the experiment; with --model also what needs the program",
    )
    _add(alarms, "--missing", "tolerated share of rewards", 0.05, metavar="SHARE")
    _add(alarms, "--overdue-after", "pending rewards older than this are missing", type=float, metavar="SECONDS")
    erase = actions.add_parser("erase", parents=[common, model], help="erase a unit's name and contexts")
    _add(erase, "unit", "the unit, as it was given to select", metavar="UNIT")
    expire = actions.add_parser("expire", parents=[common, model], help="settle overdue decisions")
    _add(expire, "--older-than", "age (the experiment's reward_window)", type=float, metavar="SECONDS")
    _add(expire, "--reward", "their reward; without it, the default of the reward_window, or none", type=float)
    actions.add_parser("head", parents=[common], help="POSITION:DIGEST of the last event, to keep elsewhere")
    verify = actions.add_parser(
        "verify",
        parents=[common, model],
        help="check that no event was edited or removed, and with the program that stored posteriors follow from the events",
    )
    _add(verify, "--head", "an earlier output of `head`, to compare with", metavar="HEAD")
    _add(pending, "--older-than", "only decisions older than this", type=float, metavar="SECONDS")


def _evaluate(evaluate: argparse.ArgumentParser) -> None:
    _add(evaluate, "log", "a table, log.csv; or a journal: a path, sqlite:///path, postgresql://...", metavar="LOG")
    target = evaluate.add_mutually_exclusive_group()
    _add(target, "--arm", "what this arm earns (without a target: every arm)", metavar="ARM")
    _add(target, "--contrast", "how much more the first arm earns than the second", nargs=2, metavar="ARM")
    _add(target, "--selector", "what another selector earns on the logged path: ds, ts, top-two, ..., as for run")
    _add(target, "--against", "another program, to compare predictions and intervals with --model", metavar="MODEL")
    model = f"the program: {_MODEL} (without it, running means predict; of a table --selector and --against need it)"
    _add(evaluate, "--model", model, metavar="MODEL")
    _add(evaluate, "--arm-column", "of a table: which arm was played (found by usual names)", metavar="COLUMN")
    _add_columns(evaluate)
    _add(evaluate, "--name", "the experiment (default: the only one, or 'default')")
    _add(evaluate, "--outcome", "the outcome to evaluate, for a program with several")
    _add(evaluate, "--level", "of the intervals", 0.95)
    bounds = "smallest and largest possible reward, for a finite-sample confidence sequence"
    _add(evaluate, "--bounds", bounds, nargs=2, type=float, metavar=("LO", "HI"))
    _add(evaluate, "--html", "write one page with the figure, to open in a browser", type=Path, metavar="FILE")
    _add_common(evaluate, out="ppl-bandit-evaluate", has_seed=False)


def _design(design: argparse.ArgumentParser) -> None:
    _add(design, "model", _MODEL, metavar="MODEL")
    _add(design, "--looks", "numbers of decisions: 100,200,300 or first:last:step", required=True)
    rules = (
        "superiority:P, inferiority:P, equivalence:P:DELTA, futility:P:DELTA, expected_loss:BELOW; repeat for several"
    )
    _add(design, "--stop", rules, [], action="append", metavar="RULE")
    _add(design, "--calibrate", "find superiority's threshold for this type I error", type=float, metavar="ERROR")
    scenario = (
        "true values of the latents: NAME=V,V,... or NAME=SITE:V,V;SITE:V, or NAME=prior; --calibrate uses the one named null "
        "(default: the file's truth, and worlds from the prior)"
    )
    _add(design, "--scenario", scenario, [], action="append", metavar="NAME=VALUES")
    _add(design, "--selector", "equal shares, or a selector as for run", "equal")
    allocation = "decide each time, or fix probabilities between looks"
    _add(design, "--allocation", allocation, "each", choices=["each", "looks"])
    _add(design, "--arms", "names of the arms, in the program's order, comma-separated", type=_names)
    _add(design, "--control", "name of the control arm (needs --arms), or its number from 0", metavar="ARM")
    _add(design, "--control-share", 'the control\'s share: a probability, or "sqrt"')
    _add(design, "--floor", "least probability of an arm", 0.0)
    _add(design, "--cap", "greatest probability of an arm", 1.0)
    _add(design, "--softening", "power of the probabilities", 1.0)
    _add(design, "--lag", "last decisions without outcome at a look", 0, type=_whole)
    _add(design, "--burn-in", "decisions shared equally at the start", 0, type=_whole)
    _add(design, "--max-rows", "decisions in all; the last look waits for all outcomes", type=_whole)
    _add(design, "--trials", "simulated trials per scenario", 10_000)
    _add_workers(design)
    _add_common(design, out="ppl-bandit-design")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    _add(place, "--workers", "simulate in N processes (default: this one, all cores)", type=_whole, metavar="N")
    _add(place, "--dask", "simulate on the workers of this Dask scheduler (extra dask)", metavar="ADDRESS")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    names = "auto, exact, collapsed, reweight, nuts, svi, laplace; if latents move kalman, collapsed-kalman, particle-filter"
    _add(parser, "--engine", names, "auto")


def _serve(serve: argparse.ArgumentParser) -> None:
    _add(serve, "model", f"{_MODEL}; or a file of several experiments, path/to/file.toml", metavar="MODEL")
    _add(serve, "--journal", "path, sqlite:///path or postgresql://... (ppl_bandit.db)", metavar="URL")
    _add(serve, "--name", "of the experiment, in the address and in the journal (default)")
    _add(serve, "--selector", "double_sampling, thompson, top_two, ... (double_sampling)")
    changed = (
        "continue an experiment with another program, other settings or another version of JAX, and record the change"
    )
    _add(serve, "--allow-changed", changed, action="store_true")
    role = (
        "all: decide and learn in this process; learner: also publish to deciders, and record their decisions; decider: decide "
        "only; the last two need a journal in PostgreSQL"
    )
    _add(serve, "--role", role, "all", choices=("all", "learner", "decider"))
    _add(serve, "--host", "address to listen on; another than loopback needs --keys", "127.0.0.1")
    _add(serve, "--port", "", 8000, type=_whole)
    _add(serve, "--keys", "keys made with `ppl-bandit keys create`", type=Path, metavar="FILE")
    _add(serve, "--proxies", "addresses of proxies whose X-Forwarded headers are believed", "127.0.0.1")


def _keys(keys: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    _add(common, "--file", "the file of keys", Path("keys.toml"))
    _add(common, "--json", "print JSON", action="store_true")
    actions = keys.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", parents=[common], help="make a key, which is printed once")
    _add(create, "--role", "what it opens", choices=("decide", "read", "admin"), required=True)
    _add(create, "--experiment", "bind it to an experiment; may be repeated", action="append", metavar="NAME")
    actions.add_parser("list", parents=[common], help="ids, roles and experiments")
    revoke = actions.add_parser("revoke", parents=[common], help="remove a key")
    _add(revoke, "id", "of the key, from `list`", metavar="ID")


def _add_common(parser: argparse.ArgumentParser, *, out: str, has_seed: bool = True, has_samples: bool = False) -> None:
    if has_samples:
        _add(parser, "--samples", "posterior draws M per decision", 1000)
    if has_seed:
        _add(parser, "--seed", "random seed", 0, type=_seed)
    _add(parser, "--out", "folder for the files", Path(out), type=Path)


def _add(parser: Any, name: str, text: str, default: Any = None, **more: Any) -> None:
    """Add an argument with its help; a default is shown there, and its type is that of the argument."""
    if isinstance(default, int | float | str | Path):
        text, more = f"{text} (%(default)s)".strip(), {"type": type(default)} | more
    if default is not None:
        more["default"] = default
    parser.add_argument(name, help=text, **more)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _seed(text: str) -> int:
    value = _whole(text)
    if value >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is too large: give a whole number below 2**32")
    return value


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
