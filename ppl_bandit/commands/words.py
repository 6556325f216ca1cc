"""The words by which the command line knows engines and selectors."""

from collections.abc import Callable, Iterable, Mapping

from ppl_bandit import engines, selectors
from ppl_bandit.types import Selector

__all__ = ["ENGINES", "NEEDS_HORIZON", "SELECTORS", "check_words", "chosen_selectors"]

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
NEEDS_HORIZON: Mapping[str, tuple[str, Callable[[int], Selector]]] = {  # word -> name in tables, factory of a horizon
    "ogi": ("optimistic Gittins", selectors.optimistic_gittins),
}


def chosen_selectors(words: Iterable[str], horizon: int) -> dict[str, Selector]:
    """Return {name in tables: selector}; a patience may follow a word that takes one, as in ogi:0.1.

    Raises:
        ValueError: for a word that is not known, or a patience that is no number.
    """
    chosen = {}
    for word in words:
        stem, _, digits = word.partition(":")
        check_words([stem], [*SELECTORS, *NEEDS_HORIZON], "--selectors")
        if stem in SELECTORS and not digits:
            name, make = SELECTORS[stem]
            chosen[name] = make()
            continue
        try:
            patience = float(digits) if digits else 1.0
            if stem in SELECTORS:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"--selectors has {word!r}: a number may follow ogi alone, its patience, as in ogi:0.1"
            ) from None
        name = NEEDS_HORIZON[stem][0] + (f", patience {patience:g}" if digits else "")
        chosen[name] = selectors.optimistic_gittins(horizon, patience)
    return chosen


def check_words(words: Iterable[str], known: Iterable[str], argument: str) -> None:
    """Refuse words that are not known.

    Raises:
        ValueError: with the argument, the word and what was expected.
    """
    known = list(known)
    for word in words:
        if word not in known:
            raise ValueError(f"{argument} has {word!r}, expected some of {', '.join(known)}")
