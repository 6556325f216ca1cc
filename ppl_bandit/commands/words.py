"""The words by which the command line knows engines and selectors."""

from collections.abc import Callable, Iterable, Mapping

from ppl_bandit import engines, selectors
from ppl_bandit.types import Selector

__all__ = ["ENGINES", "SELECTORS", "check_words"]

ENGINES: Mapping[str, Callable] = {
    "exact": engines.conjugate,
    "collapsed": engines.collapsed,
    "nuts": engines.nuts,
    "svi": engines.svi,
    "laplace": engines.laplace,
    "reweight": engines.reweight,
}
SELECTORS: Mapping[str, tuple[str, Callable[[], Selector]]] = {  # word -> name in tables, factory
    "ds": ("double sampling", selectors.double_sampling),
    "ds-lowest": ("double sampling, ties lowest", lambda: selectors.double_sampling(ties="lowest")),
    "ds-exact": ("double sampling, exact P(best)", lambda: selectors.double_sampling(exact=True)),
    "ts": ("Thompson", selectors.thompson),
    "bucb": ("Bayes-UCB", selectors.bayes_ucb),
    "greedy": ("greedy", selectors.greedy),
    "top-two": ("top-two", selectors.top_two),
    "ids": ("information-directed", selectors.information_directed),
}


def check_words(words: Iterable[str], known: Iterable[str], argument: str) -> None:
    """Refuse words that are not known.

    Raises:
        ValueError: with the argument, the word and what was expected.
    """
    known = list(known)
    for word in words:
        if word not in known:
            raise ValueError(f"{argument} has {word!r}, expected some of {', '.join(known)}")
