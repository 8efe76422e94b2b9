"""Trajectories of one or more groups become a prefix tree, so that what they share is computed once.

Vocabulary
    target     a position p >= 1 whose token is predicted; its input is the token at p - 1, so a node with targets
               [start, stop) has inputs [start - 1, stop - 1)
    node       a span of targets between two borders: where trajectories part, where one ends, and, where it is asked for,
               at turn borders of a long node
    top        a node without a parent; it starts at target 1. Trajectories that share one token or none share no target, so a
               tree may have several tops
    path       a trajectory's nodes from its top to the node that ends exactly where the trajectory ends
    entry      one (trajectory, position) that carries loss. Entries that share a node's target share its *slot*: the
               target's loss coefficient is the sum over them

Where a parent ends and several children begin, the last shared token is an input once per child: its state belongs to the
child. Trajectories are sorted by their tokens; the common prefix of each neighbouring pair then gives the whole tree, without
a loop over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from longstraw_agents.errors import ConfigError, TokenError
from longstraw_agents.types import TokenArray, Trajectory

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SegmenterConfig:
    """How the tree is cut.

    min_span: a shared span with fewer targets than this is no node; it stays in each of its children and runs once for each
    (`PrefixTree.repeated_targets` counts). node_span: where given, a node is also cut at the first turn border at which it is
    at least this many targets long, and so on along it.
    """

    min_span: int = 1
    node_span: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_span", "node_span"):
            value = getattr(self, name)
            optional = name == "node_span" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"segmenter {name} must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True, eq=False)
class Node:
    """A span of targets [start, stop) that `trajectories` (ascending indices) share.

    tokens [stop - start + 1] int32: the path's tokens [start - 1, stop), so inputs are `tokens[:-1]` and targets
    `tokens[1:]`. loss_targets int32: offsets into the targets (0 is position `start`) that carry loss for some trajectory,
    ascending, each once.
    """

    index: int
    parent: int | None
    children: tuple[int, ...]
    start: int
    stop: int
    tokens: TokenArray
    trajectories: tuple[int, ...]
    loss_targets: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The prefix tree of `trajectories`.

    nodes are in pre-order: parents before children, a subtree in one stretch. paths: for each trajectory its node indices,
    empty if it has fewer than two tokens. The entry arrays [N] int64 list every (trajectory, position) with loss, ordered by
    trajectory, then position: the node that predicts it, and the index into that node's `loss_targets`. repeated_targets:
    targets that run more than once because their span was shorter than `min_span`, each extra run counted.
    """

    trajectories: tuple[Trajectory, ...]
    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]
    entry_trajectory: IndexArray
    entry_position: IndexArray
    entry_node: IndexArray
    entry_slot: IndexArray
    repeated_targets: int

    @property
    def tops(self) -> tuple[int, ...]:
        """Indices of the nodes without a parent."""
        return tuple(node.index for node in self.nodes if node.parent is None)

    @property
    def targets(self) -> int:
        """Targets (equally, inputs) that one pass over the tree runs."""
        return sum(node.stop - node.start for node in self.nodes)

    @property
    def unmerged_targets(self) -> int:
        """Targets that one pass over every trajectory apart would run."""
        return sum(max(len(trajectory.tokens) - 1, 0) for trajectory in self.trajectories)


def segment(trajectories: Sequence[Trajectory], config: SegmenterConfig = SegmenterConfig()) -> PrefixTree:
    """Builds the prefix tree of `trajectories`, which may come from several groups, in any order, with duplicates.

    Raises TokenError for tokens that are no vector of integers. Time: one sort and one comparison of each pair of neighbours,
    O(total tokens); the nodes' tokens are views into the trajectories.
    """
    trajectories = tuple(trajectories)
    for trajectory in trajectories:
        tokens = trajectory.tokens
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise TokenError(
                f"trajectory {trajectory.trajectory_id}: tokens must be a vector of integers, "
                f"got shape {tokens.shape} of {tokens.dtype}"
            )
    # big-endian bytes sort as the ids do, a prefix before what continues it
    keys = {i: t.tokens.astype(">u4").tobytes() for i, t in enumerate(trajectories) if len(t.tokens) > 1}
    order = sorted(keys, key=keys.__getitem__)
    shared = [_common_prefix(trajectories[a].tokens, trajectories[b].tokens) for a, b in pairwise(order)]
    return assemble(trajectories, order, shared, [np.flatnonzero(t.action_mask) for t in trajectories], config)


