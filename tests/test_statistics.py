"""Against published and independently computed values."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstraw_agents.errors import ConfigError, GroupError
from longstraw_agents.statistics import compare, mean_interval, mean_pass_at_k, pass_at_k, sign_flip_probability


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(outcomes, k):
    if k > len(outcomes):
        with pytest.raises(ConfigError, match=f"pass@{k}"):
            pass_at_k(len(outcomes), sum(outcomes), k)
        return
    subsets = list(combinations(outcomes, k))
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_mean_pass_at_k_is_over_tasks():
    tasks = [[True, False, False, False], [False] * 4]
    value, (low, high) = mean_pass_at_k(tasks, 2)
    assert value == pytest.approx(0.25) and low == 0.0 and high == pytest.approx(0.5)
    with pytest.raises(GroupError):
        mean_pass_at_k([], 1)


@given(st.integers(0, 6), st.integers(0, 6))
def test_binary_outcomes_give_mcnemars_exact_test(wins, losses):
    """Two-sided binomial probability at one half over the tasks that differ."""
    count, fewer = wins + losses, min(wins, losses)
    exact = min(1.0, 2 * sum(comb(count, i) for i in range(fewer + 1)) / 2**count) if count else 1.0
    assert sign_flip_probability([1.0] * wins + [-1.0] * losses + [0.0] * 3) == pytest.approx(exact)


def test_darwins_maize_by_fisher():
    """Fisher (1935), section 21: of the 2**15 sign patterns 1,726 are as far; this is beyond the exact size, so sampled."""
    darwin = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert sign_flip_probability(darwin) == pytest.approx(1726 / 2**15, abs=0.005)


def test_comparison_is_paired_by_task():
    found = compare([0.0, 0.5, 1.0, 0.25], [1.0, 0.5, 1.0, 0.0])
    assert (found.difference, found.wins, found.losses, found.ties) == (pytest.approx(0.1875), 1, 1, 2)
    assert found.interval[0] <= found.difference <= found.interval[1] and found.probability == 1.0
    for earlier, later in (([1.0], [1.0, 0.0]), ([], [])):
        with pytest.raises(GroupError, match="same tasks"):
            compare(earlier, later)


@pytest.mark.parametrize("count, quantile", [(2, 12.7062), (3, 4.3027), (11, 2.2281), (12, 2.2010), (31, 2.0423), (121, 1.9799)])
def test_student_interval_over_runs(count, quantile):
    """Quantiles of Student's t from printed tables."""
    values = np.arange(count, dtype=float)
    mean, (low, high) = mean_interval(list(values))
    assert mean == pytest.approx((count - 1) / 2)
    assert (high - low) / 2 == pytest.approx(quantile * values.std(ddof=1) / count**0.5, rel=2e-4)
    with pytest.raises(GroupError, match="two"):
        mean_interval([1.0])
