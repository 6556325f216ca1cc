"""How long the way of a decision and of a reward is: calls of the library's functions, their files, and changes of folder."""

import sys
from pathlib import Path

import pytest
from shared_models import bernoulli_bandit

import ppl_bandit

PACKAGE = str(Path(ppl_bandit.__file__).parent)


def path_of(function, *arguments):
    """Call, and return the number of calls of functions with a name, of their files, and of changes of folder in between."""
    files = []

    def note(frame, event, _):
        code = frame.f_code
        # Python 3.12 has no calls for comprehensions, so they are left out.
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            files.append(Path(code.co_filename))

    sys.setprofile(note)
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(None)
    folders = [file.parent for file in files]
    changes = sum(one != other for one, other in zip(folders, folders[1:], strict=False))
    return result, (len(files), len(set(files)), changes)


@pytest.mark.parametrize("has_journal", [False, True])
def test_the_way_of_a_decision_and_of_its_reward_is_short(has_journal, tmp_path):
    bandit = bernoulli_bandit(journal=tmp_path / "j.db" if has_journal else None)
    for _ in range(2):
        bandit.update(bandit.select(), 1)
    decision, of_select = path_of(bandit.select)
    _, of_update = path_of(bandit.update, decision, 1)
    assert all(found <= most for found, most in zip(of_select, (32, 13, 8), strict=True)), of_select
    assert all(found <= most for found, most in zip(of_update, (50, 15, 12), strict=True)), of_update