def assemble(
    trajectories: Sequence[Trajectory],
    order: Sequence[int],
    shared: Sequence[int],
    positions: Sequence[IndexArray],
    config: SegmenterConfig,
) -> PrefixTree:
    """The tree of `trajectories`, given their order and how much neighbours share; neither tokens nor masks are looked at.

    order: indices of the trajectories with at least two tokens, sorted by their tokens; shared [len(order) - 1]: the length of
    the common prefix of each neighbouring pair; positions: each trajectory's positions with loss, ascending.
    """
    trajectories = tuple(trajectories)
    tops = _radix_tree([len(t.tokens) for t in trajectories], order, shared)
    spans = list(_spans(tops, trajectories, config))
    paths = _paths(spans, len(trajectories))
    nodes, entries = _nodes_and_entries(spans, paths, trajectories, positions)
    distinct = sum(draft.stop - draft.start for draft in _walk(tops))
    run = sum(span.stop - span.start for span in spans)
    return PrefixTree(trajectories, nodes, paths, *entries, repeated_targets=run - distinct)


@dataclass
class _Draft:
    """A radix-tree node while it may still be split: everything through it shares tokens [0, stop) with `witness`."""

    start: int
    stop: int
    witness: int
    ends: list[int] = field(default_factory=list)  # trajectories that end at `stop`
    children: list[_Draft] = field(default_factory=list)


@dataclass(frozen=True)
class _Span:
    """A node's place in the finished tree, before the masks are looked at."""

    parent: int | None
    start: int
    stop: int
    witness: int
    ends: tuple[int, ...]


def _radix_tree(lengths: Sequence[int], order: Sequence[int], shared_next: Sequence[int]) -> list[_Draft]:
    """The tops of the radix tree."""
    tops: list[_Draft] = []
    branch: list[_Draft] = []  # the path of the trajectory added last; nothing left of it can change any more
    for index, common in zip(order, [1, *shared_next], strict=False):
        length, shared = lengths[index], max(1, common)
        while branch and branch[-1].start >= shared:
            branch.pop()
        if branch and branch[-1].stop > shared:
            _split(branch[-1], shared)
        if shared < length:
            draft = _Draft(shared, length, index)
            (branch[-1].children if branch else tops).append(draft)
            branch.append(draft)
        branch[-1].ends.append(index)
    return tops


