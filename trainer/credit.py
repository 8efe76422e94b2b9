"""How a group's rewards become advantages of single turns.

    trajectory  (R_i - mean R) / deviation at each of trajectory i's turns: GRPO (arXiv:2402.03300). The default
    turn        the discounted return from a turn on, compared with the group's returns from the same turn on; a trajectory that
                has already ended is compared by its last turn's
    node        for groups whose trajectories part late. Trajectories with equal tokens up to the end of a turn share that turn's
                node; a node's value is the mean return of the trajectories through it. A turn's advantage is its node's value
                minus the value of the last node above it where trajectories part: siblings are compared (as TreeRL's local
                advantage, arXiv:2506.11902, and VinePPO, arXiv:2410.01679, do)
    chain       for one long trajectory without siblings: the discounted return from a turn on minus what the mean reward of the
                turns before it would give over the same turns. That baseline runs along the trajectory and knows nothing of the
                turn's own action or of later ones, so it adds no bias. The first turn has nothing to be compared with: 0.
                With siblings it is `turn`

Where trajectories share nothing but the prompt and rewards come at the end, undiscounted, all four are the same (`flat group`).
A trajectory's rewards are its turns'; what its total has beyond their sum counts with its last turn. An episode that became
several trajectories counts once, by their weights. Advantages are divided by the deviation of what was compared, or not.

Shapes: M trajectories, K turns of one of them.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longstraw_agents.errors import ConfigError, TokenError
from longstraw_agents.types import Trajectory

Advantages = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards are compared.

    credit: a key of CREDITS. discount: of a reward one turn later, for `turn` and `chain`. divide_by_deviation: False for Dr.
    GRPO (arXiv:2503.20783). tolerance: rewards whose range is at most this, relative to the largest (or to 1 where all are
    smaller), count as equal. mask_truncated: trajectories that a length limit cut carry no loss.
    """

    credit: str = "trajectory"
    discount: float = 1.0
    divide_by_deviation: bool = True
    tolerance: float = 1e-6
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        if self.credit not in CREDITS:
            raise ConfigError(f"unknown credit {self.credit!r}; choose one of {', '.join(CREDITS)}")
        if not 0 < self.discount <= 1:
            raise ConfigError(f"advantage discount must be above 0 and at most 1, got {self.discount!r}")
        if self.discount != 1 and self.credit not in ("turn", "chain"):
            raise ConfigError(f"credit {self.credit!r} takes no discount, got {self.discount!r}; choose 'turn', or leave it out")
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise ConfigError(f"advantage tolerance must be a finite number of at least 0, got {self.tolerance!r}")


def trajectory_credit(trajectories: Sequence[Trajectory], config: AdvantageConfig) -> list[Advantages]:
    """One number per trajectory at each of its turns: M arrays [K]."""
    advantages = compare(list(map(total, trajectories)), [t.weight for t in trajectories], config)
    return [np.full(len(t.turn_ends), a) for t, a in zip(trajectories, advantages, strict=True)]


def turn_credit(trajectories: Sequence[Trajectory], config: AdvantageConfig) -> list[Advantages]:
    """Returns from each turn on, compared turn by turn: M arrays [K]."""
    returns = [_returns(t, config.discount) for t in trajectories]
    longest = max(map(len, returns))
    padded = np.stack([np.append(r, np.full(longest - len(r), r[-1])) for r in returns])
    weights = [t.weight for t in trajectories]
    advantages = np.stack([compare(padded[:, turn], weights, config) for turn in range(longest)], axis=1)
    return [row[: len(r)] for row, r in zip(advantages, returns, strict=True)]


def node_credit(trajectories: Sequence[Trajectory], config: AdvantageConfig) -> list[Advantages]:
    """Values of turn nodes against those of the forks above them: M arrays [K]."""
    weights = np.array([t.weight for t in trajectories])
    rewards = compare(list(map(total, trajectories)), weights, config)  # linear in them, so means may be taken after it
    paths = [_turn_keys(t) for t in trajectories]
    through: dict[bytes, list[int]] = {b"": list(range(len(paths)))}
    following: dict[bytes, set[bytes]] = {}
    for index, path in enumerate(paths):
        for above, key in zip([b"", *path], path, strict=False):
            through.setdefault(key, []).append(index)
            following.setdefault(above, set()).add(key)
    value = {key: float(np.average(rewards[members], weights=weights[members])) for key, members in through.items()}
    credits = []
    for path in paths:
        fork, credit = b"", []
        for above, key in zip([b"", *path], path, strict=False):
            fork = above if len(following[above]) > 1 else fork
            credit.append(value[key] - value[fork])
        credits.append(np.array(credit))
    return credits


def chain_credit(trajectories: Sequence[Trajectory], config: AdvantageConfig) -> list[Advantages]:
    """A running baseline along a trajectory alone; `turn_credit` among siblings: M arrays [K]."""
    if len(trajectories) > 1:
        return turn_credit(trajectories, config)
    rewards, returns = _turn_rewards(trajectories[0]), _returns(trajectories[0], config.discount)
    turns = np.arange(len(rewards))
    before = np.concatenate([[0.0], np.cumsum(rewards)[:-1]]) / np.maximum(turns, 1)
    horizon = returns_to_go(np.ones(len(rewards)), config.discount)
    advantages = np.where(turns > 0, returns - before * horizon, 0.0)
    scale = math.sqrt(float(np.mean(advantages[1:] ** 2))) if len(rewards) > 1 else 0.0
    if scale <= config.tolerance * max(1.0, float(np.abs(returns).max())):
        return [np.zeros(len(rewards))]
    return [advantages / scale if config.divide_by_deviation else advantages]


