"""Predicted success is right as often as predicted: trials that the rule stopped are run again to their ends without it."""

import numpy as np
import pytest
from trial_settings import PREDICTION_DESIGNS, predicted_and_found, rates


@pytest.mark.slow  # the default run compares a prediction with an enumeration, in tests/live/test_looks.py
@pytest.mark.parametrize("name", PREDICTION_DESIGNS)
def test_trials_that_stopped_for_predicted_success_would_have_succeeded_as_often_as_predicted(name):
    predicted, found = predicted_and_found(rates(2), PREDICTION_DESIGNS[name], num_trials=2000, num_futures=100)
    gap = found - predicted
    assert gap.size > 500
    # Three standard errors, of about .008. Noise of 100 continuations raises the predictions that reach the threshold by .002.
    assert abs(gap.mean()) <= 3 * gap.std() / np.sqrt(gap.size)
