"""The arms of `learning.py`: one training in one process, which writes what it has after every update.

Idea: an arm is a run of the ordinary loop. Arms of one experiment and seed differ in one thing alone: they get the same tasks,
seeds, adapter and learning rate, and are evaluated on the same held-out tasks after the same updates. An arm ends with its last
update or at its deadline, and whatever ends it, its file holds the curve up to there.

    exact, detached, conventional   the gradient, on Documents: the reward depends on reading a prompt of 2,000 tokens and more
    exact2, detached2, conventional2   the same where a number's name is asked for, which is harder to learn
    flat, tree                      groups of whole episodes, or forked late with node credit, on Calls with five turns
    ours, trl                       this trainer and TRL's GRPOTrainer, on Calls with one turn
    long, truncated                 see `learning_long.py`
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks import calls, documents
from benchmarks.against_trl import train_with_trl
from longstraw_agents.collection import CollectConfig
from longstraw_agents.evaluation import EvaluateSettings, outcomes
from longstraw_agents.forking import TreeConfig
from longstraw_agents.loop import Loop, RunConfig, RunSettings, TaskSettings
from longstraw_agents.policies.opening import PolicySettings
from longstraw_agents.segmenter import PrefixTree, SegmenterConfig
from longstraw_agents.trainer import kernels
from longstraw_agents.trainer.advantages import AdvantageConfig
from longstraw_agents.trainer.conventional import log_probabilities
from longstraw_agents.trainer.models import LoraSettings, ModelConfig
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.receipt import versions
from longstraw_agents.trainer.replay import ReplayConfig, Scores
from longstraw_agents.trainer.update import TrainerConfig
from longstraw_agents.types import FAILED
from longstraw_agents.warmstart import WarmStart

GRADIENTS = ("exact", "detached", "conventional", "exact2", "detached2", "conventional2")
EVALUATION = 60.0  # seconds kept for the evaluation of what TRL trained


@dataclass(frozen=True)
class Scale:
    """Sizes: tasks and samples of an update, updates between evaluations, held-out tasks (twice sampled), updates at most,
    and in the comparison with TRL; of the reading task updates that imitate, characters of its text, facts, and what it asks."""

    groups: int = 4
    samples: int = 8
    every: int = 5
    tasks: int = 48
    updates: int = 60
    trl_updates: int = 20
    imitated: int = 6
    chars: int = 10_000
    facts: int = 4
    ask: str = "number"


SCALES = {"full": Scale(), "small": Scale(2, 3, 1, 2, 2, 2, 1, 600)}
#: Of the harder reading task.
NAMES = {
    "full": replace(SCALES["full"], every=10, imitated=16, facts=8, ask="name"),
    "small": replace(SCALES["small"], facts=8, ask="name"),
}


@dataclass(frozen=True)
class Arm:
    """One training. name: kind and seed, "exact-0"; folder: where its run lives; out: its progress file; deadline: Unix time;
    memory: the share of the GPU's that it may take, None for all."""

    name: str
    model: str
    device: str
    scale: str
    folder: Path
    out: Path
    deadline: float
    memory: float | None = None

    @property
    def kind(self) -> str:
        """The arm's kind, from its name."""
        return self.name.rpartition("-")[0]

    @property
    def seed(self) -> int:
        """The arm's seed, from its name."""
        return int(self.name.rpartition("-")[2])

    @property
    def sizes(self) -> Scale:
        """Its sizes."""
        return (NAMES if self.kind.endswith("2") else SCALES)[self.scale]


class Progress:
    """An arm's file, written whole after each change: settings, updates, evaluations, how it ended."""

    def __init__(self, arm: Arm) -> None:
        self.path = arm.out
        self.values: dict[str, Any] = {
            "arm": arm.name, "model": arm.model, "scale": arm.scale, "versions": versions(), "updates": [], "evaluations": [],
            "ended": None,
        }  # fmt: skip
        self.set()

    def set(self, **values: Any) -> None:
        """Add values and write the file."""
        self.values |= values
        hidden = self.path.with_suffix(".writing")
        hidden.write_text(json.dumps(self.values))
        os.replace(hidden, self.path)

    def add(self, name: Literal["updates", "evaluations"], row: Mapping[str, Any]) -> None:
        """Append a row to a list."""
        self.values[name].append(dict(row))
        self.set()


