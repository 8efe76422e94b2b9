"""Approximate recapture under a bound: off by default, measured as it goes, and exact again where it is not good enough.

Idea: an approximate state (`approximate`) is cheap and biased, and nobody can say beforehand how biased. So every `audit` steps
the update runs exactly, and what approximation would have given is measured beside it, with the loss's own coefficients. While
that stays within the bounds, the steps between are approximate; after an audit that fails they are exact. Receipts of updates
that read an approximate state say "bounded" where they would say "exact".

Vocabulary
    audit    an exact step at which the approximate state is measured: KL at the loss tokens, cosine of the gradient

Shapes: N loss entries of a tree, M loss tokens of a run, C hidden size.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longstraw_agents.errors import ConfigError
from longstraw_agents.segmenter import Node, PrefixTree
from longstraw_agents.trainer.approximate import ApproximateReplay, ApproximateState
from longstraw_agents.trainer.recapture import Recapture
from longstraw_agents.trainer.replay import Engine, TreeReplay
from longstraw_agents.trainer.stamps import token_digest

if TYPE_CHECKING:
    from longstraw_agents.trainer.head import Head

CHOICES = ("random", "drift")


@dataclass(frozen=True)
class BoundedConfig:
    """share: part of a prefix's tokens refreshed per step. kl: most nats per loss token, cosine: least, that an audit accepts.

    audit: steps from one measurement to the next. choose: "random", so that every token's turn comes, or "drift", those whose low
    layers moved most, which leaves far more (figure recapture.bounded_over_random). bytes: states kept, of several prefixes; the
    least recently used one goes.
    """

    share: float = 0.2
    kl: float = 1e-3
    cosine: float = 0.99
    audit: int = 8
    choose: str = "random"
    bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share is {self.share}; it is the part of a prefix's tokens that is refreshed, from 0 to 1")
        if not self.kl >= 0 or not -1 <= self.cosine <= 1:
            raise ConfigError(f"kl must be at least 0 and cosine between -1 and 1; got {self.kl} and {self.cosine}")
        if self.audit < 1:
            raise ConfigError(f"audit is {self.audit}; it counts steps and must be at least 1")
        if self.bytes < 0:
            raise ConfigError(f"bytes is {self.bytes}; it must be at least 0")
        if self.choose not in CHOICES:
            raise ConfigError(f"choose is {self.choose!r}; choose one of {', '.join(CHOICES)}")


def root_of(tree: PrefixTree) -> Node | None:
    """The node that an approximate state may stand for: the only one without a parent, with children and without loss."""
    tops = [node for node in tree.nodes if node.parent is None]
    fits = len(tops) == 1 and tops[0].children and not len(tops[0].loss_targets)
    return tops[0] if fits else None


@dataclass(frozen=True)
class Measured:
    """What is left after a refresh: mean KL(exact || approximate) at the loss tokens in nats, and the cosine of the gradients."""

    kl: float
    cosine: float


def measure(exact: TreeReplay, approximate: TreeReplay, c_N: Tensor) -> Measured:
    """Compare two replays of one tree under the same weights. Parameters' `.grad` are left as they were."""
    kl = 0.0
    with _recorded(exact) as theirs:
        exact.score()
    with _recorded(approximate) as ours:
        approximate.score()
    head, total = exact.engine.head, sum(len(hidden) for hidden in theirs)
    with torch.no_grad():
        for fresh, stale in zip(torch.cat(theirs).split(head.piece), torch.cat(ours).split(head.piece), strict=True):
            p, q = (head.logits(hidden).double().log_softmax(-1) for hidden in (fresh, stale))
            kl += float((p.exp() * (p - q)).sum()) / total
    first, second = _gradient(exact, c_N), _gradient(approximate, c_N)
    product = sum(float((a.double() * b.double()).sum()) for a, b in zip(first, second, strict=True))
    norms = [math.sqrt(sum(float(g.double().square().sum()) for g in gradient)) for gradient in (first, second)]
    return Measured(kl, product / (norms[0] * norms[1]) if min(norms) > 0 else 0.0)


