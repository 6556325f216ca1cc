"""Command-line arguments of every command.

This module imports neither jax nor the commands, so `--help` and refused arguments answer at once.
"""

import argparse
from importlib.metadata import version
from pathlib import Path

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
        describe(commands.add_parser(name, help=text))
    return parser


def _demo(demo: argparse.ArgumentParser) -> None:
    _add_common(demo, out="ppl-bandit-demo")


def _check(check: argparse.ArgumentParser) -> None:
    check.add_argument("models", nargs="+", metavar="MODEL", help=_MODEL)
    check.add_argument("--explain", action="store_true", help="print the full report of each model")
    check.add_argument("--json", action="store_true", help="print the results as JSON")


def _run(run: argparse.ArgumentParser) -> None:
    run.add_argument("model", metavar="MODEL", help=_MODEL)
    run.add_argument(
        "--selectors",
        default="ds,ts",
        help="comma-separated: ds (double sampling), ds-lowest and ds-exact (variants of it), ts (Thompson sampling), bucb "
        "(Bayesian upper confidence bounds), greedy, top-two, ids (information-directed sampling), ogi or ogi:PATIENCE "
        "(optimistic Gittins index) (%(default)s)",
    )
    _add_engine(run)
    run.add_argument("--steps", type=int, default=1000, help="decisions per realization (%(default)s)")
    run.add_argument("--horizon", type=int, help="horizon given to ogi (default: --steps)")
    run.add_argument(
        "--worlds",
        choices=["truth", "prior"],
        default="truth",
        help="simulate the file's truth, or draw new latents from the prior for every realization (%(default)s)",
    )
    run.add_argument("--realizations", type=int, default=1000, help="independent repetitions (%(default)s)")
    run.add_argument("--devices", type=_whole, metavar="N", help="spread realizations over N devices; 0 for all")
    _add_workers(run)
    _add_common(run, out="ppl-bandit-run", has_samples=True)


def _tune(tune: argparse.ArgumentParser) -> None:
    tune.add_argument("model", metavar="MODEL", help=_MODEL)
    tune.add_argument("--horizon", type=int, required=True, help="decisions in the experiment")
    tune.add_argument("--selectors", help="candidates, as for run (default: every selector, and ogi at six patiences)")
    tune.add_argument("--criterion", default="mean", help="mean, or a quantile such as 0.95 (%(default)s)")
    _add_engine(tune)
    tune.add_argument("--num-worlds", type=int, default=256, help="worlds that each candidate plays (%(default)s)")
    _add_workers(tune)
    _add_common(tune, out="ppl-bandit-tune", has_samples=True)


def _reproduce(reproduce: argparse.ArgumentParser) -> None:
    reproduce.add_argument(
        "figures",
        nargs="*",
        metavar="FIGURE",
        help="execution, correct-actions, bernoulli-regret, bernoulli-kl, linear-regret, linear-kl, claims (all)",
    )
    size = reproduce.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        action="store_true",
        help="fewer realizations: about 3 minutes on two cores (the default)",
    )
    size.add_argument("--full", action="store_true", help="the paper's sizes, 5,000 realizations: use a GPU")
    _add_workers(reproduce)
    _add_common(reproduce, out="ppl-bandit-paper")


def _compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="one model: compare engines on it; several: rank them on the same rows, by log evidence and LOO",
    )
    rows = compare.add_mutually_exclusive_group()
    rows.add_argument("--data", type=Path, metavar="FILE.csv", help="your rows: arm, outcome and context columns")
    rows.add_argument(
        "--simulate",
        type=int,
        default=200,
        metavar="N",
        help="simulate N rows from the (first) model's truth (%(default)s)",
    )
    compare.add_argument(
        "--play", metavar="SELECTOR", help="selector that plays simulated rows, such as ds or ts (default: round robin)"
    )
    compare.add_argument(
        "--engines",
        type=_names,
        help="for one model, comma-separated (all: exact,collapsed,nuts,svi,laplace,reweight; of latents that move: "
        "kalman,collapsed-kalman,particle-filter)",
    )
    compare.add_argument("--arms", type=_names, help="names of the arms, in the program's order, comma-separated")
    compare.add_argument("--report", action="store_true", help="write a self-contained HTML report too")
    _add_common(compare, out="ppl-bandit-compare", has_samples=True)


