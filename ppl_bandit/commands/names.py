"""Names of engines, selectors and experiments on the command line."""

import argparse
import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor

from ppl_bandit import engines, selectors
from ppl_bandit.journal.journal import Journal
from ppl_bandit.types import Engine, Selector

ENGINES: Mapping[str, Callable[..., Engine]] = {
    "exact": engines.conjugate,
    "collapsed": engines.collapsed,
    "nuts": engines.nuts,
    "svi": engines.svi,
    "laplace": engines.laplace,
    "reweight": engines.reweight,
}
MOVING_ENGINES: Mapping[str, Callable[..., Engine]] = {
    "kalman": engines.kalman,
    "collapsed-kalman": engines.collapsed_kalman,
    "particle-filter": engines.particle_filter,
}
SELECTORS: Mapping[str, tuple[str, Callable[[], Selector]]] = {  # {name: (label in tables, factory)}
    "ds": ("double sampling", selectors.double_sampling),
    "ds-lowest": ("double sampling, ties lowest", lambda: selectors.double_sampling(ties="lowest")),
    "ds-exact": ("double sampling, exact P(best)", lambda: selectors.double_sampling(exact=True)),
    "ts": ("Thompson", selectors.thompson),
    "bucb": ("Bayes-UCB", selectors.bayes_ucb),
    "greedy": ("greedy", selectors.greedy),
    "top-two": ("top-two", selectors.top_two),
    "ids": ("information-directed", selectors.information_directed),
}
_GITTINS = "ogi"  # needs the horizon, and takes a patience: ogi:0.1


def engine_factory(name: str) -> Callable[..., Engine]:
    """Return the factory of an engine; "auto" chooses one for the program.

    Raises:
        ValueError: if the name is unknown.
    """
    factories = {"auto": engines.choose, **ENGINES, **MOVING_ENGINES}
    check_names([name], factories, "--engine")
    return factories[name]


def make_selectors(names: Iterable[str], horizon: int, argument: str = "--selectors") -> dict[str, Selector]:
    """Return {label in tables: selector}; ogi may be followed by a patience, as in ogi:0.1.

    Args:
        argument: named in errors.

    Raises:
        ValueError: if a name is unknown, or a patience is not a number.
    """
    chosen = {}
    for name in names:
        stem, _, digits = name.partition(":")
        check_names([stem], [*SELECTORS, _GITTINS], argument)
        if stem != _GITTINS and not digits:
            label, make = SELECTORS[stem]
            chosen[label] = make()
            continue
        try:
            patience = float(digits) if digits else 1.0
        except ValueError:
            patience = None
        if stem != _GITTINS or patience is None:
            raise ValueError(f"{argument} has {name!r}: only ogi takes a number, its patience, as in ogi:0.1")
        label = "optimistic Gittins" + (f", patience {patience:g}" if digits else "")
        chosen[label] = selectors.optimistic_gittins(horizon, patience)
    return chosen


def find_experiment(journal: Journal, given: str | None) -> str:
    """Return the name of an experiment: the given one; without one, the only one of the journal, or "default".

    Raises:
        JournalError: if there is no such experiment.
    """
    known = journal.experiments()
    if given is None and len(known) == 1:
        return known[0]
    name = "default" if given is None else given
    journal.store.check_name(name)
    return name


def check_names(names: Iterable[str], known: Iterable[str], argument: str) -> None:
    """Refuse unknown names.

    Raises:
        ValueError: with the argument, the name and the known names.
    """
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{argument} has {name!r}, expected some of {', '.join(known)}")


@contextlib.contextmanager
def executor_of(arguments: argparse.Namespace) -> Iterator[Executor | None]:
    """Start the executor that the arguments name, and end it afterwards; None computes in this process.

    Raises:
        ValueError: if the package for it is missing, or no scheduler answers.
    """
    if arguments.dask is not None:
        try:
            from distributed import Client
        except ImportError:
            raise ValueError("--dask needs the package distributed: pip install 'ppl_bandit[dask]'") from None
        try:
            client = Client(arguments.dask)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--dask {arguments.dask}: no scheduler answers ({error}): start `dask scheduler`"
            ) from None
        with client:
            yield client.get_executor()
    elif arguments.workers:
        # Ctrl-C reaches every process of a terminal: only this one acts on it.
        pool = ProcessPoolExecutor(
            arguments.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),
        )
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    else:
        yield None
