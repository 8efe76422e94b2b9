"""One of several processes of a check: what they compute together against what one computes alone.

Started by `longstraw_agents.launch`, as `python -m tests.parallel_worker OUTPUT JOBS LAYOUT` with both as JSON. Process 0 writes
one JSON line per job to the file OUTPUT. A job is a `Case` (gradients against conventional training), or has a name under
"job": steps (weights stay the same bits), selections (of sparse index attention), bytes (state per process), traffic (bytes
sent per replayed token), checkpoint (saved by all, read by one and by all).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from longstraw_agents.errors import RankError
from longstraw_agents.segmenter import PrefixTree, segment
from longstraw_agents.trainer import comparison, conventional, sparse
from longstraw_agents.trainer.candidates import SharedSparseState
from longstraw_agents.trainer.context import Context
from longstraw_agents.trainer.experts import share_experts, whole
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.ranks import Layout, Ranks, join, leave
from longstraw_agents.trainer.reduction import sum_gradients
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.sparse import SparseState
from longstraw_agents.trainer.update import Trainer, TrainerConfig, share_out
from longstraw_agents.types import Group, Task
from tests import models as zoo
from tests.test_replay import deep_group, trajectory


@dataclass(frozen=True)
class Case:
    """One model of the zoo, how it is trained, and how its trees are run."""

    name: str
    training: str = "full"
    gradient: str = "exact"
    chunk: int = 50
    pack: int = 200
    trees: int = 1
    score: bool = False
    outputs: bool = False

    def config(self) -> ReplayConfig:
        """How trees are run."""
        return ReplayConfig(self.gradient, chunk=self.chunk, pack=self.pack, placement=Placement(outputs=self.outputs))


def reference(case: Case, groups: list[Any], c: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and log-probabilities on one process: conventional ones, or our own where the gradient is detached."""
    model = zoo.build(case.name, training=case.training, dtype=torch.float64)
    logps = []
    for group, part in zip(groups, c, strict=True):
        if case.gradient == "exact":
            logps.append(conventional.backward(model, group, lambda values, part=part: (part * values).sum())[1])
        else:
            replay = Engine(model, case.config()).open(segment(group))
            logps.append(replay.backward(part).logp)
    return comparison.gradients(model), torch.cat(logps)


def shared(
    case: Case, trees: list[PrefixTree], c: list[Tensor], ranks: Ranks
) -> tuple[dict[str, Tensor], Tensor, dict[str, int]]:
    """The same from all processes, with the bytes of state that this one held."""
    model = zoo.build(case.name, training=case.training, dtype=torch.float64)
    sharded = share_experts(model, ranks)
    engine, logps, held = Engine(model, case.config(), ranks), [], {}
    mine = share_out(trees, ranks)
    for index, (tree, part) in enumerate(zip(trees, c, strict=True)):
        if index not in mine:
            logps.append(torch.zeros(len(part), dtype=torch.float64))
            continue
        replay = engine.open(tree)
        if case.score:
            replay.score()
        logps.append(replay.backward(part).logp)
        held = replay.state.nbytes()
    sum_gradients([(n, p) for n, p in model.named_parameters() if p.requires_grad], ranks, sharded)
    gradients = {name: whole(name, grad, ranks, sharded) for name, grad in comparison.gradients(model).items()}
    return gradients, ranks.sum(torch.cat(logps), "dp"), held