def _report(report: argparse.ArgumentParser) -> None:
    _add_table(report)
    report.set_defaults(propensity="none")  # a report needs none
    report.add_argument("--html", type=Path, metavar="FILE", help="write one page with a figure, to open in a browser")
    report.add_argument(
        "--save-model", type=Path, metavar="FILE.py", help="write the program that was used, to change it"
    )
    report.add_argument(
        "--more", type=int, nargs="+", metavar="N", help="further rows after which to state the expected loss"
    )
    report.add_argument("--json", action="store_true", help="print the results as JSON")


def _import(rows: argparse.ArgumentParser) -> None:
    _add_table(rows)
    rows.add_argument("--journal", required=True, metavar="URL", help="path, sqlite:///path or postgresql://...")
    rows.add_argument("--name", help="of the experiment in the journal (default)")
    rows.add_argument("--json", action="store_true", help="print the results as JSON")


def _init(init: argparse.ArgumentParser) -> None:
    init.add_argument("name", metavar="NAME", help="a new folder, such as price-test")
    init.add_argument("--json", action="store_true", help="print the results as JSON")


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", type=Path, metavar="LOG.csv", help="a header, and one row per play")
    parser.add_argument("--arm", metavar="COLUMN", help="which arm was played (found by names such as arm, variant)")
    _add_columns(parser)
    parser.add_argument(
        "--context",
        type=_names,
        default=[],
        metavar="A,B",
        help="columns known before the play: numbers or groups; region:groups for numbers that are codes",
    )
    parser.add_argument("--kind", choices=("binary", "counts", "positive", "real"), help="of outcome (found)")
    parser.add_argument("--model", metavar="MODEL", help=f"a program of your own: {_MODEL}")


def _add_columns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arms", type=_names, metavar="A,B", help="names of the arms in a program's order (sorted)")
    parser.add_argument("--reward", metavar="COLUMN", help="what it earned (found by names such as reward, converted)")
    parser.add_argument(
        "--value", metavar="EXPRESSION", help="what it earned, arithmetic on columns: 'price*sold - 0.5'"
    )
    parser.add_argument(
        "--propensity",
        metavar="COLUMN",
        help='probability of the arm that was played; "equal" if all arms had the same; "none" to look for no column',
    )


def _journal(journal: argparse.ArgumentParser) -> None:
    journal.add_argument("url", metavar="URL", help="path of a journal, sqlite:///path or postgresql://...")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", help="the experiment (default: the only one, or 'default')")
    common.add_argument("--json", action="store_true", help="print JSON")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument(
        "--model", metavar="MODEL", help=f"the program: {_MODEL} (default: the one that the journal records)"
    )
    actions = journal.add_subparsers(dest="action", required=True, metavar="ACTION")
    status = actions.add_parser(
        "status",
        parents=[common, model],
        help="arms, counts, pending; with --model intervals, P(best) and expected loss of each arm",
    )
    actions.add_parser("look", parents=[common, model], help="take the look that is due by the design")
    status.add_argument("--out", type=Path, help="with --model: write a figure of the posterior to this PNG file")
    report = actions.add_parser("report", parents=[common, model], help="the answer in five lines")
    report.add_argument(
        "--more", type=int, nargs="+", metavar="N", help="further decisions after which to state the expected loss"
    )
    report.add_argument("--out", type=Path, help="folder for report.html and report.png")
    show = actions.add_parser("show", parents=[common], help="everything recorded about one decision")
    show.add_argument("id", metavar="ID", help="the decision's id")
    actions.add_parser("replay", parents=[common, model], help="recompute every decision")
    export = actions.add_parser("export", parents=[common], help="write a table: one row per decision")
    export.add_argument("--to", choices=("csv", "parquet", "netcdf"), required=True, help="the format")
    export.add_argument("--out", type=Path, help="the file (NAME.csv, .parquet or .nc)")
    pending = actions.add_parser("pending", parents=[common], help="decisions without a reward")
    alarms = actions.add_parser(
        "alarms",
        parents=[common, model],
        help="what is wrong with the experiment; with --model also what needs the program",
    )
    alarms.add_argument(
        "--missing", type=float, default=0.05, metavar="SHARE", help="tolerated share of rewards (%(default)s)"
    )
    alarms.add_argument(
        "--overdue-after", type=float, metavar="SECONDS", help="pending rewards older than this are missing"
    )
    erase = actions.add_parser("erase", parents=[common, model], help="erase a unit's name and contexts")
    erase.add_argument("unit", metavar="UNIT", help="the unit, as it was given to select")
    expire = actions.add_parser("expire", parents=[common, model], help="settle overdue decisions")
    expire.add_argument("--older-than", type=float, metavar="SECONDS", help="age (the experiment's reward_window)")
    expire.add_argument(
        "--reward", type=float, help="their reward; without it, the default of the reward_window, or none"
    )
    actions.add_parser("head", parents=[common], help="POSITION:DIGEST of the last event, to keep elsewhere")
    verify = actions.add_parser(
        "verify",
        parents=[common, model],
        help="check that no event was edited or removed, and with the program that stored posteriors follow from the events",
    )
    verify.add_argument("--head", metavar="HEAD", help="an earlier output of `head`, to compare with")
    pending.add_argument("--older-than", type=float, metavar="SECONDS", help="only decisions older than this")


