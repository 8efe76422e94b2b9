"""Capture, score, replay and reverse over a prefix tree: the exact gradient of a loss of log-probabilities.

Idea: the loss is a function of the log-probabilities of the loss tokens alone, so its gradient with respect to the weights is
sum over tokens of c_t * d logp_t / d weights, with c_t = dL/dlogp_t known before any back-propagation. A node's tokens are run
in chunks. *Capture* runs a chunk without autograd and writes its state. *Reverse* runs it again with autograd on the state
before it, back-propagates sum(c_t * logp_t) together with the cotangent that later spans left on what it wrote, and leaves a
cotangent on what it read. Nodes go in post-order and chunks from last to first: reverse-mode differentiation with checkpoints
at the chunk borders. *Replay* is the reverse of a leaf's last chunk: nothing came after it, so it has no incoming cotangent.

Short sibling leaves run together as rows of one batch, padded on the right (padding comes after every real token, so nothing
real sees it). `gradient="detached"` cuts cotangents at node borders and replays only nodes that carry loss.

Shapes: B rows, T inputs of a run, M loss tokens of a run, N loss entries of the tree.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from longstraw_agents.errors import ConfigError, NonFiniteError, StaleStateError, TokenError
from longstraw_agents.segmenter import Node, PrefixTree
from longstraw_agents.trainer.accumulation import accumulated
from longstraw_agents.trainer.architectures import attached, make_state, require_supported, unwrap
from longstraw_agents.trainer.attention import ACTIVE, IMPLEMENTATION
from longstraw_agents.trainer.context import Context
from longstraw_agents.trainer.delta_rule import require_usable
from longstraw_agents.trainer.frontier import Entry, find_frontier, started_from
from longstraw_agents.trainer.head import find_head
from longstraw_agents.trainer.heads import shared_rules
from longstraw_agents.trainer.journal import Journal
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.passes import Pass, Written
from longstraw_agents.trainer.ranks import Ranks
from longstraw_agents.trainer.recapture import FreshStates, Recapture, Span
from longstraw_agents.trainer.stack import wide
from longstraw_agents.trainer.stamps import WeightStamps, require_fresh
from longstraw_agents.trainer.state import Run, StateCache, StateWritten

GRADIENTS = ("exact", "detached")


@dataclass(frozen=True)
class ReplayConfig:
    """How a tree is run. chunk: inputs per run of a long node. pack: inputs of sibling leaves that run together."""

    gradient: str = "exact"
    chunk: int = 1024
    pack: int = 512
    logit_piece: int = 256
    temperature: float = 1.0
    placement: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        if self.gradient not in GRADIENTS:
            raise ConfigError(f"gradient is {self.gradient!r}; choose one of {', '.join(GRADIENTS)}")
        for name in ("chunk", "pack", "logit_piece"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it counts tokens and must be at least 1")
        if not self.temperature > 0:
            raise ConfigError(f"temperature is {self.temperature}; it must be above 0")


@dataclass
class Scores:
    """Log-probabilities [N] of a tree's loss entries (float32 or wider, nats) and, where asked for, entropies [N]."""

    logp: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True)
class _Picks:
    """The loss tokens of one run: row and offset of the hidden state, the target id, and the flat slot they belong to."""

    rows: Tensor
    offsets: Tensor
    targets: Tensor
    slots: Tensor


