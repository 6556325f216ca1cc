"""A paused experiment refuses new decisions in every process, and goes on where it was."""

import pytest
from shared_models import bernoulli_bandit

from ppl_bandit import ExperimentStopped


def test_a_pause_refuses_new_decisions_and_keeps_everything_else(tmp_path):
    bandit = bernoulli_bandit(journal=tmp_path / "journal.db")
    made = bandit.select(request_id="known")
    bandit.pause()
    bandit.pause()  # nothing new
    assert bandit.is_paused
    for ask in (bandit.select, lambda: bandit.select(size=2), lambda: bandit.select_many(num_decisions=2)):
        with pytest.raises(ExperimentStopped, match="paused"):
            ask()
    assert bandit.select(request_id="known").id == made.id
    assert bandit.update(made, 1) is not None
    bandit.report()
    bandit.retire_arm(0)
    assert bandit.is_paused
    bandit.close()
    again = bernoulli_bandit(journal=tmp_path / "journal.db")  # from the checkpoint
    other = bernoulli_bandit(journal=tmp_path / "journal.db")
    assert again.is_paused and again.retired == [0]
    again.resume()
    assert other.select().arm != 0 and not other.is_paused
    again.close()
    other.close()


def test_a_pause_of_another_process_stays_while_an_arm_is_retired(tmp_path):
    bandit, other = (bernoulli_bandit(journal=tmp_path / "journal.db") for _ in range(2))
    catch_up = bandit._catch_up

    def before_the_others(**options):
        projection = catch_up(**options)
        other.pause()
        other.retire_arm(1)
        return projection

    bandit._catch_up = before_the_others
    bandit.retire_arm(0)
    assert bandit.is_paused and bandit.retired == [0, 1]
