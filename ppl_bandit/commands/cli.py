"""The command line: words become objects, results become lines, JSON and exit codes.

Exit status: 0 for success, 2 for a mistake of the caller's (an invalid program, a missing file, bad arguments), 130 for an
interruption (Ctrl-C), after which what is done is kept.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from ppl_bandit.commands.journal_arguments import add_arguments as add_journal_arguments

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppl-bandit", description="Write the reward model as a NumPyro program; get the bandit."
    )
    parser.add_argument("--version", action="version", version=f"ppl_bandit {version('ppl_bandit')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="prove, play and draw some bundled conjugate models (about a minute)")
    demo.add_argument("--out", type=Path, default=Path("ppl-bandit-demo"), help="folder for the figure (%(default)s)")
    demo.add_argument("--seed", type=_seed, default=0, help="seed of the simulated plays (%(default)s)")
    demo.add_argument("--json", action="store_true", help="print results as JSON")
    demo.set_defaults(run=_demo)

    check = commands.add_parser("check", help="say of each model whether its posterior is exact, and why")
    check.add_argument(
        "models", nargs="+", metavar="MODEL", help="path/to/file.py, file.py:function, or the name of a bundled model"
    )
    check.add_argument("--json", action="store_true", help="print findings as JSON")
    check.add_argument("--explain", action="store_true", help="print the whole account of each model")
    check.set_defaults(run=_check)

    run = commands.add_parser("run", help="simulate selectors on a model at its truth: table, figures, data")
    run.add_argument("model", metavar="MODEL", help="path/to/file.py, file.py:function, or the name of a bundled model")
    run.add_argument(
        "--selectors",
        default="ds,ts",
        help="separated by commas: ds,ds-lowest,ds-exact,ts,bucb,greedy,top-two,ids,ogi or ogi:PATIENCE (%(default)s)",
    )
    run.add_argument(
        "--engine", default="auto", help="auto, exact, collapsed, reweight, nuts, svi or laplace (%(default)s)"
    )
    run.add_argument("--steps", type=int, default=1000, help="decisions in a realization (%(default)s)")
    run.add_argument("--horizon", type=int, help="decisions that ogi is told of (default: --steps)")
    run.add_argument(
        "--worlds",
        choices=["truth", "prior"],
        default="truth",
        help="the file's truth, or a new world from the prior for every realization (%(default)s)",
    )
    run.add_argument("--realizations", type=int, default=1000, help="independent repetitions (%(default)s)")
    run.add_argument("--samples", type=int, default=1000, help="posterior draws M behind a decision (%(default)s)")
    run.add_argument("--seed", type=_seed, default=0, help="seed of all random numbers (%(default)s)")
    run.add_argument("--devices", type=_whole, metavar="N", help="spread realizations over N devices; 0 for all")
    run.add_argument("--out", type=Path, default=Path("ppl-bandit-run"), help="folder for files (%(default)s)")
    run.add_argument("--json", action="store_true", help="print the table as JSON")
    run.set_defaults(run=_run)

    tuning = commands.add_parser(
        "tune", help="find the selector with the least regret in worlds from the model's prior"
    )
    tuning.add_argument(
        "model", metavar="MODEL", help="path/to/file.py, file.py:function, or the name of a bundled model"
    )
    tuning.add_argument("--horizon", type=int, required=True, help="decisions in the experiment")
    tuning.add_argument("--selectors", help="candidates, as for run (default: all, and a ladder of patience)")
    tuning.add_argument("--criterion", default="mean", help="mean, or a quantile such as 0.95 (%(default)s)")
    tuning.add_argument(
        "--engine", default="auto", help="auto, exact, collapsed, reweight, nuts, svi or laplace (%(default)s)"
    )
    tuning.add_argument(
        "--doubt",
        type=float,
        default=1.0,
        help="how many times too narrow or too wide the prior may be: also plays worlds of such priors (%(default)s)",
    )
    tuning.add_argument("--num-worlds", type=int, default=512, help="worlds of the last round, at most (%(default)s)")
    tuning.add_argument(
        "--tolerance",
        type=float,
        default=0.06,
        help="end when the candidates' differences are known to this share of the least regret; 0 plays all (%(default)s)",
    )
    tuning.add_argument("--samples", type=int, default=1000, help="posterior draws M behind a decision (%(default)s)")
    tuning.add_argument("--seed", type=_seed, default=0, help="seed of all random numbers (%(default)s)")
    tuning.add_argument("--out", type=Path, default=Path("ppl-bandit-tune"), help="folder for files (%(default)s)")
    tuning.add_argument("--json", action="store_true", help="print the table as JSON")
    tuning.set_defaults(run=_tune)

    reproduce = commands.add_parser(
        "reproduce", help="run the paper's evaluation: its figures, and a verdict on each number"
    )
    reproduce.add_argument(
        "figures",
        nargs="*",
        metavar="FIGURE",
        help="execution, correct-actions, bernoulli-regret, bernoulli-kl, linear-regret, linear-kl (all)",
    )
    size = reproduce.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer realizations: minutes on two cores (the default)")
    size.add_argument("--full", action="store_true", help="the paper's sizes, 5,000 realizations: meant for a GPU")
    reproduce.add_argument("--seed", type=_seed, default=0, help="seed of all random numbers (%(default)s)")
    reproduce.add_argument("--out", type=Path, default=Path("ppl-bandit-paper"), help="folder for files (%(default)s)")
    reproduce.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    reproduce.set_defaults(run=_reproduce)

    bench = commands.add_parser(
        "bench", help="measure live steps, batches and start-up, beside the peers that are installed"
    )
    bench.add_argument(
        "--cases", default="bernoulli,linear,bernoulli-100", help="problems, separated by commas (%(default)s)"
    )
    bench.add_argument("--parts", default="live,batches,start", help="some of live,batches,growth,start (%(default)s)")
    bench.add_argument("--steps", type=int, default=400, help="live steps of each contestant (%(default)s)")
    bench.add_argument("--samples", type=int, default=1000, help="posterior draws M behind a decision (%(default)s)")
    bench.add_argument("--out", type=Path, default=Path("ppl-bandit-bench"), help="folder for files (%(default)s)")
    bench.add_argument("--json", action="store_true", help="print results as JSON")
    bench.set_defaults(run=_bench)

    compare = commands.add_parser("compare", help="measure engines against the exact posterior, or rank several models")
    compare.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="one model compares engines on it; several are ranked on the same rows, by log evidence and LOO",
    )
    rows = compare.add_mutually_exclusive_group()
    rows.add_argument(
        "--data", type=Path, metavar="FILE.csv", help="rows of your own: arm, outcome and context columns"
    )
    rows.add_argument(
        "--simulate", type=int, default=200, metavar="N", help="rows of the (first) model at its truth (%(default)s)"
    )
    compare.add_argument(
        "--play", metavar="SELECTOR", help="who plays simulated rows, such as ds or ts (default: the arms in turn)"
    )
    compare.add_argument(
        "--engines", help="for one model, separated by commas (all: exact,collapsed,nuts,svi,laplace,reweight)"
    )
    compare.add_argument("--arms", help="names of the arms, in the program's order, separated by commas")
    compare.add_argument("--samples", type=int, default=1000, help="posterior draws of each run (%(default)s)")
    compare.add_argument("--seed", type=_seed, default=0, help="seed of all random numbers (%(default)s)")
    compare.add_argument("--out", type=Path, default=Path("ppl-bandit-compare"), help="folder for files (%(default)s)")
    compare.add_argument("--report", action="store_true", help="write a self-contained HTML report too")
    compare.add_argument("--json", action="store_true", help="print results as JSON")
    compare.set_defaults(run=_compare)

    journal = commands.add_parser("journal", help="look at a recorded experiment, ask about a decision, replay, export")
    add_journal_arguments(journal)
    journal.set_defaults(run=_journal)
    return parser


def _seed(text: str) -> int:
    """Read a seed: what jax takes as one."""
    value = _whole(text)
    if value >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is too large: give a whole number below 2**32")
    return value


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    from ppl_bandit.commands.run import run_model
    from ppl_bandit.simulation.scores import table

    try:
        scored, engine, is_complete = run_model(
            arguments.model,
            arguments.selectors.split(","),
            arguments.out,
            engine=arguments.engine,
            num_steps=arguments.steps,
            num_realizations=arguments.realizations,
            num_samples=arguments.samples,
            seed=arguments.seed,
            devices=arguments.devices,
            progress=not arguments.json,
            horizon=arguments.horizon,
            worlds=arguments.worlds,
        )
    except KeyboardInterrupt:
        print("ppl-bandit run: interrupted before any realization was done", file=sys.stderr)
        _leave(130)
    except (ValueError, OSError) as error:
        print(f"ppl-bandit run: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        rows = [{name: None if value != value else value for name, value in s._asdict().items()} for s in scored]
        print(json.dumps({"engine": engine, "scores": rows, "out": str(arguments.out)}, indent=2))
    else:
        print(f"{table(scored)}\n\n{engine} engine; wrote table.md, runs.nc and figures to {arguments.out}")
    return 0 if is_complete else _leave(130)


def _leave(status: int) -> NoReturn:
    """End the process at once: an interrupted computation in another thread cannot be stopped, and is not waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _tune(arguments: argparse.Namespace) -> int:
    from ppl_bandit.commands.tune import tune_model

    try:
        tuned, code = tune_model(
            arguments.model,
            arguments.out,
            horizon=arguments.horizon,
            names=None if arguments.selectors is None else arguments.selectors.split(","),
            criterion=arguments.criterion,
            doubt=arguments.doubt,
            engine=arguments.engine,
            num_worlds=arguments.num_worlds,
            tolerance=arguments.tolerance,
            num_samples=arguments.samples,
            seed=arguments.seed,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (ValueError, OSError) as error:
        print(f"ppl-bandit tune: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        rows = [
            {name: None if value != value else value for name, value in s._asdict().items()} for s in tuned.standings
        ]
        print(json.dumps({"best": tuned.code, "standings": rows, "out": str(arguments.out)}, indent=2))
    else:
        print(f"{tuned}\n\n{code}\n\nwrote tune.md and tune.png to {arguments.out}")
    return 0


def _reproduce(arguments: argparse.Namespace) -> int:
    from ppl_bandit.commands.reproduce import reproduce

    say = _silent if arguments.json else _say
    shows = not arguments.json and sys.stderr.isatty()
    try:
        findings = reproduce(
            arguments.figures, arguments.out, is_full=arguments.full, seed=arguments.seed, say=say, progress=shows
        )
    except (ValueError, OSError) as error:
        print(f"ppl-bandit reproduce: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        rows = [{**f.number._asdict(), "ours": f.ours, "our_error": f.error, "verdict": f.verdict} for f in findings]
        print(json.dumps(rows, indent=2))
        return 0
    for f in findings:
        print(
            f"{f.number.setting:<16} {f.number.policy:<29} {f.number.source:<9} {f.number.value:6.2f} +- {f.number.error:.2f}  "
            f"ours {f.ours:6.2f} +- {f.error:.2f}  {f.verdict}"
        )
    print(f"\nwrote reproduction.md, figures and data to {arguments.out}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from ppl_bandit.commands.compare import compare_from_arguments

    try:
        is_complete = compare_from_arguments(arguments, _say, lambda line: print(line, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print("ppl-bandit compare: interrupted before any engine was done", file=sys.stderr)
        _leave(130)
    except (ValueError, OSError) as error:
        print(f"ppl-bandit compare: {error}", file=sys.stderr)
        return 2
    return 0 if is_complete else _leave(130)


def _bench(arguments: argparse.Namespace) -> int:
    from ppl_bandit.commands.bench import BenchOptions, run_bench, words

    options = BenchOptions(arguments.cases.split(","), arguments.steps, arguments.samples, arguments.parts.split(","))
    try:
        found = run_bench(options, arguments.out, lambda line: print(line, file=sys.stderr, flush=True))
    except (ValueError, OSError) as error:
        print(f"ppl-bandit bench: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(found._asdict(), indent=2))
    else:
        print(f"{words(found)}\n\nwrote bench.json, bench.md and bench.png to {arguments.out}")
    return 0


def _journal(arguments: argparse.Namespace) -> int:
    from ppl_bandit.commands.journal import run_journal
    from ppl_bandit.journal.stores.contract import JournalError

    try:
        result, status = run_journal(arguments, _silent if arguments.json else _say)
    except (ValueError, OSError, JournalError) as error:
        print(f"ppl-bandit journal: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(result, indent=2))
    return status


def _demo(arguments: argparse.Namespace) -> int:
    from ppl_bandit.commands.demo import run_demo

    say = _silent if arguments.json else _say
    results = run_demo(arguments.out, say, arguments.seed)
    figure = arguments.out / "demo.png"
    if arguments.json:
        models = [{"name": r.name, "is_exact": True, "families": r.families, "regret": r.regret} for r in results]
        print(json.dumps({"models": models, "figure": str(figure)}, indent=2))
    else:
        print(f"\nwrote {figure}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from ppl_bandit.commands.check import check_model

    findings = []
    for spec in _progress(arguments.models, is_shown=not arguments.json):
        finding = check_model(spec)
        findings.append(finding)
        if not arguments.json:
            print(f"{finding.name:<24} {finding.verdict:<9} {finding.families or finding.reason}", flush=True)
            if arguments.explain and finding.report:
                print(finding.report, end="\n\n")
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    return 2 if any(finding.verdict == "invalid" for finding in findings) else 0


def _progress(items: list[str], is_shown: bool) -> Sequence[str]:
    if not is_shown or len(items) < 2 or not sys.stderr.isatty():
        return items
    from tqdm import tqdm

    return tqdm(items, unit="model", leave=False)


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    del line
