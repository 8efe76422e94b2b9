"""The prefix tree of a group as a picture: what trajectories share, where they part, and what an update runs of it.

Idea: a row is a trajectory, a box is a node. A shared node's box covers the rows of all that share it, so what is computed once
is drawn once. Widths grow with the logarithm of the length: a box of a million tokens fits beside one of ten.

Vocabulary
    captured   run without autograd, for the state that later tokens read
    reversed   run again with autograd on that state, from the last chunk to the first
    replayed   a leaf's last chunk: its first run with autograd is all it needs
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from longstraw_agents.segmenter import Node, PrefixTree
from longstraw_agents.storage import TrajectoryRow
from longstraw_agents.terminal import cell

ROW, GAP, PER_DECADE, LEAST = 24, 4, 36.0, 30.0


@dataclass(frozen=True)
class Box:
    """A node as drawn: its place in pixels, its kind ("inner" or "leaf", "idle" without loss at or below it), and words."""

    node: Node
    x: float
    y: float
    width: float
    height: float
    kind: str
    role: str
    link: str

    @property
    def tokens(self) -> int:
        """Targets of the node."""
        return self.node.stop - self.node.start


def boxes(tree: PrefixTree, gradient: str, chunk: int) -> tuple[list[Box], list[int]]:
    """All nodes as boxes, and the trajectories' indices from the top row to the lowest.

    gradient and chunk as the update had them; they decide what was run.
    """
    rows = sorted(range(len(tree.paths)), key=lambda i: (tree.paths[i], i))
    row_of = {trajectory: row for row, trajectory in enumerate(rows)}
    lossy = [len(node.loss_targets) > 0 for node in tree.nodes]
    for node in reversed(tree.nodes):
        if node.parent is not None:
            lossy[node.parent] |= lossy[node.index]
    right: dict[int | None, float] = {None: 0.0}
    made = []
    for node in tree.nodes:
        x, width = right[node.parent], LEAST + PER_DECADE * math.log10(node.stop - node.start)
        right[node.index] = x + width + GAP
        covered = [row_of[i] for i in node.trajectories]
        top, bottom = min(covered) * ROW, (max(covered) + 1) * ROW - GAP
        kind = "idle" if not lossy[node.index] else "inner" if node.children else "leaf"
        first = tree.trajectories[node.trajectories[0]].trajectory_id
        link = f"/trajectories/{first}/tokens?start={node.start}"
        made.append(Box(node, x, top, width, bottom - top, kind, role(node, lossy[node.index], gradient, chunk), link))
    return made, rows


def role(node: Node, lossy: bool, gradient: str, chunk: int) -> str:
    """What an update does with a node, in words."""
    if not lossy:
        return "not run with autograd: no loss at it or below it"
    long = node.stop - node.start > chunk
    if not node.children:
        if long:
            return f"captured but for its last chunk of at most {chunk:,}, which is replayed; the chunks before are reversed"
        return "replayed"
    if gradient != "detached":
        return "captured once for all that share it, then reversed"
    return "captured; replayed for its own loss alone (detached)" if len(node.loss_targets) else "captured (detached)"


def draw(tree: PrefixTree, rows: Mapping[str, TrajectoryRow], gradient: str, chunk: int) -> tuple[Markup, list[Box]]:
    """The picture, and its boxes for a table of the same."""
    made, order = boxes(tree, gradient, chunk)
    width = max((box.x + box.width for box in made), default=0.0) + 8
    parts = [_box(box) for box in made]
    for row, index in enumerate(order):
        parts.append(_label(rows[tree.trajectories[index].trajectory_id], width, row * ROW))
    label = f"Prefix tree: {len(made)} nodes of {len(order)} trajectories; the table below lists them."
    svg = Markup('<svg class="tree" width="{w:.0f}" height="{h}" viewBox="0 0 {w:.0f} {h}" role="group" aria-label="{}">{}</svg>')
    return svg.format(label, Markup("").join(parts), w=width + 190, h=len(order) * ROW), made


def _box(box: Box) -> Markup:
    node = box.node
    shared = f"{len(node.trajectories)} trajectories" if len(node.trajectories) > 1 else "1 trajectory"
    told = f"tokens {node.start:,} to {node.stop:,} of {shared}, {len(node.loss_targets):,} with loss: {box.role}"
    shape = Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="3"/>')
    text = Markup('<text x="{:.1f}" y="{:.1f}">{}</text>').format(box.x + 5, box.y + box.height / 2 + 4, _count(box.tokens))
    drawn = shape.format(box.kind, box.x, box.y, box.width, box.height) + text
    return Markup('<a href="{}" aria-label="{}"><title>{}</title>{}</a>').format(box.link, told, told, drawn)


def _label(row: TrajectoryRow, x: float, y: float) -> Markup:
    reward = "no reward" if row.reward is None else f"reward {cell(row.reward)}"
    done = "" if row.success is None else " ✓" if row.success else " ✗"
    told = f"{row.trajectory_id}  {reward}{done}"
    text = Markup('<text x="{:.1f}" y="{:.1f}" class="end">{}</text>').format(x, y + 15, told)
    return Markup('<a href="/trajectories/{}">{}</a>').format(row.trajectory_id, text)


def _count(tokens: int) -> str:
    """A length in as few characters as fit a box."""
    if tokens < 10_000:
        return f"{tokens:,}"
    return f"{tokens / 1e3:.0f}k" if tokens < 1_000_000 else f"{tokens / 1e6:.1f}M"


def savings(tree: PrefixTree) -> str:
    """How much less the tree runs than its trajectories apart."""
    apart = tree.unmerged_targets
    share = 100 * (1 - tree.targets / apart) if apart else 0.0
    return f"{tree.targets:,} targets instead of {apart:,} apart: {share:.0f} % less"


def settings(config: Any) -> tuple[str, int, Mapping[str, Any]]:
    """(gradient, chunk, segmenter's settings) of a run's stored configuration; the defaults where it says nothing."""
    trainer = _table(config, "trainer")
    replay, segmenter = _table(trainer, "replay"), _table(trainer, "segmenter")
    chunk = replay.get("chunk", 1024)
    known = {name: segmenter[name] for name in ("min_span", "node_span") if segmenter.get(name) is not None}
    return str(replay.get("gradient", "exact")), chunk if isinstance(chunk, int) else 1024, known


def _table(config: Any, name: str) -> Mapping[str, Any]:
    """A section of a configuration; empty where there is none."""
    found = config.get(name) if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def inputs_in_words(receipt: Mapping[str, Any]) -> Sequence[tuple[str, int]]:
    """(kind, inputs) of what the whole update ran, as its receipt counted."""
    return [(str(kind).replace("_", " "), int(count)) for kind, count in dict(receipt.get("inputs", {})).items()]
