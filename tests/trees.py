"""Trajectories whose prefix tree has every shape that can go wrong, for tests of exactness."""

from __future__ import annotations

import numpy as np

from longstraw_agents.types import StopReason, Trajectory
from tests import models


def trajectory(name: str, tokens: np.ndarray, positions: np.ndarray, reward: float = 0.0) -> Trajectory:
    """A trajectory of one turn whose tokens at `positions` were sampled."""
    mask = np.zeros(len(tokens), dtype=bool)
    mask[positions] = True
    return Trajectory(
        trajectory_id=name,
        tokens=tokens.astype(np.int32),
        action_mask=mask,
        behaviour=np.where(mask, -1.0, np.nan).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turn_ends=(len(tokens),),
        turn_rewards=(reward,),
        reward=reward,
        stop_reason=StopReason.ANSWERED,
    )


def unequal_tree(seed: int = 0, root: int = 77) -> list[Trajectory]:
    """Seven trajectories: a tree up to four nodes deep with loss on inner nodes.

    A root of `root` tokens (longer than the window and than a delta chunk, no multiple of 64) with three children: an inner
    branch of 41 tokens that parts into a branch of one token and one of 95; an inner branch of two tokens, shorter than the
    convolution, that parts into one of 17 and one of 34, inside which another trajectory ends; and a branch of one token. One
    trajectory shares only its first token, which is no node.
    """
    draw = np.random.default_rng(seed)
    new = lambda length: draw.integers(0, models.VOCABULARY, length)
    shared, left, right, long, short = new(root), new(41), new(2), new(34), new(17)
    short[0] = (long[0] + 1) % models.VOCABULARY
    one = (left[0] + 1 + np.arange(1)) % models.VOCABULARY  # parts from the others at once
    first, second = new(1), new(95)
    second[0] = (first[0] + 1) % models.VOCABULARY
    right[0] = (left[0] + 2) % models.VOCABULARY
    other = new(61)
    other[0], other[1] = shared[0], (shared[1] + 1) % models.VOCABULARY
    paths = [
        np.concatenate([shared, left, first]),
        np.concatenate([shared, left, second]),
        np.concatenate([shared, right, long]),
        np.concatenate([shared, right, long[:21]]),
        np.concatenate([shared, right, short]),
        np.concatenate([shared, one]),
        other,
    ]
    inner = draw.random(root + 41) < 0.2  # the same tokens are sampled in every trajectory that shares them
    result = []
    for index, tokens in enumerate(paths):
        mask = np.concatenate([inner, draw.random(400) < 0.5])[: len(tokens)]
        mask[0], mask[-1] = False, True
        result.append(trajectory(f"t{index}", tokens, np.flatnonzero(mask), reward=float(index)))
    return result


def short_tree(seed: int = 0) -> list[Trajectory]:
    """Two trajectories that share 71 tokens and part into three and one: for runs of one token each."""
    draw = np.random.default_rng(seed)
    shared, left, right = (draw.integers(0, models.VOCABULARY, length) for length in (71, 3, 1))
    right[0] = (left[0] + 1) % models.VOCABULARY
    paths = [np.concatenate([shared, left]), np.concatenate([shared, right])]
    return [trajectory(f"s{i}", path, np.r_[5, 40, 60, np.arange(71, len(path))], float(i)) for i, path in enumerate(paths)]
