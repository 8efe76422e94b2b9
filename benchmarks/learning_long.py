"""The long arms of `learning.py`: an agent trained on trajectories of more than 100,000 tokens, and its control.

Idea: the task is Documents with a text of 110,000 tokens, shared by a group's members, and several questions about it, one after
the other. SmolLM2 was trained on 8,192 positions, so its rotary embedding is extended (YaRN, arXiv:2309.00071, factor 16) before
anything is trained. A run has three stages, one loop and one optimizer:

    warm    imitate solved tasks of 2,000 to 16,000 tokens, so that the agent knows the task and the new positions
    shown   imitate solved tasks of the full length
    own     learn from rewards of own trajectories of the full length

Held-out success at the full length is measured after `warm` ("before") and at the end ("after"). The control, `truncated`, is
the same run up to `warm`; then each trajectory that it trains on is cut to its last 8,192 tokens, as a trainer must do that can't
hold more. It samples and is evaluated at the full length.

The last evaluation comes first: its time is kept free, and a stage that fails ends the training, not the arm, whose progress
file says so under `failed`.

Memory: a token's keys and values are 23,040 bytes (30 layers, 3 heads of 64, bfloat16), so six sessions of 115,000 tokens hold
15 GiB while they are sampled, and up to 2 GiB more where a buffer was made with room to grow. The trainer, for which the
policy gives that up, took 20 GiB on solved tasks and 26 GiB on own trajectories: states with their cotangents, and what the
chunks keep.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import documents
from benchmarks.learning_arms import Arm, Progress, Watch
from longstraw_agents.collection import CollectConfig
from longstraw_agents.errors import LongStrawError, PolicyError
from longstraw_agents.evaluation import EvaluateSettings, task_seed
from longstraw_agents.loop import Loop, RunConfig, RunSettings, TaskSettings
from longstraw_agents.policies.opening import PolicySettings
from longstraw_agents.rendering import ChatML, Rendered
from longstraw_agents.trainer.kernels import chosen
from longstraw_agents.trainer.models import SMOLLM2, LoraSettings, ModelConfig, smollm2_folder
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.replay import ReplayConfig
from longstraw_agents.trainer.update import TrainerConfig
from longstraw_agents.types import Group, Message, Task

ENV = f"benchmarks.documents:{documents.ENV_ID}"
FACTOR = 16
OPENINGS = 256  # rendered ones that are kept
LAST = 1.4  # times what the first evaluation took is kept free for the last one


@dataclass(frozen=True)
class Stage:
    """updates: at most; share: of the time that is left but for the last evaluation; chars: of the texts, taken in turn by task;
    groups, questions: of an update and of a trajectory; imitate: solved tasks, else own ones."""

    name: str
    updates: int
    share: float
    chars: tuple[int, ...]
    groups: int
    questions: int
    imitate: bool


@dataclass(frozen=True)
class LongScale:
    """Sizes of the long experiment. limit: tokens that the control keeps of a trajectory; chunk: of the trainer."""

    stages: tuple[Stage, ...]
    chars: int
    questions: int
    samples: int
    tasks: int
    limit: int
    chunk: int


def scale_of(chars: int, warm: tuple[int, ...], updates: tuple[int, int, int], tasks: int, limit: int, chunk: int) -> LongScale:
    """Three stages with so many updates each at most."""
    stages = (
        Stage("warm", updates[0], 0.25, warm, 4, 8, True),
        Stage("shown", updates[1], 0.60, (chars,), 2, 8, True),
        Stage("own", updates[2], 1.0, (chars,), 2, 4, False),
    )
    return LongScale(stages, chars, 6, 6, tasks, limit, chunk)


SCALES = {
    "full": scale_of(460_000, (8_000, 16_000, 32_000, 64_000), (32, 14, 8), 16, 8192, 8192),
    "small": scale_of(1_500, (300, 600), (2, 1, 1), 2, 128, 128),
}


def extended(model: str, folder: Path, factor: int = FACTOR) -> Path:
    """A folder with the model's files and a rotary embedding stretched by `factor`, its attention scaled as YaRN does."""
    source = smollm2_folder() if model == SMOLLM2 else Path(model)
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        link = folder / path.name
        if path.name != "config.json" and not link.exists():
            link.symlink_to(path.resolve())
    config = json.loads((source / "config.json").read_text())
    trained = config["max_position_embeddings"]
    theta = config["rope_parameters"]["rope_theta"]
    config["rope_parameters"] = {
        "rope_type": "yarn", "rope_theta": theta, "factor": float(factor), "original_max_position_embeddings": trained
    }  # fmt: skip
    config["max_position_embeddings"] = trained * factor
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Remembering(ChatML):
    """Renders what a group's members, or two evaluations, begin with once: a text of 110,000 tokens takes a second."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._known: OrderedDict[tuple[Message, ...], Rendered] = OrderedDict()

    def first(self, messages: Sequence[Message]) -> Rendered:
        """As ChatML's, kept."""
        key = tuple(messages)
        if key not in self._known:
            self._known[key] = super().first(messages)
        self._known.move_to_end(key)
        while len(self._known) > OPENINGS:
            self._known.popitem(last=False)
        return self._known[key]


