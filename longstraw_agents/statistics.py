"""Comparisons of two versions, and pass@k: what `scores` leaves open.

Idea: as in `scores`, the task is the unit and versions are compared on the same tasks. A difference comes with an interval and
with the probability of one at least as large if both versions were equally good (a permutation test, exact for few tasks).

Vocabulary
    pass@k    the probability that at least one of k samples of a task succeeds (Chen et al. 2021, arXiv:2107.03374), estimated
              without bias from n >= k samples
    paired    per task, the later version's mean minus the earlier one's
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from longstraw_agents.errors import ConfigError, GroupError
from longstraw_agents.scores import Interval, bootstrap

Values = npt.NDArray[np.float64]

#: Up to this many differing tasks all sign patterns are tried; beyond, this many random ones.
EXACT_TASKS = 14
PERMUTATIONS = 20000


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from n samples of one task, c of them successful.

    Raises ConfigError for k outside 1..n or c outside 0..n.
    """
    if not 1 <= k <= samples or not 0 <= successes <= samples:
        raise ConfigError(
            f"pass@{k} needs 1 <= k <= samples and 0 <= successes <= samples, got {successes} successes of {samples} samples"
        )
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def mean_pass_at_k(outcomes: Sequence[Sequence[bool]], k: int) -> tuple[float, Interval]:
    """The mean of pass@k over tasks with its 95 % interval; `outcomes` has one sequence of successes per task.

    Raises GroupError without a task, ConfigError where a task has fewer than k samples.
    """
    if not outcomes:
        raise GroupError("pass@k was asked of no task; give the successes of at least one")
    values = np.array([pass_at_k(len(task), sum(map(bool, task)), k) for task in outcomes])
    return float(values.mean()), bootstrap(values)


@dataclass(frozen=True)
class Comparison:
    """Later minus earlier, paired by task.

    difference and interval (95 %, tasks resampled); probability: two-sided, of a mean difference at least as large if each
    task's difference were as likely of either sign; wins, losses, ties count tasks.
    """

    difference: float
    interval: Interval
    probability: float
    wins: int
    losses: int
    ties: int


def compare(earlier: Sequence[float], later: Sequence[float]) -> Comparison:
    """Compares two versions by one value per task (a success fraction or a mean return) on the same tasks.

    Raises GroupError where the numbers of tasks differ or there is none.
    """
    if len(earlier) != len(later) or not len(later):
        raise GroupError(f"{len(earlier)} tasks earlier and {len(later)} later: a comparison is made on the same tasks")
    differences = np.asarray(later, dtype=np.float64) - np.asarray(earlier, dtype=np.float64)
    return Comparison(
        difference=float(differences.mean()),
        interval=bootstrap(differences),
        probability=sign_flip_probability(differences),
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        ties=int((differences == 0).sum()),
    )


def sign_flip_probability(differences: npt.ArrayLike, seed: int = 0) -> float:
    """The two-sided probability of a sum at least as far from 0 if every difference's sign were a coin's (Fisher 1935).

    Exact up to EXACT_TASKS differences that are not 0, which alone matter; for outcomes of 0 and 1 it is McNemar's exact test.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    if not len(values):
        return 1.0
    if len(values) <= EXACT_TASKS:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(values))))
        return float(_as_far(signs @ values, values).mean())
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), size=(PERMUTATIONS, len(values)))
    return float((_as_far(signs @ values, values).sum() + 1) / (PERMUTATIONS + 1))


def _as_far(sums: Values, values: Values) -> npt.NDArray[np.bool_]:
    """Which sums are at least as far from 0 as the one seen, rounding apart."""
    seen = abs(float(values.sum()))
    return np.abs(sums) >= seen - 1e-12 * float(np.abs(values).sum())


def mean_interval(values: Sequence[float]) -> tuple[float, Interval]:
    """Mean and 95 % Student interval of a few independent runs (seeds), where a bootstrap would be too narrow.

    Raises GroupError for fewer than two.
    """
    if len(values) < 2:
        raise GroupError(f"an interval over runs needs at least two of them, got {len(values)}")
    array = np.asarray(values, dtype=np.float64)
    half = _student(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return float(array.mean()), (float(array.mean()) - half, float(array.mean()) + half)


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: tabled where it is far from the normal's, else Cornish-Fisher's expansion."""
    table = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
    if freedom <= len(table):
        return table[freedom - 1]
    z, n = 1.959964, freedom
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + math.fsum(term / n**power for power, term in enumerate(terms, start=1))
