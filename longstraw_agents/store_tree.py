"""Prefix trees straight from the store: the same tree as `segment` builds, without loading the trajectories.

Idea: chain digests say where two trajectories still agree and where they no longer do; between the two checkpoints the tokens
are read and compared. A tree of eight trajectories of two million tokens so reads some thousands. The tree's nodes hold
`StoredTokens`, which read from the store when they are used.

Strategies
    group    one tree for each group
    forest   one tree for groups that share at least `forest_prefix` tokens: a document, a system prompt
    chain    one tree for each trajectory, cut at turn borders (`node_span`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cmp_to_key
from itertools import groupby, pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from longstraw_agents.errors import ConfigError, CorruptionError, GroupError
from longstraw_agents.segmenter import PrefixTree, SegmenterConfig, assemble
from longstraw_agents.storage import Outline, Store
from longstraw_agents.types import MaskArray, StopReason, TokenArray, Trajectory

STRATEGIES = ("group", "forest", "chain")


@dataclass(frozen=True)
class TreeConfig:
    """What becomes one tree, and its limits.

    segmenter: how it is cut. forest_prefix: tokens that groups share at least to be one tree of a forest. max_trajectories and
    max_targets: of one tree; a forest starts another tree there, a group or chain that is larger is a GroupError.
    """

    strategy: str = "group"
    segmenter: SegmenterConfig = SegmenterConfig()
    forest_prefix: int = 1024
    max_trajectories: int | None = None
    max_targets: int | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"the tree strategy must be one of {STRATEGIES}, got {self.strategy!r}")
        if self.strategy == "chain" and self.segmenter.node_span is None:
            raise ConfigError("a chain is cut at turn borders: give the segmenter a node_span")
        for name in ("forest_prefix", "max_trajectories", "max_targets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


@dataclass(eq=False)
class TokenSource:
    """Reads tokens of one store and counts them: `tokens_read` is what was asked for."""

    store: Store
    tokens_read: int = 0

    def read(self, trajectory_id: str, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a trajectory."""
        self.tokens_read += stop - start
        return self.store.read_tokens(trajectory_id, start, stop)


@dataclass(frozen=True, eq=False)
class StoredTokens:
    """Tokens [start, stop) of a stored trajectory: has a length, slices without reading, and is read by `numpy.asarray`."""

    source: TokenSource = field(repr=False)
    trajectory_id: str
    start: int
    stop: int

    dtype = np.dtype(np.int32)
    ndim = 1

    @property
    def shape(self) -> tuple[int]:
        """As numpy has it."""
        return (len(self),)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, at: slice) -> StoredTokens:
        start, stop, step = at.indices(len(self))
        if step != 1:
            raise IndexError(f"stored tokens are sliced in steps of 1, got {step}; read them first with numpy.asarray")
        return StoredTokens(self.source, self.trajectory_id, self.start + start, self.start + max(start, stop))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        ids = self.source.read(self.trajectory_id, self.start, self.stop)
        return ids if dtype is None else ids.astype(dtype)


@dataclass(frozen=True, eq=False)
class StoredTrajectory:
    """A `Trajectory` whose tokens stay in the store; log-probabilities are read with `Store.load_trajectory`."""

    outline: Outline
    tokens: StoredTokens

    @property
    def trajectory_id(self) -> str:
        """Its id."""
        return self.outline.trajectory_id

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """One past each turn's last token."""
        return self.outline.turn_ends

    @property
    def action_mask(self) -> MaskArray:
        """Per token: True where the policy sampled it; made anew at each call."""
        mask = np.zeros(self.outline.length, np.bool_)
        mask[self.outline.action_positions] = True
        return mask

    @property
    def reward(self) -> float | None:
        """The episode's reward, None where none is valid."""
        return self.outline.reward

    @property
    def stop_reason(self) -> StopReason:
        """Why it ended."""
        return self.outline.stop_reason


@dataclass(frozen=True, eq=False)
class StoredTree:
    """A tree of stored trajectories and the source that its tokens come from."""

    tree: PrefixTree
    source: TokenSource


def trees(store: Store, group_ids: Sequence[str], config: TreeConfig = TreeConfig()) -> list[StoredTree]:
    """The trees of these groups, by `config.strategy`, in the groups' order.

    Raises StoreError for a group with open trajectories, GroupError for one beyond the limits, CorruptionError where stored
    digests contradict the tokens.
    """
    members = {group: [row.trajectory_id for row in store.trajectories(group)] for group in group_ids}
    if config.strategy == "chain":
        sets = [[name] for names in members.values() for name in names]
    elif config.strategy == "group":
        sets = list(members.values())
    else:
        sets = _forest(store, members, config)
    found = [stored_tree(store, names, config.segmenter) for names in sets]
    for names, stored in zip(sets, found, strict=True):
        targets, count = stored.tree.targets, len(names)
        if targets > (config.max_targets or targets) or count > (config.max_trajectories or count):
            raise GroupError(
                f"the tree of {names[0]} and {count - 1} more has {targets} targets; the limits are {config.max_targets} targets "
                f"and {config.max_trajectories} trajectories: raise them, or make smaller groups"
            )
    return found