class StagedLoop(Loop):
    """A loop whose tasks, and whether it imitates, follow its stage; with a limit it trains on the ends of trajectories alone."""

    stage: Stage
    limit: int | None = None

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.renderer = Remembering(self.tokenizer)

    def tasks(self, update: int) -> list[Task]:
        """The tasks of an update, by its stage."""
        stage, base = self.stage, self.config.tasks
        seeds = [task_seed(self.config.run.seed, update * 16 + index) for index in range(stage.groups)]
        chars = [stage.chars[index % len(stage.chars)] for index in range(stage.groups)]
        options = [{**base.options, "chars": size, "questions": stage.questions} for size in chars]
        return [Task(base.env, seed, "train", of_task) for seed, of_task in zip(seeds, options, strict=True)]

    def _imitates(self, update: int) -> bool:
        return self.stage.imitate

    def _update(self, update: int, groups: list[Group]) -> dict[str, object]:
        return super()._update(update, groups if self.limit is None else [ending(group, self.limit) for group in groups])


def ending(group: Group, limit: int) -> Group:
    """The group with its trajectories cut, all at the same place, so that the shortest keeps its last `limit` tokens (or a few
    more: what is kept begins with an observation)."""
    start = max(0, min(len(trajectory.tokens) for trajectory in group.trajectories) - limit)
    while any(trajectory.action_mask[start] for trajectory in group.trajectories):
        start -= 1
    cut = [
        replace(
            trajectory, tokens=trajectory.tokens[start:], action_mask=trajectory.action_mask[start:],
            behaviour=trajectory.behaviour[start:], policy_version=trajectory.policy_version[start:],
            turn_ends=tuple(end - start for end in trajectory.turn_ends),
        )
        for trajectory in group.trajectories
    ]  # fmt: skip
    return replace(group, trajectories=tuple(cut))


def configuration(arm: Arm, sizes: LongScale) -> RunConfig:
    """The run of both long arms."""
    cuda = arm.device == "cuda"
    return RunConfig(
        run=RunSettings(name=arm.name, folder=arm.folder, updates=1000, seed=arm.seed, keep=1),
        tasks=TaskSettings(ENV, {"facts": 16}, 2, sizes.samples),
        model=ModelConfig(
            str(extended(arm.model, arm.folder / "model")), "bfloat16" if cuda else "float32", arm.device,
            LoraSettings(rank=16, alpha=32.0), arm.seed,
        ),
        policy=PolicySettings(step_tokens=8192),
        collect=CollectConfig(max_action_tokens=24, max_trajectory_tokens=131_072, concurrency=6),
        trainer=TrainerConfig(
            replay=ReplayConfig(chunk=sizes.chunk, pack=4096, placement=Placement(outputs=True)),
            optimizer=OptimizerConfig(learning_rate=5e-4),
            keep_bytes=2**34,  # two groups' states and outputs stay from scoring to replay
        ),
        evaluate=EvaluateSettings(
            tasks=sizes.tasks, samples=0, greedy=True, options={"chars": sizes.chars, "questions": sizes.questions}
        ),
    )  # fmt: skip


def run_long(arm: Arm) -> None:
    """A long arm: its stages, with an evaluation at the full length after the first and after the last."""
    progress, sizes = Progress(arm), SCALES[arm.scale]
    if arm.memory is not None and arm.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(arm.memory)
    with StagedLoop(configuration(arm, sizes)) as loop:
        progress.set(settings=json.loads(json.dumps(loop.store.runs()[-1].config)), failed={})
        watch = Watch(loop, progress, arm.deadline)
        for stage in sizes.stages:
            if not progress.values["failed"]:
                with noted(progress, stage.name):
                    run_stage(arm, stage, watch)
            if stage.name == "warm":
                with noted(progress, "before"):
                    watch.evaluate("before")
        watch.evaluate("after")
        progress.set(ended="updates", phases=loop.phases.as_dict(), kernels=chosen())


def run_stage(arm: Arm, stage: Stage, watch: Watch) -> None:
    """The updates of a stage that there is time for. Raises PolicyError where an update has no episode to learn from."""
    loop, now = watch.loop, time.time()
    assert isinstance(loop, StagedLoop)
    loop.stage = stage
    loop.limit = SCALES[arm.scale].limit if arm.kind == "truncated" and stage.name != "warm" else None
    evaluation = max((row["took"] for row in watch.progress.values["evaluations"]), default=0.0)
    # sampling an update's trajectories, of two texts, takes about half as long as an evaluation
    guess = watch.longest + (0.0 if stage.imitate else evaluation / 2)
    watch.begin(now + stage.share * (arm.deadline - LAST * evaluation - now), guess)
    done = loop.done
    while loop.done < done + stage.updates and watch.has_time():
        collected = watch.update(stage=stage.name)["collected"]
        if collected["failed"] == collected["episodes"]:
            raise PolicyError(f"all {collected['episodes']} episodes of update {loop.done} failed; see the arm's log")


@contextmanager
def noted(progress: Progress, what: str) -> Iterator[None]:
    """Write a failure down and go on: the arm is there for its last evaluation."""
    try:
        yield
    except (LongStrawError, RuntimeError) as error:  # torch's lack of memory is a RuntimeError
        traceback.print_exc()
        progress.set(failed=progress.values["failed"] | {what: f"{type(error).__name__}: {error}"})
    if what in progress.values["failed"]:
        gc.collect()  # what the failed call's frames held
        torch.cuda.empty_cache()