class Engine:
    """A model made ready for replay: its decoder, head and stamps. One engine serves many trees and updates."""

    def __init__(self, model: nn.Module, config: ReplayConfig = ReplayConfig(), ranks: Ranks | None = None) -> None:
        """model: a transformers causal language model, plain or with PEFT adapters. Raises ModelError for unknown ones.

        ranks: the processes that share out every run; by default this one alone.
        """
        self.model, self.config = model, config
        self.context = Context(ranks or Ranks())
        self.base = unwrap(model)
        self.decoder = self.base.get_decoder()
        self.head = find_head(self.base, config.temperature, config.logit_piece)
        self.stamps = WeightStamps(self.decoder, self.base.config)
        self.cache_argument = "cache" if "cache" in inspect.signature(self.decoder.forward).parameters else "past_key_values"
        require_supported(self.base)  # before anything runs
        require_usable(self.decoder, self.device, self.dtype)
        make_state(self.base, 0, self.context)

    @property
    def device(self) -> torch.device:
        """Where the embeddings lie."""
        return self.base.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """Compute type of the model."""
        return self.base.get_input_embeddings().weight.dtype  # type: ignore[no-any-return]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The model's attention is ours and its modules are in evaluation mode; both are put back on exit."""
        config, training = self.base.config.get_text_config(), self.model.training
        before = config._attn_implementation
        config._attn_implementation = IMPLEMENTATION
        self.model.eval()
        length = lambda: ACTIVE.get().run.length
        shared = shared_rules(self.decoder, self.context, length) if self.context.size > 1 else nullcontext()
        try:
            with shared, attached(self.base):
                yield
        finally:
            config._attn_implementation = before
            self.model.train(training)

    @property
    def frontier(self) -> int:
        """The layer below which nothing changes under the parameters that train now."""
        return find_frontier(self.decoder, self.base.config)

    def decode(self, ids_BT: np.ndarray, run: Run, state: StateCache, entry: Entry | None = None) -> Tensor:
        """The decoder's forward of one run on `state`: hidden states [B, T, C] after the final norm.

        With `entry` the run starts from its layer, and the layers below neither run nor write. Where processes share the run,
        ids are those of all of it and hidden states those of this process's part, padding included.
        """
        if not isinstance(state, StateCache):
            raise StaleStateError(
                f"a run was given a {type(state).__name__}, which is not exact; only bounded.ApproximateReplay reads one"
            )
        part = self.context.part(run.length)
        ids_BT = np.pad(ids_BT, ((0, 0), (0, part.size * self.context.size - run.length)))[:, part.first : part.first + part.size]
        start = run.start + part.first
        positions = torch.arange(start, start + part.size, device=self.device)[None].expand(run.rows, -1)
        state.begin(run)
        token = ACTIVE.set(state)
        try:
            with started_from(self.decoder, entry):
                result = self.decoder(
                    input_ids=torch.as_tensor(ids_BT, dtype=torch.int64, device=self.device), position_ids=positions,
                    use_cache=True, **{self.cache_argument: state},
                )  # fmt: skip
        except StateWritten:
            return torch.empty(run.rows, 0, 0, device=self.device)
        finally:
            ACTIVE.reset(token)
        return result.last_hidden_state  # type: ignore[no-any-return]

    def open(self, tree: PrefixTree, recapture: Recapture | None = None, journal: Journal | None = None) -> TreeReplay:
        """Begin work on a tree under the current weights; with `recapture`, states kept from earlier work are taken over.

        journal: what was begun for the update that this is part of; an update that was stopped goes on from there. Raises
        ConfigError for what it can't hold: states in 8 bits, several processes, and what recapture keeps.
        """
        if journal is not None and (recapture is not None or self.context.ranks.world > 1 or self.config.placement.bits):
            raise ConfigError("a journal holds exact states of one process: leave out recapture, other processes, and `bits`")
        return TreeReplay(self, tree, recapture, journal)


@dataclass
class _Flat:
    """The tree's loss entries as flat slots: node n's loss targets are slots first[n] .. first[n] + len(loss_targets)."""

    first: list[int]
    total: int
    entry: Tensor

    @classmethod
    def of(cls, tree: PrefixTree, device: torch.device) -> _Flat:
        """The slots of a tree, on `device`."""
        sizes = [len(node.loss_targets) for node in tree.nodes]
        first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        entry = first[np.asarray(tree.entry_node, dtype=np.int64)] + np.asarray(tree.entry_slot, dtype=np.int64)
        return cls(first[:-1].tolist(), int(first[-1]), torch.as_tensor(entry, device=device))