def _evaluate(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument(
        "log", metavar="LOG", help="a table, log.csv; or a journal: a path, sqlite:///path, postgresql://..."
    )
    target = evaluate.add_mutually_exclusive_group()
    target.add_argument("--arm", metavar="ARM", help="what this arm earns (without a target: every arm)")
    target.add_argument("--contrast", nargs=2, metavar="ARM", help="how much more the first arm earns than the second")
    target.add_argument(
        "--selector", help="what another selector earns on the logged path: ds, ts, top-two, ..., as for run"
    )
    target.add_argument(
        "--against",
        metavar="MODEL",
        help="another program: compare its predictions and intervals with those of --model",
    )
    evaluate.add_argument(
        "--model",
        metavar="MODEL",
        help=f"the program: {_MODEL} (without it, outcomes are predicted by running means; "
        "of a table --selector and --against need it)",
    )
    evaluate.add_argument(
        "--arm-column", metavar="COLUMN", help="of a table: which arm was played (found by usual names)"
    )
    _add_columns(evaluate)
    evaluate.add_argument("--name", help="the experiment (default: the only one, or 'default')")
    evaluate.add_argument("--outcome", help="the outcome to evaluate, for a program with several")
    evaluate.add_argument("--level", type=float, default=0.95, help="of the intervals (%(default)s)")
    evaluate.add_argument(
        "--bounds",
        nargs=2,
        type=float,
        metavar=("LO", "HI"),
        help="smallest and largest possible reward, for a finite-sample confidence sequence",
    )
    evaluate.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page with the figure, to open in a browser"
    )
    _add_common(evaluate, out="ppl-bandit-evaluate", has_seed=False)


