"""Find the split."""
from ppl_bandit.engines.collapsed.inspection import Split, inspect
from ppl_bandit.engines.collapsed.outer import supports_of

__all__ = ["find_split"]


def find_split(model, outer) -> Split:
    return inspect(model, tuple(outer), supports_of(model))