def configuration(arm: Arm) -> RunConfig:
    """The run of any arm but the long ones."""
    sizes, reads = arm.sizes, arm.kind in GRADIENTS
    options: dict[str, Any] = {"questions": 5 if arm.kind in ("flat", "tree") else 1}
    if reads:
        options = {"chars": sizes.chars, "facts": sizes.facts, "ask": sizes.ask}
    tree = arm.kind == "tree"
    return RunConfig(
        run=RunSettings(name=arm.name, folder=arm.folder, updates=sizes.updates, seed=arm.seed),
        tasks=TaskSettings(
            f"benchmarks.{'documents' if reads else 'calls'}:{documents.ENV_ID if reads else calls.ENV_ID}", options,
            sizes.groups, round(sizes.samples * 13 / 8) if tree else sizes.samples,
        ),
        model=ModelConfig(arm.model, "bfloat16" if arm.device == "cuda" else "float32", arm.device, LoraSettings(), arm.seed),
        policy=PolicySettings(step_tokens=16384),
        collect=CollectConfig(
            max_action_tokens=12 if sizes.ask == "name" else 24, max_trajectory_tokens=4096 if reads else 1024,
            concurrency=48 if reads else 64,
            tree=TreeConfig(trunks=2) if tree else None,
        ),
        trainer=TrainerConfig(
            replay=ReplayConfig("detached" if arm.kind.startswith("detached") else "exact", chunk=1536, pack=4096),
            # a few hundred tokens are run faster than shared: then a group is one run of all its members
            segmenter=SegmenterConfig() if reads else SegmenterConfig(min_span=1024),
            optimizer=OptimizerConfig(learning_rate=1e-3),
            advantage=AdvantageConfig(credit="node" if tree else "trajectory"),
        ),
        evaluate=EvaluateSettings(tasks=sizes.tasks, samples=2, greedy=False),
        warm_start=WarmStart(updates=sizes.imitated if reads else 0),
    )  # fmt: skip


class ConventionalReplay:
    """What the trainer asks of a `TreeReplay`, by a full-sequence forward of each trajectory through the untouched model."""

    def __init__(self, model: Any, tree: PrefixTree) -> None:
        self.model, self.tree = model, tree
        self.counts: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.state = self

    def score(self, *, entropy: bool = False) -> Scores:
        """Log-probabilities of every loss entry, without autograd."""
        with torch.no_grad():
            return Scores(torch.cat([logp for _, logp in self._members("score")]))

    def backward(self, c_N: Tensor, e_N: Tensor | None = None) -> Scores:
        """Add the gradient of sum(c * logp)."""
        seen = []
        for mine, logp in self._members("backward"):
            (logp * c_N[torch.as_tensor(mine, device=c_N.device)]).sum().backward()  # type: ignore[no-untyped-call]
            seen.append(logp.detach())
        return Scores(torch.cat(seen))

    def _members(self, kind: str) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Each trajectory's entries, which are ordered by (trajectory, position), and their log-probabilities."""
        owner, position = np.asarray(self.tree.entry_trajectory), np.asarray(self.tree.entry_position)
        for index, trajectory in enumerate(self.tree.trajectories):
            mine = np.flatnonzero(owner == index)
            if len(mine):
                self.counts[kind] += len(trajectory.tokens) - 1
                yield mine, log_probabilities(self.model, trajectory.tokens, position[mine])

    def nbytes(self) -> dict[str, int]:
        """No state is kept."""
        return {"state": 0}

    def flips(self) -> dict[str, int]:
        """None: nothing is decided twice."""
        return {}


def run_arm(arm: Arm) -> None:
    """Run an arm other than a long one or TRL's, to its last update or its deadline."""
    progress = Progress(arm)
    # FlashAttention-4 compiles for half a minute, and cuDNN plans anew for every length: not worth it for short prompts.
    kernels.KERNELS = tuple(sorted(kernels.KERNELS, key=lambda kernel: kernel.name not in ("torch-flash", "torch-cpu-flash")))
    with Loop(configuration(arm)) as loop:
        if arm.kind.startswith("conventional"):
            loop.trainer._open = lambda tree: ConventionalReplay(loop.model, tree)  # type: ignore[method-assign,assignment,return-value]
        progress.set(settings=json.loads(json.dumps(loop.store.runs()[-1].config)))
        watch = Watch(loop, progress, arm.deadline)
        last = arm.sizes.trl_updates if arm.kind == "ours" else arm.sizes.updates
        watch.evaluate()
        while loop.done < last and watch.has_time():
            watch.update()
            if loop.done % arm.sizes.every == 0 or loop.done == last:
                watch.evaluate()
        progress.set(ended="updates" if loop.done == last else "deadline", phases=loop.phases.as_dict(), kernels=kernels.chosen())


