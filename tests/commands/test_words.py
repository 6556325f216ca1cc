"""The words of the command line for selectors with a horizon."""

import pytest

from ppl_bandit.commands.words import chosen_selectors


def test_a_patience_may_follow_the_word_of_a_selector_with_a_horizon():
    chosen = chosen_selectors(["ts", "ogi", "ogi:0.1"], 70)
    assert list(chosen) == ["Thompson", "optimistic Gittins", "optimistic Gittins, patience 0.1"]
    assert chosen["optimistic Gittins"].settings == {"horizon": 70, "patience": 1.0, "learning": 0.0}
    assert chosen["optimistic Gittins, patience 0.1"].settings["patience"] == 0.1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("gittins", "--selectors has 'gittins', expected some of .*ogi"),
        ("ds:2", "--selectors has 'ds:2': a number may follow ogi alone"),
        ("ogi:fast", "--selectors has 'ogi:fast': a number may follow ogi alone"),
        ("ogi:-1", "patience must be positive and finite, got -1.0"),
    ],
)
def test_words_that_cannot_be_used_are_explained(word, message):
    with pytest.raises(ValueError, match=message):
        chosen_selectors([word], 10)