def _design(design: argparse.ArgumentParser) -> None:
    design.add_argument("model", metavar="MODEL", help=_MODEL)
    design.add_argument("--looks", required=True, help="numbers of decisions: 100,200,300 or first:last:step")
    design.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="RULE",
        help="superiority:P, inferiority:P, equivalence:P:DELTA, futility:P:DELTA or expected_loss:BELOW; repeat for several",
    )
    design.add_argument(
        "--calibrate", type=float, metavar="ERROR", help="find superiority's threshold for this type I error"
    )
    design.add_argument(
        "--scenario",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="true values of the latents: NAME=V,V,... or NAME=SITE:V,V;SITE:V, or NAME=prior; --calibrate uses the one "
        "named null (default: the file's truth, and worlds from the prior)",
    )
    design.add_argument("--selector", default="equal", help="equal shares, or a selector as for run (%(default)s)")
    design.add_argument(
        "--allocation",
        choices=["each", "looks"],
        default="each",
        help="decide each time, or fix probabilities between looks (%(default)s)",
    )
    design.add_argument("--arms", type=_names, help="names of the arms, in the program's order, comma-separated")
    design.add_argument("--control", metavar="ARM", help="name of the control arm (needs --arms), or its number from 0")
    design.add_argument("--control-share", help='the control\'s share: a probability, or "sqrt"')
    design.add_argument("--floor", type=float, default=0.0, help="least probability of an arm (%(default)s)")
    design.add_argument("--cap", type=float, default=1.0, help="greatest probability of an arm (%(default)s)")
    design.add_argument("--softening", type=float, default=1.0, help="power of the probabilities (%(default)s)")
    design.add_argument("--lag", type=_whole, default=0, help="last decisions without outcome at a look (%(default)s)")
    design.add_argument("--burn-in", type=_whole, default=0, help="decisions shared equally at the start (%(default)s)")
    design.add_argument("--max-rows", type=_whole, help="decisions in all; the last look waits for all outcomes")
    design.add_argument("--trials", type=int, default=10_000, help="simulated trials per scenario (%(default)s)")
    _add_workers(design)
    _add_common(design, out="ppl-bandit-design")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--workers", type=_whole, metavar="N", help="simulate in N processes (default: this one, all cores)"
    )
    place.add_argument("--dask", metavar="ADDRESS", help="simulate on the workers of this Dask scheduler (extra dask)")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        default="auto",
        help="auto, exact, collapsed, reweight, nuts, svi or laplace; of latents that move: kalman, collapsed-kalman or "
        "particle-filter (%(default)s)",
    )


def _serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("model", metavar="MODEL", help=f"{_MODEL}; or a file of several experiments, path/to/file.toml")
    serve.add_argument("--journal", metavar="URL", help="path, sqlite:///path or postgresql://... (ppl_bandit.db)")
    serve.add_argument("--name", help="of the experiment, in the address and in the journal (default)")
    serve.add_argument("--selector", help="double_sampling, thompson, top_two, ... (double_sampling)")
    serve.add_argument(
        "--allow-changed",
        action="store_true",
        help="continue an experiment with another program, other settings or another version of JAX, and record the change",
    )
    serve.add_argument(
        "--role",
        choices=("all", "learner", "decider"),
        default="all",
        help="all: decide and learn in this process; learner: also publish to deciders, and record their decisions; decider: "
        "decide only; the last two need a journal in PostgreSQL (%(default)s)",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; another than loopback needs --keys")
    serve.add_argument("--port", type=_whole, default=8000, help="(%(default)s)")
    serve.add_argument("--keys", type=Path, metavar="FILE", help="keys made with `ppl-bandit keys create`")
    serve.add_argument(
        "--proxies",
        default="127.0.0.1",
        help="addresses of proxies whose X-Forwarded headers are believed (%(default)s)",
    )
    serve.add_argument("--json", action="store_true", help="print the experiments as JSON at the end")


def _keys(keys: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--file", type=Path, default=Path("keys.toml"), help="the file of keys (%(default)s)")
    common.add_argument("--json", action="store_true", help="print JSON")
    actions = keys.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", parents=[common], help="make a key, which is printed once")
    create.add_argument("--role", choices=("decide", "read", "admin"), required=True, help="what it opens")
    create.add_argument(
        "--experiment", action="append", metavar="NAME", help="bind it to an experiment; may be repeated"
    )
    actions.add_parser("list", parents=[common], help="ids, roles and experiments")
    revoke = actions.add_parser("revoke", parents=[common], help="remove a key")
    revoke.add_argument("id", metavar="ID", help="of the key, from `list`")


def _add_common(parser: argparse.ArgumentParser, *, out: str, has_seed: bool = True, has_samples: bool = False) -> None:
    if has_samples:
        parser.add_argument("--samples", type=int, default=1000, help="posterior draws M per decision (%(default)s)")
    if has_seed:
        parser.add_argument("--seed", type=_seed, default=0, help="random seed (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for the files (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


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