class Watch:
    """A loop's updates and evaluations as rows of a progress file, and whether there is time for another."""

    def __init__(self, loop: Loop, progress: Progress, deadline: float) -> None:
        self.loop, self.progress = loop, progress
        self.sampled, self.seconds = 0, 0.0
        self.begin(deadline)

    def begin(self, deadline: float, guess: float = 0.0) -> None:
        """Begin a stage that ends at a Unix time; guess: seconds of its first update."""
        self.deadline, self.guess, self.longest = deadline, guess, 0.0

    def has_time(self) -> bool:
        """Whether an update that takes as long as the stage's longest so far ends before the deadline."""
        return time.time() + 1.2 * (self.longest or self.guess) < self.deadline

    def update(self, **more: Any) -> dict[str, Any]:
        """Collect and train once; gives the receipt. `seconds` and `sampled` (tokens) are sums over the updates, evaluations
        apart."""
        loop, began, sampled = self.loop, time.time(), self.loop.policy.report()["sampled"]
        loop.collect()
        self.sampled += loop.policy.report()["sampled"] - sampled
        receipt: dict[str, Any] = loop.train()
        took = time.time() - began
        self.seconds, self.longest = self.seconds + took, max(self.longest, took)
        collected, step = receipt["collected"], receipt["steps"][-1] if receipt["steps"] else {}
        phases = receipt["phases"].values()
        peaks = {key: max((phase.get(key, 0.0) for phase in phases), default=0.0) for key in ("peak_mib", "gpu_peak_mib")}
        self.progress.add(
            "updates",
            {
                "update": loop.done, "reward": collected["reward"], "success": collected["success"],
                "entropy": collected["entropy"], "degenerate": collected["degenerate"],
                "skipped": len(receipt["skipped"]), "failed": collected["failed"], "loss": step.get("loss"),
                "norm": step.get("gradient_norm"), "metrics": step.get("metrics", {}), "tokens": receipt["tokens"],
                "seconds": self.seconds, "sampled": self.sampled, "phases": loop.phases.as_dict(), **peaks, **more,
            },
        )  # fmt: skip
        return receipt

    def evaluate(self, name: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Held-out success, return and share of right answers by task; the loop's own names unless one is given."""
        loop, began = self.loop, time.time()
        name = name or (f"update {loop.done}" if loop.done else "before")
        loop.evaluate(name, options)
        (row,) = [row for row in loop.store.evaluations(loop.run_id) if row.name == name]
        (mode,) = row.metrics.values()
        episodes = outcomes(loop.store, mode["groups"])
        rows = [loop.store.trajectories(group) for group in mode["groups"]]
        self.progress.add(
            "evaluations",
            {
                "name": name, "update": loop.done, "sampled": self.sampled, "seconds": self.seconds,
                "success": [float(np.mean([episode.success for episode in task])) for task in episodes],
                "returns": [float(np.mean([episode.reward or 0.0 for episode in task])) for task in episodes],
                "answers": [_answers(task) for task in rows],
                "lengths": [int(max(member.length for member in task)) for task in rows],
                "took": time.time() - began,
            },
        )  # fmt: skip
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # other arms share the GPU


def _answers(members: Sequence[Any]) -> float | None:
    """The share of right answers in a task's episodes; None where each of them failed, which is no evidence about the policy."""
    shares = [member.reward_parts.get("answer", 0.0) for member in members if member.stop_reason not in FAILED]
    return float(np.mean(shares)) if shares else None


def run_trl(arm: Arm) -> None:
    """The same tasks, samples, adapter and learning rate with TRL; evaluated as ours is."""
    progress, config = Progress(arm), configuration(arm)
    config = replace(config, run=replace(config.run, updates=0))
    updates = arm.sizes.trl_updates
    with Loop(config) as loop:
        watch = Watch(loop, progress, arm.deadline)
        watch.evaluate("before")
        report = train_with_trl(loop, updates, arm.deadline - EVALUATION)
        progress.set(**report)
        watch.evaluate("trl")
        progress.values["evaluations"][-1] |= {"update": len(report["updates"]), "seconds": report["seconds"]}
        progress.set(ended="updates" if len(report["updates"]) == updates else "deadline")