def check(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Differences of one case, on process 0; the others return what they held."""
    vocabulary = zoo.CONFIGS[case.name]()[1].vocab_size
    groups = [deep_group(vocabulary, seed) for seed in range(case.trees)]
    trees = [segment(group) for group in groups]
    generator = torch.Generator().manual_seed(1)
    c = [torch.randn(len(tree.entry_node), dtype=torch.float64, generator=generator) for tree in trees]
    with lifted():
        gradients, logp, held = shared(case, trees, c, ranks)
        found: dict[str, Any] = {"state_bytes": ranks.gather_objects(held.get("state", 0))}
        found["empty"] = empty_spans(case, trees, ranks)
        if ranks.number == 0:
            expected, expected_logp = reference(case, groups, c)
            difference = comparison.compare(gradients, expected)
            found |= {"worst": difference.worst, "worst_name": difference.worst_name}
            found["logp"] = float((logp - expected_logp).abs().max())
    return found


def empty_spans(case: Case, trees: list[PrefixTree], ranks: Ranks) -> int:
    """How often a process owned no token of a node's chunk."""
    context, lengths = Context(ranks), [len(node.tokens) - 1 for tree in trees for node in tree.nodes]
    runs = [min(case.chunk, length - first) for length in lengths for first in range(0, length, case.chunk)]
    return sum(context.part(run, rank).real == 0 for run in runs for rank in range(context.size))


def steps(name: str, steps: int, ranks: Ranks) -> dict[str, Any]:
    """Optimizer steps in bfloat16 on changing groups; the trainer stops at the first difference between processes."""
    model = zoo.build(name, dtype=torch.bfloat16)
    trainer = Trainer(model, TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3)), ranks=ranks)
    mismatches, norms = 0, []
    for step in range(steps):
        members = [
            replace(t, trajectory_id=f"{step}.{t.trajectory_id}", reward=float(i % 2))
            for i, t in enumerate(deep_group(zoo.CONFIGS[name]()[1].vocab_size, step))
        ]
        try:
            norms.append(trainer.update([Group(str(step), Task("zoo", step), tuple(members))]).steps[0].gradient_norm)
        except RankError:
            mismatches += 1
    return {"mismatches": mismatches, "steps": trainer.version, "norms": [norms[0], norms[-1]]}


def chain(name: str, length: int, response: int = 16) -> PrefixTree:
    """Two trajectories that share `length` tokens."""
    random = np.random.default_rng(0)
    new = lambda count: random.integers(3, zoo.CONFIGS[name]()[1].vocab_size, count).tolist()
    shared, mask = new(length), np.r_[np.zeros(length, bool), np.ones(response, bool)]
    return segment([trajectory(str(i), shared + new(response), mask) for i in range(2)])


def state_bytes(name: str, length: int, chunk: int, ranks: Ranks) -> dict[str, Any]:
    """Bytes of state and cotangent on each process, and on one alone."""
    tree, found = chain(name, length), []
    for who in (ranks, Ranks()):
        replay = Engine(zoo.build(name), ReplayConfig(chunk=chunk), who).open(tree)
        replay.backward(torch.ones(len(tree.entry_node)))
        found.append(sum(replay.state.nbytes().values()))
    return {"shared": ranks.gather_objects(found[0]), "alone": found[1]}


def traffic(name: str, lengths: list[int], ranks: Ranks) -> dict[str, Any]:
    """Bytes that this process sends per input of the leaves' replay, behind prefixes of some lengths."""
    per_token = {}
    for length in lengths:
        tree = chain(name, length)
        replay = Engine(zoo.build(name), ReplayConfig("detached", chunk=256), ranks).open(tree)
        replay.score()
        ranks.traffic.clear()
        replay.counts.clear()
        replay.backward(torch.ones(len(tree.entry_node)))
        sent = sum(ranks.traffic.bytes.values())
        per_token[length] = sent / (replay.counts["replay"] + replay.counts["reverse"])
    return {"bytes_per_token": per_token}


