"""Names of selectors on the command line."""

import pytest

from ppl_bandit.commands.names import make_selectors


def test_a_patience_may_follow_the_name_of_optimistic_gittins():
    chosen = make_selectors(["ts", "ogi", "ogi:0.1"], 70)
    assert list(chosen) == ["Thompson", "optimistic Gittins", "optimistic Gittins, patience 0.1"]
    assert chosen["optimistic Gittins"].settings == {"horizon": 70, "patience": 1.0, "learning": 0.0}
    assert chosen["optimistic Gittins, patience 0.1"].settings["patience"] == 0.1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gittins", "--selectors has 'gittins', expected some of .*ogi"),
        ("ds:2", "--selectors has 'ds:2': only ogi takes a number"),
        ("ogi:fast", "--selectors has 'ogi:fast': only ogi takes a number"),
        ("ogi:-1", "patience must be positive and finite, got -1.0"),
    ],
)
def test_unknown_names_and_patiences_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        make_selectors([name], 10)