def _common_prefix(left: TokenArray, right: TokenArray) -> int:
    """How many leading tokens are equal."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _split(draft: _Draft, at: int) -> None:
    """Ends `draft` at `at`; what it held beyond becomes its only child."""
    rest = _Draft(at, draft.stop, draft.witness, draft.ends, draft.children)
    draft.stop, draft.ends, draft.children = at, [], [rest]


def _walk(tops: list[_Draft]) -> Iterator[_Draft]:
    """Every draft, parents first."""
    stack = list(reversed(tops))
    while stack:
        draft = stack.pop()
        yield draft
        stack.extend(reversed(draft.children))


def _spans(tops: list[_Draft], trajectories: tuple[Trajectory, ...], config: SegmenterConfig) -> Iterator[_Span]:
    """The final nodes in pre-order: short shared spans moved into their children, long nodes cut at turn borders."""
    count = 0
    stack: list[tuple[_Draft, int | None, int]] = [(top, None, top.start) for top in reversed(tops)]
    while stack:
        draft, parent, start = stack.pop()
        if draft.children and draft.stop - start < config.min_span:
            stack.extend((child, parent, start) for child in reversed(draft.children))
            if draft.ends:  # a trajectory that ends inside a dissolved span keeps a leaf of its own
                yield _Span(parent, start, draft.stop, draft.witness, tuple(draft.ends))
                count += 1
            continue
        borders = _borders(start, draft.stop, trajectories[draft.witness].turn_ends, config.node_span)
        for left, right in pairwise(borders):
            yield _Span(parent, left, right, draft.witness, tuple(draft.ends) if right == draft.stop else ())
            parent = count
            count += 1
        stack.extend((child, parent, draft.stop) for child in reversed(draft.children))


def _borders(start: int, stop: int, turn_ends: Sequence[int], node_span: int | None) -> list[int]:
    """`start`, the turn ends at which a node of `node_span` targets is complete, `stop`."""
    borders = [start]
    if node_span is not None:
        ends = np.unique(np.asarray(turn_ends, dtype=np.int64))
        at = np.searchsorted(ends, start + node_span)
        while at < len(ends) and ends[at] < stop:
            borders.append(int(ends[at]))
            at = np.searchsorted(ends, borders[-1] + node_span)
    return [*borders, stop]


def _paths(spans: list[_Span], count: int) -> tuple[tuple[int, ...], ...]:
    """For each trajectory the indices of its spans, root to leaf."""
    paths: list[tuple[int, ...]] = [()] * count
    for index, span in enumerate(spans):
        if not span.ends:
            continue
        path = [index]
        while (parent := spans[path[-1]].parent) is not None:
            path.append(parent)
        for trajectory in span.ends:
            paths[trajectory] = tuple(reversed(path))
    return tuple(paths)


def _nodes_and_entries(
    spans: list[_Span],
    paths: tuple[tuple[int, ...], ...],
    trajectories: tuple[Trajectory, ...],
    positions: Sequence[IndexArray],
) -> tuple[tuple[Node, ...], tuple[IndexArray, IndexArray, IndexArray, IndexArray]]:
    """Joins the spans with the action masks. Each piece is one trajectory's loss positions within one node of its path."""
    members: list[list[int]] = [[] for _ in spans]
    pieces: list[list[IndexArray]] = [[] for _ in spans]
    walk: list[tuple[int, int, IndexArray]] = []  # (trajectory, node, positions), in the order of the entries
    for trajectory, path in enumerate(paths):
        cuts = np.searchsorted(positions[trajectory], [spans[node].stop for node in path[:-1]])
        for node, piece in zip(path, np.split(positions[trajectory], cuts) if path else (), strict=True):
            members[node].append(trajectory)
            pieces[node].append(piece)
            walk.append((trajectory, node, piece))
    targets = [_loss_targets(span, of_node) for span, of_node in zip(spans, pieces, strict=True)]
    children: list[list[int]] = [[] for _ in spans]
    for index, span in enumerate(spans):
        if span.parent is not None:
            children[span.parent].append(index)
    nodes = tuple(
        Node(
            index=index,
            parent=span.parent,
            children=tuple(children[index]),
            start=span.start,
            stop=span.stop,
            tokens=trajectories[span.witness].tokens[span.start - 1 : span.stop],
            trajectories=tuple(members[index]),
            loss_targets=targets[index][0],
        )
        for index, span in enumerate(spans)
    )
    empty: list[IndexArray] = [np.zeros(0, dtype=np.int64)]
    entries = (
        np.concatenate(empty + [np.full(len(piece), trajectory, dtype=np.int64) for trajectory, _, piece in walk]),
        np.concatenate(empty + [piece for _, _, piece in walk]),
        np.concatenate(empty + [np.full(len(piece), node, dtype=np.int64) for _, node, piece in walk]),
        np.concatenate(empty + [targets[node][1][piece - spans[node].start] for _, node, piece in walk], dtype=np.int64),
    )
    return nodes, entries


def _loss_targets(span: _Span, pieces: list[IndexArray]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Offsets of a span's targets with loss in any of the pieces, ascending; and per target of the span its place among them."""
    marked = np.zeros(span.stop - span.start, np.bool_)
    for piece in pieces:
        marked[piece - span.start] = True
    place: npt.NDArray[np.int32] = np.cumsum(marked, dtype=np.int32) - np.int32(1)
    return np.flatnonzero(marked).astype(np.int32), place