#: How advantages spread over turns, by name: (trajectories [M], config) -> M arrays [K].
CREDITS: dict[str, Callable[[Sequence[Trajectory], AdvantageConfig], list[Advantages]]] = {
    "trajectory": trajectory_credit,
    "turn": turn_credit,
    "node": node_credit,
    "chain": chain_credit,
}


def compare(values: npt.ArrayLike, weights: npt.ArrayLike, config: AdvantageConfig) -> Advantages:
    """Values [M] minus their mean, over their deviation where asked for; zeros where they are equal within the tolerance."""
    values = np.asarray(values, dtype=np.float64)
    if np.ptp(values) <= config.tolerance * max(1.0, float(np.abs(values).max())):
        return np.zeros(len(values))
    mean, deviation = episode_baseline(values, weights)
    return (values - mean) / (deviation if config.divide_by_deviation else 1.0)


def episode_baseline(values: npt.ArrayLike, weights: npt.ArrayLike) -> tuple[float, float]:
    """Mean and sample deviation (n - 1) of values [M] over n episodes, where a trajectory is `weights` [M] of an episode.

    n is the sum of the weights, taken as 2 where fewer are left of episodes that lost a part.
    """
    values, weights = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    mean = float(np.average(values, weights=weights))
    episodes = max(float(weights.sum()), 2.0)
    return mean, math.sqrt(float(np.average((values - mean) ** 2, weights=weights)) * episodes / (episodes - 1.0))


def returns_to_go(rewards: npt.ArrayLike, discount: float) -> Advantages:
    """[K]: at each turn the sum of its and later rewards [K], a reward n turns later times discount**n."""
    returns = np.array(rewards, dtype=np.float64)
    for turn in range(len(returns) - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns


def spread(trajectory: Trajectory, by_turn: Advantages) -> Advantages:
    """One advantage per loss position, in order, from one per turn [K]."""
    positions = np.flatnonzero(trajectory.action_mask)
    return by_turn[np.searchsorted(trajectory.turn_ends, positions, side="right")]


def spans(trajectory: Trajectory, advantages: Advantages) -> list[tuple[int, int, float]]:
    """(start, stop, advantage) of each run of loss positions with one advantage: the record that a receipt keeps."""
    positions = np.flatnonzero(trajectory.action_mask)
    if not len(positions):
        return []
    breaks = np.flatnonzero((np.diff(positions) != 1) | (np.diff(advantages) != 0)) + 1
    first, last = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(positions)]]) - 1
    return [(int(positions[i]), int(positions[j]) + 1, float(advantages[i])) for i, j in zip(first, last, strict=True)]


def per_token(recorded: Sequence[Sequence[float]], length: int) -> Advantages:
    """[length]: what `spans` recorded, token by token; NaN where no loss was."""
    advantages = np.full(length, np.nan)
    for start, stop, advantage in recorded:
        advantages[int(start) : int(stop)] = advantage
    return advantages


def packed(values: npt.ArrayLike) -> str:
    """Numbers as text for a receipt, four digits and less than three bytes each: base64 of little-endian float16."""
    return base64.b64encode(np.asarray(values, "<f2").tobytes()).decode("ascii")


def unpacked(text: str) -> Advantages:
    """Inverse of `packed`."""
    return np.frombuffer(base64.b64decode(text), "<f2").astype(np.float64)


def total(trajectory: Trajectory) -> float:
    """A reward that the filters have seen to be there."""
    assert trajectory.reward is not None
    return trajectory.reward


def _turn_rewards(trajectory: Trajectory) -> Advantages:
    """[K]: one reward per turn; what the total has beyond their sum counts with the last."""
    rewards = np.array(trajectory.turn_rewards, dtype=np.float64)
    if len(rewards) != len(trajectory.turn_ends) or not np.isfinite(rewards).all():
        raise TokenError(
            f"trajectory {trajectory.trajectory_id} has {len(trajectory.turn_ends)} turns and turn rewards "
            f"{trajectory.turn_rewards}; give one finite number for each turn"
        )
    rewards[-1] += total(trajectory) - rewards.sum()
    return rewards


def _returns(trajectory: Trajectory, discount: float) -> Advantages:
    return returns_to_go(_turn_rewards(trajectory), discount)


def _turn_keys(trajectory: Trajectory) -> list[bytes]:
    """For each turn a digest of all tokens up to its end and of where turns end: equal where the turn is shared."""
    digest, start, keys = hashlib.blake2b(digest_size=16), 0, []
    for stop in trajectory.turn_ends:
        digest.update(stop.to_bytes(8, "big") + trajectory.tokens[start:stop].tobytes())
        keys.append(digest.copy().digest())
        start = stop
    return keys