def selections(name: str, heads: int, ranks: Ranks, dtype: str = "float64") -> dict[str, Any]:
    """Index selections of all processes together against those of one, on a tree's score pass: queries, and how many differ.

    ties: one process's merges of candidates, by query, in which more positions had the least kept score than there was room for.
    """
    make, merge, ties = zoo.CONFIGS[name], sparse.best_picks, 0
    seen: list[Tensor] = []

    def few() -> tuple[str, Any]:
        kind, config = make()
        config.index_n_heads = heads
        return kind, config

    def note(state: SparseState, picks: Tensor) -> None:
        together = ranks.gather(picks).movedim(0, 1).flatten(1, 2) if isinstance(state, SharedSparseState) else picks
        seen.append(together[:, : state.run.length])

    def counting(best: Any, scores: Tensor, start: Any, count: int) -> Any:
        nonlocal ties
        result = merge(best, scores, start, count)
        least = result[0].amin(-1, keepdim=True)
        candidates = scores if best is None else torch.cat([best[0], scores], -1)
        more = (candidates == least).sum(-1) > (result[0] == least).sum(-1)
        ties += int((more & (least[..., 0] > -torch.inf)).sum())
        return result

    zoo.CONFIGS["few heads"] = few
    tree, found = segment(deep_group(few()[1].vocab_size)), []
    for who, best_picks in ((ranks, merge), (Ranks(), counting)):
        model = zoo.build("few heads", dtype=getattr(torch, dtype))
        with lifted(), patch.object(SparseState, "_check", note), patch.object(sparse, "best_picks", best_picks):
            Engine(model, ReplayConfig(chunk=50, pack=200), who).open(tree).score()
        found.append(torch.cat([picks.reshape(-1, picks.shape[-1]) for picks in seen]))
        seen.clear()
    shared, alone = found
    return {"queries": len(alone), "differing": int((shared != alone).any(-1).sum()), "ties": ties}


def checkpoint(name: str, folder: str, ranks: Ranks) -> dict[str, Any]:
    """Weights and moments written by these processes, read by one and by these again: the largest differences."""
    trainer = one_step(name, ranks)
    saved = Path(folder)
    trainer.save(saved)
    ranks.gather_objects(None)  # the files are there
    alone = Trainer(zoo.build(name, seed=1), TrainerConfig())
    alone.restore(saved)
    again = Trainer(zoo.build(name, seed=1), TrainerConfig(), ranks=ranks)
    again.restore(saved)
    mine = dict(trainer.model.named_parameters())
    read = dict(again.model.named_parameters())
    gathered = {n: whole(n, p.data, ranks, trainer.sharded) for n, p in mine.items()}
    worst = lambda pairs: max(float((a - b).detach().abs().max()) for a, b in pairs)
    return {
        "again": worst((p, read[n]) for n, p in mine.items()),
        "alone": worst((gathered[n], p) for n, p in alone.model.named_parameters()),
        "moments": worst(
            (trainer.stepper.optimizer.state[mine[n]]["exp_avg"], again.stepper.optimizer.state[read[n]]["exp_avg"])
            for n in mine if mine[n] in trainer.stepper.optimizer.state
        ),
        "version": again.version,
    }  # fmt: skip


def one_step(name: str, ranks: Ranks) -> Trainer:
    """A trainer after one update on one group."""
    trainer = Trainer(zoo.build(name), TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2)), ranks=ranks)
    members = deep_group(zoo.CONFIGS[name]()[1].vocab_size)
    rewarded = tuple(replace(t, reward=float(i % 2)) for i, t in enumerate(members))
    trainer.update([Group("g", Task("zoo", 0), rewarded)])
    return trainer


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "steps": steps, "bytes": state_bytes, "traffic": traffic, "checkpoint": checkpoint,
    "selections": selections,
}  # fmt: skip


def main(output: str, jobs: str, layout: str) -> None:
    """Run all jobs; see the module's head."""
    torch.set_num_threads(1)
    ranks = join(Layout(**json.loads(layout)))
    for settings in json.loads(jobs):
        asked = dict(settings)
        job = asked.pop("job", None)
        found = check(Case(**asked), ranks) if job is None else JOBS[job](**asked, ranks=ranks)
        costs = ranks.costs()
        if ranks.number == 0:
            with Path(output).open("a") as file:
                file.write(json.dumps(settings | found | {"ranks": costs}) + "\n")
    leave(ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
