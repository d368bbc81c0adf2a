"""Repetitions that stop early pass a wrong rate hardly more often than all of them would."""

import numpy as np
import pytest
from scipy import stats

from tests.simulated import AtMost

# What the simulations of errors ask for, see their tests.
ASKED = (AtMost(200, 10, caught=0.08), AtMost(50, 6, caught=0.25))


def passes(rule: AtMost, rate: float) -> tuple[float, float]:
    """Exact probability that it holds, and expected repetitions, where events have this rate."""
    at, held, repetitions = np.array([1.0]), 0.0, 0.0
    for i in range(1, rule.n + 1):
        repetitions += at.sum()
        at = np.convolve(at, [1 - rate, rate])
        for events in range(len(at)):
            if rule.clear(events, i):
                held += at[events] * (events <= rule.most)
                at[events] = 0
    assert not at.any()
    return held, repetitions


@pytest.mark.parametrize("rule", ASKED)
def test_stopping_early_passes_a_wrong_rate_no_more_often_than_promised(rule):
    for rate in np.linspace(rule.caught, 0.6, 12):
        stopped, whole = passes(rule, rate)[0], stats.binom.cdf(rule.most, rule.n, rate)
        assert whole <= stopped <= whole + rule.error
    assert passes(rule, rule.caught)[0] < 0.1
    held, repetitions = passes(rule, 0.005)
    assert held > 0.999 and repetitions < 0.6 * rule.n