class _Recorder:
    """A head that keeps the hidden states which it scores."""

    def __init__(self, head: Head) -> None:
        self.head, self.hidden = head, list[Tensor]()

    def score(self, hidden_MC: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """As the head's."""
        self.hidden.append(hidden_MC.clone())
        return self.head.score(hidden_MC, target_M, entropy)


@contextmanager
def _recorded(replay: TreeReplay) -> Iterator[list[Tensor]]:
    head = replay.engine.head
    recorder = _Recorder(head)
    replay.engine.head = recorder  # type: ignore[assignment]
    try:
        yield recorder.hidden
    finally:
        replay.engine.head = head


def _gradient(replay: TreeReplay, c_N: Tensor) -> list[Tensor]:
    parameters = [p for p in replay.engine.model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    replay.backward(c_N)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
    return found


@dataclass
class _Root:
    """A prefix that was met before: its approximate state, whether the last audit accepted it, and steps since then."""

    state: ApproximateState
    accepted: bool = False
    since: int = 0


class Bounded:
    """Decides for each tree and step whether it is read from an approximate state, and audits.

    A prefix's first step is exact, and so is the second, which is its first audit. While audits pass, the steps between them
    are approximate. After one that fails, all steps are exact until the next is due.
    """

    def __init__(self, engine: Engine, config: BoundedConfig, recapture: Recapture | None = None) -> None:
        if engine.context.size > 1:
            raise ConfigError("bounded recapture works on one process; leave it out where several share the context")
        self.config = config
        self._engine, self._recapture = engine, recapture
        self._roots: OrderedDict[str, _Root] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._audits: list[Measured] = []

    def open(self, tree: PrefixTree) -> TreeReplay:
        """The replay that this tree gets under the current weights."""
        root = self._root(tree)
        if root is None or not root.accepted or root.since >= self.config.audit:
            return self._engine.open(tree, self._recapture)
        root.state.refresh(self.config.share, self.config.choose, seed=root.since)
        return ApproximateReplay(self._engine, tree, root.state)

    def before_backward(self, tree: PrefixTree, replay: TreeReplay, c_N: Tensor) -> None:
        """Audit, where one is due and the replay is exact. c_N: the loss's derivative, as the step uses it."""
        root = self._root(tree)
        if root is None or isinstance(replay, ApproximateReplay) or root.since < self.config.audit:
            return
        root.state.refresh(self.config.share, self.config.choose, seed=root.since)
        measured = measure(replay, ApproximateReplay(self._engine, tree, root.state), c_N)
        root.accepted = measured.kl <= self.config.kl and measured.cosine >= self.config.cosine
        root.since = 0
        self._audits.append(measured)

    def after_backward(self, tree: PrefixTree, replay: TreeReplay) -> None:
        """Count the step; an exact one's states are what the next approximation begins with."""
        approximate = isinstance(replay, ApproximateReplay)
        self._counts["approximate_trees" if approximate else "exact_trees"] += 1
        node = root_of(tree)
        if node is None:
            return
        root = self._root(tree)
        if approximate and root is not None:
            root.since += 1
            return
        state = ApproximateState.of(self._engine, node.tokens[:-1], replay.state)
        key = token_digest(node.tokens[:-1].tobytes())
        self._roots[key] = _Root(state, since=self.config.audit) if root is None else _Root(state, root.accepted, root.since + 1)
        self._roots.move_to_end(key)
        while len(self._roots) > 0 and sum(root.state.nbytes() for root in self._roots.values()) > self.config.bytes:
            self._roots.popitem(last=False)

    def report(self) -> dict[str, Any]:
        """For a receipt: trees by kind and audits since the last report."""
        audits = [{"kl": audit.kl, "cosine": audit.cosine} for audit in self._audits]
        report = {kind: self._counts[kind] for kind in ("approximate_trees", "exact_trees")} | {"audits": audits}
        self._counts.clear()
        self._audits.clear()
        return report

    def _root(self, tree: PrefixTree) -> _Root | None:
        node = root_of(tree)
        return None if node is None else self._roots.get(token_digest(node.tokens[:-1].tobytes()))