def stored_tree(store: Store, trajectory_ids: Sequence[str], config: SegmenterConfig | None = None) -> StoredTree:
    """The prefix tree of these finished trajectories, equal to `segment` of them loaded."""
    source = TokenSource(store)
    outlines = store.outlines(trajectory_ids)
    compare = _Comparison(source, outlines)
    order = sorted((i for i, o in enumerate(outlines) if o.length > 1), key=cmp_to_key(compare.order))
    shared = [compare.shared(a, b) for a, b in pairwise(order)]
    stored = [StoredTrajectory(o, StoredTokens(source, o.trajectory_id, 0, o.length)) for o in outlines]
    positions = [o.action_positions for o in outlines]
    tree = assemble(cast(Sequence[Trajectory], stored), order, shared, positions, config or SegmenterConfig())
    return StoredTree(tree, source)


class _Comparison:
    """Common prefixes and the order of trajectories, each pair compared once."""

    def __init__(self, source: TokenSource, outlines: Sequence[Outline]) -> None:
        self.source = source
        self.outlines = outlines
        self._known: dict[tuple[int, int], tuple[int, int]] = {}

    def shared(self, left: int, right: int) -> int:
        """How many leading tokens are equal."""
        return self._compared(left, right)[0]

    def order(self, left: int, right: int) -> int:
        """Negative, zero, positive as the left one's tokens sort before, with, after the right one's."""
        return self._compared(left, right)[1] * (1 if left < right else -1)

    def _compared(self, left: int, right: int) -> tuple[int, int]:
        pair = (left, right) if left < right else (right, left)
        if pair not in self._known:
            self._known[pair] = self._compare(self.outlines[pair[0]], self.outlines[pair[1]])
        return self._known[pair]

    def _compare(self, left: Outline, right: Outline) -> tuple[int, int]:
        agree, differ = _bounds(left, right)
        if agree == differ:  # one is a prefix of the other
            return agree, left.length - right.length
        a, b = (self.source.read(o.trajectory_id, agree, differ) for o in (left, right))
        unequal = np.flatnonzero(a != b)
        if len(unequal):
            at = int(unequal[0])
            return agree + at, int(a[at]) - int(b[at])
        if differ < min(left.length, right.length) or differ in left.checkpoints and differ in right.checkpoints:
            raise CorruptionError(
                f"trajectories {left.trajectory_id} and {right.trajectory_id} have the same tokens before {differ}, but not the "
                "same chain digest; `longstraw db check` says which is damaged"
            )
        return differ, left.length - right.length


def _bounds(left: Outline, right: Outline) -> tuple[int, int]:
    """Tokens before the first position agree; the place where they part, or the shorter one ends, is not after the second."""
    _, i, j = np.intersect1d(left.checkpoints, right.checkpoints, assume_unique=True, return_indices=True)
    equal = (left.chains[i] == right.chains[j]).all(axis=1)
    first = len(equal) if equal.all() else int(equal.argmin())
    agree = int(left.checkpoints[i[first - 1]]) if first else 0
    differ = int(left.checkpoints[i[first]]) if first < len(i) else min(left.length, right.length)
    return agree, differ


def _forest(store: Store, members: dict[str, list[str]], config: TreeConfig) -> list[list[str]]:
    """Sets of trajectories, whole groups each, that share their first `forest_prefix` tokens and keep within the limits."""
    prefix = _prefix_key(store, config.forest_prefix)
    keyed = {group: prefix(names[0]) if names else (group,) for group, names in members.items()}
    order = {key: i for i, key in enumerate(dict.fromkeys(keyed.values()))}
    sets: list[list[str]] = []
    for _, groups in groupby(sorted(members, key=lambda group: order[keyed[group]]), key=lambda group: keyed[group]):
        for number, group in enumerate(groups):
            if number == 0 or not _fits(store, [*sets[-1], *members[group]], config):
                sets.append([])
            sets[-1] += members[group]
    return sets


def _prefix_key(store: Store, length: int) -> Callable[[str], tuple[Any, ...]]:
    """A function that names a trajectory's first `length` tokens; one that is shorter is named by its id."""

    def key(name: str) -> tuple[Any, ...]:
        if store.trajectory(name).length < length:
            return (name,)
        return (store.read_tokens(name, 0, length).tobytes(),)

    return key


def _fits(store: Store, names: list[str], config: TreeConfig) -> bool:
    """Whether the tree of these trajectories keeps within the limits."""
    if config.max_trajectories is not None and len(names) > config.max_trajectories:
        return False
    return config.max_targets is None or stored_tree(store, names, config.segmenter).tree.targets <= config.max_targets