@dataclass
class TreeReplay:
    """One tree under one set of weights: score it, then back-propagate through it once or more.

    `counts` says how many inputs each kind of run had: capture, score (leaves), replay (leaves),
    reverse (inner nodes and long leaves), padding; and for the nodes without a parent, root_capture and root_reverse.
    `seconds` says how long each kind took, the device's work included.
    """

    engine: Engine
    tree: PrefixTree
    recapture: Recapture | None = None
    journal: Journal | None = None
    counts: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    written: list[Written] = field(default_factory=list)  # the journal's: captured runs of the current path
    told: dict[str, dict[str, int]] | None = None  # what another process reported of a pass that it finished

    def __post_init__(self) -> None:
        self._pass: Pass | None = None  # the one that is journaled
        self._flat = _Flat.of(self.tree, self.engine.device)
        self._spans: dict[int, list[Span]] = {}  # of captured nodes, where states are kept
        self.state = make_state(self.engine.base, self._capacity(), self.engine.context, self.engine.config.placement)
        self.state.frontier = self.engine.frontier
        stamps = self.engine.stamps.stamps()
        self._stamps = stamps.states
        self._kept = None if self.recapture is None else self.recapture.under(stamps)
        self._begun = 0.0
        self._resident: list[int] = []  # the path whose nodes' states lie in the cache now
        self._scored = False
        vocabulary = self.engine.base.config.get_text_config().vocab_size
        for trajectory in self.tree.trajectories:
            if len(trajectory.tokens) and not 0 <= int(trajectory.tokens.min()) <= int(trajectory.tokens.max()) < vocabulary:
                raise TokenError(
                    f"trajectory {trajectory.trajectory_id} has ids from {trajectory.tokens.min()} to {trajectory.tokens.max()}, "
                    f"but the model's vocabulary is 0 to {vocabulary - 1}; was it collected with another tokenizer?"
                )

    def _capacity(self) -> int:
        """Positions that this process keeps of the longest path."""
        held: list[int] = []
        for node in self.tree.nodes:
            before = 0 if node.parent is None else held[node.parent]
            held.append(before + sum(self.engine.context.part(last - first).size for first, last in self._chunks(node)))
        return max(held, default=0)

    # -- passes ---------------------------------------------------------------------------------------------------------

    def score(self, *, entropy: bool = False) -> Scores:
        """Log-probabilities of every loss entry, without autograd; captures inner nodes on the way and keeps the last path."""
        out = self._new_scores(entropy)
        with self._reading(), self._journaled(out), torch.no_grad():
            for event, nodes in self._walk(last_first=False):
                if event == "enter":
                    self._capture(nodes[0], out)
                elif event == "leaves":
                    self._leave_to(self.tree.nodes[nodes[0]].parent)
                    for group in self._packs(nodes):
                        self._score_leaves(group, out)
        self._scored = True
        return self._entries(out)

    def backward(self, c_N: Tensor, e_N: Tensor | None = None) -> Scores:
        """Add the gradient of sum(c * logp + e * entropy) over loss entries to the parameters' `.grad`.

        c_N, e_N: [N] in the tree's entry order. Returns the log-probabilities (and entropies, if e_N is given) seen on the way.
        Raises StaleStateError if the weights changed since this tree was opened, NonFiniteError if c or e is not finite.
        """
        for name, vector in (("c", c_N), ("e", e_N)):
            if vector is not None and not bool(torch.isfinite(vector).all()):
                entry = int(torch.nonzero(~torch.isfinite(vector))[0])
                trajectory = self.tree.trajectories[int(self.tree.entry_trajectory[entry])]
                raise NonFiniteError(
                    f"the loss's derivative {name} is {float(vector[entry])} at position {int(self.tree.entry_position[entry])} "
                    f"of trajectory {trajectory.trajectory_id}; nothing was back-propagated"
                )
        c, e = self._slots(c_N), None if e_N is None else self._slots(e_N)
        active, below = self._active(c, e)
        idle = lambda i: not active[i] and not self._scored and len(self.tree.nodes[i].loss_targets) > 0  # still to be scored
        out = self._new_scores(e_N is not None)
        with self._reading(), accumulated(self.engine.model) as sums, self._journaled(out, sums, c, e):
            for event, nodes in self._walk(last_first=True):
                node = self.tree.nodes[nodes[0]]
                if event == "enter":
                    if active[node.index] or below[node.index]:
                        self._capture(node.index, out if idle(node.index) else None)
                elif event == "leaves":
                    if not any(active[i] or idle(i) for i in nodes):
                        continue
                    self._leave_to(node.parent)
                    for group in self._packs([i for i in nodes if active[i]]):
                        self._replay_leaves(group, c, e, out)
                    for group in self._packs([i for i in nodes if idle(i)]):
                        with torch.no_grad():
                            self._score_leaves(group, out)
                elif active[node.index]:
                    self._reverse(node, c, e, out)
        return self._entries(out)

    # -- nodes ----------------------------------------------------------------------------------------------------------

    def _capture(self, index: int, out: Scores | None) -> None:
        """Capture an inner node unless its state is still there; with `out`, score its loss tokens in the same pass."""
        node = self.tree.nodes[index]
        depth = 0 if node.parent is None else self._resident.index(node.parent) + 1
        if index in self._resident[depth : depth + 1]:
            return
        self._leave_to(node.parent)
        with torch.no_grad():
            if self._kept is None:
                for first, last in self._chunks(node):
                    run = Run(node.start - 1 + first, last - first, 1, writes=True, gradient=False)
                    self._forward([node], first, last, run, out)
                    if first > 0 and not self._may_reverse(node):
                        self._drop(run.start)
                    self._count("capture", node, last - first)
            else:
                self._capture_kept(node, self._kept, out)
        self._resident.append(index)

    def _capture_kept(self, node: Node, kept: FreshStates, out: Scores | None) -> None:
        """`_capture` where states outlive a tree: only what is not fresh runs, and what has loss tokens still to be scored."""
        before = "" if node.parent is None else self._spans[node.parent][-1].chain
        spans = self._spans[node.index] = []
        for span in kept.walk(before, node.tokens[:-1], node.start - 1, self.engine.config.chunk):
            first, last = span.start - node.start + 1, span.stop - node.start + 1
            picks = self._picks([node], first, last) if out is not None else None
            hidden = kept.capture(span, node.tokens[first:last], self.state, run_anyway=picks is not None)
            if hidden is not None:
                self._score(hidden, picks, out)
                self._count("capture", node, last - first)
            spans.append(span)

    def _score_leaves(self, group: Sequence[Node], out: Scores) -> None:
        """Score leaves that run together (or one long leaf, chunk by chunk) without autograd."""
        chunks = self._chunks(group[0]) if len(group) == 1 else [(0, max(len(n.tokens) - 1 for n in group))]
        for position, (first, last) in enumerate(chunks):
            writes = position < len(chunks) - 1
            run = Run(group[0].start - 1 + first, last - first, len(group), writes=writes, gradient=False)
            self._forward(group, first, last, run, out)
            self._count("score", group[0], (last - first) * len(group), group)

    def _replay_leaves(self, group: Sequence[Node], c: Tensor, e: Tensor | None, out: Scores) -> None:
        """Replay leaves that run together; a long leaf is captured but for its last chunk, then reversed."""
        if len(group) > 1:
            length = max(len(node.tokens) - 1 for node in group)
            run = Run(group[0].start - 1, length, len(group), writes=False, gradient=True, cut=self._cut(group[0]))
            self._backward(group, 0, length, run, c, e, out)
            self._count("replay", group[0], length * len(group), group)
            return
        chunks = self._chunks(group[0])
        with torch.no_grad():
            for first, last in chunks[:-1]:
                run = Run(group[0].start - 1 + first, last - first, 1, writes=True, gradient=False)
                self._forward(group, first, last, run, None)
                self._count("capture", group[0], last - first)
        self._reverse(group[0], c, e, out, kind="replay" if len(chunks) == 1 else "reverse")
        self.state.truncate(group[0].start - 1)

    def _reverse(self, node: Node, c: Tensor, e: Tensor | None, out: Scores, kind: str = "reverse") -> None:
        """Run a node's chunks backward, from the last to the first."""
        for first, last in reversed(self._chunks(node)):
            run = Run(node.start - 1 + first, last - first, 1, writes=False, gradient=True, cut=self._cut(node))
            self._backward([node], first, last, run, c, e, out)
            self._count(kind, node, last - first)

    # -- runs -----------------------------------------------------------------------------------------------------------

    def _forward(self, group: Sequence[Node], first: int, last: int, run: Run, out: Scores | None) -> None:
        """One run without autograd; with `out`, its loss tokens are scored."""
        if self._pass is not None and self._pass.skips:
            return
        picks = self._picks(group, first, last) if out is not None else None
        wanted = out is not None and _carries_loss(group, first, last)
        hidden = self._decode(group, first, last, replace(run, hidden=wanted))
        self._score(hidden, picks, out)
        self._collect(run)

    def _score(self, hidden: Tensor, picks: _Picks | None, out: Scores | None) -> None:
        if picks is not None and out is not None:
            logp, entropy = self.engine.head.score(hidden[picks.rows, picks.offsets], picks.targets, out.entropy is not None)
            self._store(out, picks, logp, entropy)

    def _backward(
        self, group: Sequence[Node], first: int, last: int, run: Run, c: Tensor, e: Tensor | None, out: Scores
    ) -> None:
        """One run with autograd: its loss tokens' c (and e) and its state's cotangent are the seeds."""
        if self._pass is not None and self._pass.skips:
            return
        picks = self._picks(group, first, last)
        with torch.enable_grad():
            # Processes that share a run all go to its end: what their graphs exchange must be alike.
            wanted = self.engine.context.size > 1 or picks is not None
            hidden = self._decode(group, first, last, replace(run, hidden=wanted))
            picked = None if picks is None else hidden[picks.rows, picks.offsets]
        roots = self.state.seeds()
        if picks is not None and picked is not None:
            e_M = None if e is None else e[picks.slots]
            grad, logp, entropy = self.engine.head.backward(picked, picks.targets, c[picks.slots], e_M)
            self._store(out, picks, logp, entropy)
            roots.append((picked, grad))
        if self.engine.context.size > 1:  # every process walks its whole graph, so that all meet in the same exchanges
            roots.append((hidden, torch.zeros_like(hidden)))
        roots = [(output, grad) for output, grad in roots if output.requires_grad]
        if roots:
            torch.autograd.backward([r[0] for r in roots], [r[1] for r in roots])
        self._collect(run)

    def _collect(self, run: Run) -> None:
        """A run is done."""
        self.state.collect()
        if self._pass is not None:
            self._pass.ran(run)

    def _decode(self, group: Sequence[Node], first: int, last: int, run: Run) -> Tensor:
        """The decoder's forward over offsets [first, last) of the group's inputs: hidden states [B, T, C]."""
        inputs = np.zeros((len(group), last - first), dtype=np.int64)
        for row, node in enumerate(group):
            part = node.tokens[:-1][first:last]
            inputs[row, : len(part)] = part
        entry = None
        if self._kept is not None and (spans := self._spans.get(group[0].index)):
            entry = self._kept.entry(next(span for span in spans if span.start == run.start))
        run = replace(run, nodes=tuple(node.index for node in group))
        return self.engine.decode(inputs, run, self.state, entry)

    # -- bookkeeping ----------------------------------------------------------------------------------------------------

    def _walk(self, last_first: bool) -> Iterator[tuple[str, list[int]]]:
        """Depth-first events: ("enter", [n]) and ("leave", [n]) for inner nodes, ("leaves", siblings) for their leaves.

        last_first visits children from the last to the first, so that replay begins on the path that scoring left behind.
        """
        tops = [node.index for node in self.tree.nodes if node.parent is None]
        todo: list[tuple[str, list[int]]] = []
        self._push(todo, tops, last_first)
        while todo:
            event, nodes = todo.pop()
            yield event, nodes
            if event == "enter":
                todo.append(("leave", nodes))
                self._push(todo, self.tree.nodes[nodes[0]].children, last_first)

    def _push(self, todo: list[tuple[str, list[int]]], children: Sequence[int], last_first: bool) -> None:
        inner = [("enter", [i]) for i in children if self.tree.nodes[i].children]
        leaves = [i for i in children if not self.tree.nodes[i].children]
        events = ([("leaves", leaves)] if leaves else []) + inner  # scoring: leaves first, the last inner path stays resident
        todo.extend(events if last_first else reversed(events))

    def _packs(self, leaves: Sequence[int]) -> Iterator[list[Node]]:
        """Sibling leaves of one parent, shortest first, in groups whose padded size is at most `pack` inputs."""
        nodes = sorted((self.tree.nodes[i] for i in leaves), key=lambda node: len(node.tokens))
        group: list[Node] = []
        for node in nodes:
            length = len(node.tokens) - 1
            if group and (length * (len(group) + 1) > self.engine.config.pack or length > self.engine.config.chunk):
                yield group
                group = []
            group.append(node)
        if group:
            yield group

    def _chunks(self, node: Node) -> list[tuple[int, int]]:
        if node.index in self._spans:
            return [(span.start - node.start + 1, span.stop - node.start + 1) for span in self._spans[node.index]]
        length, size = len(node.tokens) - 1, self.engine.config.chunk
        return [(first, min(length, first + size)) for first in range(0, length, size)]

    def _picks(self, group: Sequence[Node], first: int, last: int) -> _Picks | None:
        rows, offsets, targets, slots = [], [], [], []
        part = self.engine.context.part(last - first)
        first = first + part.first
        for row, node in enumerate(group):
            begin, end = np.searchsorted(node.loss_targets, (first, first + part.real))
            chosen = node.loss_targets[begin:end].astype(np.int64)
            rows.append(np.full(len(chosen), row, dtype=np.int64))
            offsets.append(chosen - first)
            targets.append(node.tokens[1:][chosen].astype(np.int64))
            slots.append(self._flat.first[node.index] + np.arange(begin, end, dtype=np.int64))
        if not sum(len(part) for part in rows):
            return None
        to = lambda parts: torch.as_tensor(np.concatenate(parts), device=self.engine.device)
        return _Picks(to(rows), to(offsets), to(targets), to(slots))

    def _active(self, c: Tensor, e: Tensor | None) -> tuple[list[bool], list[bool]]:
        """Per node: whether its backward run gives anything, and whether something below it is to be run.

        A node is active through its own loss or, in exact mode, through a descendant's. What lies below is to be run if it is
        active or was never scored.
        """
        nodes = self.tree.nodes
        active = [self._own_loss(node, c, e) for node in nodes]
        below = [not self._scored and len(node.loss_targets) > 0 for node in nodes]
        for node in reversed(nodes):
            if node.parent is None:
                continue
            below[node.parent] |= active[node.index] or below[node.index]
            if self.engine.config.gradient == "exact":
                active[node.parent] |= active[node.index]
        return active, below

    def _own_loss(self, node: Node, c: Tensor, e: Tensor | None) -> bool:
        own = slice(self._flat.first[node.index], self._flat.first[node.index] + len(node.loss_targets))
        return bool(c[own].any()) or (e is not None and bool(e[own].any()))

    def _may_reverse(self, node: Node) -> bool:
        """Whether a captured inner node can ever be run backward; if not, states at borders inside of it are of no use."""
        return self.engine.config.gradient == "exact" or len(node.loss_targets) > 0

    def _cut(self, node: Node) -> int:
        return 0 if self.engine.config.gradient == "exact" else node.start - 1

    def _leave_to(self, parent: int | None) -> None:
        """Forget the states of nodes that are not on the path to `parent`'s next child."""
        self._resident = [] if parent is None else self._resident[: self._resident.index(parent) + 1]
        self.state.truncate(0 if parent is None else self.tree.nodes[parent].stop - 1)

    def _drop(self, border: int) -> None:
        """Nothing will run backward from a border."""
        self.state.drop(border)
        if self._pass is not None:
            self._pass.drop(border)

    def _now(self) -> float:
        """Seconds on a clock that has waited for the device."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        return time.perf_counter()

    @contextmanager
    def _journaled(self, out: Scores, sums: dict[Tensor, Tensor | None] | None = None, *given: Tensor | None) -> Iterator[None]:
        """A pass, with its journal if there is one: runs that an earlier process did are skipped."""
        self.told = None
        if self.journal is None:
            yield
            return
        self._pass = self.journal.open(self, out, {} if sums is None else sums, given)
        try:
            yield
            self._pass.close()
        finally:
            self._pass = None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A pass: the weights are those of the tree's states, and the model's attention is ours."""
        require_fresh(self._stamps, self.engine.stamps.layers(), "this tree's state")
        self._begun = self._now()
        with self.engine.attached(), nullcontext() if self._kept is None else self._kept.reading():
            yield

    def _new_scores(self, entropy: bool) -> Scores:
        alone = self.engine.context.size == 1
        fresh = lambda: torch.full(
            (self._flat.total,), float("nan") if alone else 0.0, device=self.engine.device, dtype=wide(self.engine.dtype)
        )  # fmt: skip
        return Scores(fresh(), fresh() if entropy else None)

    def _store(self, out: Scores, picks: _Picks, logp: Tensor, entropy: Tensor | None) -> None:
        out.logp[picks.slots] = logp.to(out.logp.dtype)
        if out.entropy is not None and entropy is not None:
            out.entropy[picks.slots] = entropy.to(out.entropy.dtype)

    def _entries(self, out: Scores) -> Scores:
        entry, ranks = self._flat.entry, self.engine.context.ranks
        whole = lambda x: ranks.sum(x, name="log-probabilities")[entry]  # each has one owner, the others have zero
        return Scores(whole(out.logp), None if out.entropy is None else whole(out.entropy))

    def _slots(self, vector_N: Tensor) -> Tensor:
        """Sum entries that share a target."""
        flat = torch.zeros(self._flat.total, dtype=wide(self.engine.dtype), device=self.engine.device)
        return flat.index_add_(0, self._flat.entry, vector_N.detach().to(flat))

    def report(self) -> dict[str, dict[str, int]]:
        """Of the last pass: "flips" of recomputed decisions, and "bytes" of state and cotangent."""
        return self.told or {"flips": self.state.flips(), "bytes": self.state.nbytes()}

    def _count(self, kind: str, node: Node, inputs: int, group: Sequence[Node] = ()) -> None:
        if self._pass is None or not self._pass.skips:
            self._add(kind, node, inputs, group)
        if self._pass is not None:
            self._pass.border()
            self._begun = self._now()

    def _add(self, kind: str, node: Node, inputs: int, group: Sequence[Node]) -> None:
        now = self._now()
        self.seconds[kind] += now - self._begun  # type: ignore[assignment]  # a Counter of floats
        self._begun = now
        self.counts[kind] += inputs
        if node.parent is None and node.children and kind in ("capture", "reverse"):
            self.counts[f"root_{kind}"] += inputs
        if len(group) > 1:
            self.counts["padding"] += inputs - sum(len(n.tokens) - 1 for n in group)


def _carries_loss(group: Sequence[Node], first: int, last: int) -> bool:
    """Whether a target at offsets [first, last) carries loss, whichever process owns it. If not, nobody needs hidden states."""
    return any(np.diff(np.searchsorted(node.loss_targets, (first, last)))[0] > 0 for node in group)
