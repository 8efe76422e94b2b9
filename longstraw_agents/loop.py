"""The run: collect, store, segment, train, commit, recapture, evaluate, and again.

Idea: the store is the run's memory. Which tasks an update works on follows from the run's seed and the update's number; whatever
the trainer uses is read back from the store; a step exists once the store has committed it. So a run that was stopped anywhere
goes on with the last complete step, and collecting and training in two processes gives what one process gives, bit for bit.

Vocabulary
    update   one round: the groups of some tasks are collected, trained on, and used up
    step     the committed update: steps are numbered from 1, as updates are
    folder   where a run lives: store.sqlite, steps/000012 (adapter, optimizer's state, receipt.json), run.toml
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import longstraw_agents.envs  # noqa: F401  registers the built-in environments
from longstraw_agents import config as toml
from longstraw_agents.checkpoints import alone, check_step, prune, step_folder, write_step
from longstraw_agents.collection import CollectConfig, Progress, collect
from longstraw_agents.episodes import make_registered
from longstraw_agents.errors import ConfigError, StoreError
from longstraw_agents.evaluation import EvaluateSettings, heldout_tasks, outcomes, task_seed
from longstraw_agents.guards import Guards, behaviour_report, best, breaches, out_of_patience, require_sampled_as_trained
from longstraw_agents.metrics import Metrics, MetricsSettings
from longstraw_agents.phases import Phases
from longstraw_agents.policies.opening import PolicySettings, open_policy
from longstraw_agents.receipts import metrics_of, summary, update_row
from longstraw_agents.rendering import RenderingConfig, renderer_for
from longstraw_agents.scores import Interval, Score, gain_points, score
from longstraw_agents.storage import Store
from longstraw_agents.terminal import Terminal
from longstraw_agents.trainer.imitation import imitate
from longstraw_agents.trainer.lead import LeadingTrainer, follow
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.models import ModelConfig, load_adapter, load_model
from longstraw_agents.trainer.ranks import Layout, Ranks
from longstraw_agents.trainer.update import Credit, Trainer, TrainerConfig
from longstraw_agents.types import FAILED, Group, Task
from longstraw_agents.warmstart import Demonstrator, WarmStart, stored_groups

#: What may differ between a run's stored configuration and the one it goes on with.
MAY_CHANGE = (
    "run.updates", "run.evaluate_every", "run.keep", "run.folder", "run.store", "evaluate.", "guards.", "policy.", "metrics.",
    "parallel.", "trainer.journal", "collect.workers", "collect.ray_", "collect.concurrency",
)  # fmt: skip


@dataclass(frozen=True)
class RunSettings:
    """Where a run lives and how long it is. `store` is a path or an SQLAlchemy URL, by default store.sqlite in the folder.

    evaluate_every: updates between evaluations, 0 for before and after only; keep: step folders kept, newest first.
    """

    name: str = "run"
    folder: Path = Path("runs/run")
    store: str | None = None
    updates: int = 24
    seed: int = 0
    evaluate_every: int = 0
    keep: int = 3

    def __post_init__(self) -> None:
        for name, lowest in (("updates", 0), ("seed", 0), ("evaluate_every", 0), ("keep", 1)):
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be at least {lowest}, not {getattr(self, name)}")


@dataclass(frozen=True)
class TaskSettings:
    """What is trained on: `groups` tasks of an environment in each update, `samples` trajectories of each.

    `env` is a gymnasium id; "module:id" imports the module first, which registers it. `options` go to the environment's reset.
    """

    env: str = "longstraw/Lookup-v0"
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: int = 4
    samples: int = 8

    def __post_init__(self) -> None:
        if self.groups < 1 or self.samples < 1:
            raise ConfigError(f"groups is {self.groups} and samples {self.samples}; give at least 1 of each")


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run: one field is one section of its TOML file."""

    run: RunSettings = field(default_factory=RunSettings)
    tasks: TaskSettings = field(default_factory=TaskSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicySettings = field(default_factory=PolicySettings)
    rendering: RenderingConfig = field(default_factory=RenderingConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    warm_start: WarmStart = field(default_factory=WarmStart)
    guards: Guards = field(default_factory=Guards)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    parallel: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        if self.parallel.ep > 1 and self.policy.kind == "local":
            raise ConfigError("parallel.ep shares the experts out, so the trainer's model can't sample alone: set policy.kind")
        if self.parallel.ep > 1 and self.model.weights == "host":
            raise ConfigError('parallel.ep shares experts out on the devices; leave model.weights = "host" off, or set ep to 1')
        if self.tasks.samples < 2 and self.trainer.advantage.credit != "chain":
            raise ConfigError(
                f"samples is {self.tasks.samples}, but credit {self.trainer.advantage.credit!r} compares at least 2 trajectories "
                "of a task; give more, or set trainer.advantage.credit to 'chain'"
            )
        if self.guards.patience and not self.run.evaluate_every:
            raise ConfigError(f"guards.patience is {self.guards.patience}, but run.evaluate_every is 0; set it to at least 1")
        sampled, trained = self.collect.sampling.temperature, self.trainer.replay.temperature
        if sampled != trained:
            raise ConfigError(
                f"collect.sampling.temperature is {sampled} and trainer.replay.temperature {trained}; "
                "the distribution that is trained must be the one that was sampled: set both to the same value"
            )
        if self.collect.sampling.top_p != 1.0:
            raise ConfigError(
                f"collect.sampling.top_p is {self.collect.sampling.top_p}, but the trainer scores the whole distribution, "
                "of which a nucleus is another one; set it to 1"
            )


class Loop:
    """One run in one process. Make it from a configuration: it begins the run, or goes on where the store says it stopped.

    Raises ConfigError where the store's run of this name has other settings, and what loading the model and store raises.
    """

    def __init__(
        self, config: RunConfig, terminal: Terminal | None = None, credit: Credit | None = None, ranks: Ranks | None = None
    ) -> None:
        """credit: replaces the group's advantages (see Trainer). ranks: processes whose others are in `follow_loop`."""
        self.config, self.terminal = config, terminal or Terminal.silent()
        self.folder = config.run.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = Store.open(config.run.store or str(self.folder / "store.sqlite"))
        self.run_id = self._run_id()
        self.metrics = Metrics(config.metrics, self.folder, config.run.name, toml.plain(config))
        self.phases = Phases()
        with self.phases("load"):
            self.model, tokenizer = load_model(config.model)
            self.trainer = LeadingTrainer(self.model, config.trainer, credit=credit, ranks=ranks)
            self._restore()
        self.tokenizer, self.renderer = tokenizer, renderer_for(tokenizer, config.rendering)
        with self.phases("load"):
            self.policy = open_policy(
                config.policy, self.model, self.renderer.stop_ids, version=self.trainer.version, adapter=self._adapter(),
                kept=None if self.trainer.recapture is None else self.trainer.recapture.beginning,
            )

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.trainer.close()
        self.policy.close()
        self.metrics.close()
        self.store.close()
        # the name of a finished loop often lives on while the next one loads its model: never two of them in memory
        del self.model, self.trainer, self.policy

    @property
    def done(self) -> int:
        """How many updates are committed."""
        step = self.store.latest_step(self.run_id)
        return 0 if step is None else step.step

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.trainer.version

    @property
    def steps(self) -> Path:
        """Where the step folders lie."""
        return self.folder / "steps"

    @property
    def step_folder(self) -> Path:
        """Where the files of the last committed step lie: adapter, optimizer's state, receipt.json."""
        return step_folder(self.steps, self.done)

    def tasks(self, update: int) -> list[Task]:
        """The tasks of an update: a function of the run's seed and the update's number alone."""
        first, settings = (update - 1) * self.config.tasks.groups, self.config.tasks
        seeds = [task_seed(self.config.run.seed, first + index) for index in range(settings.groups)]
        return [Task(settings.env, seed, "train", dict(settings.options)) for seed in seeds]

    def run(self) -> dict[str, Any]:
        """All updates that are left, with evaluations, or fewer where a guard stops; returns the report."""
        every = self.config.run.evaluate_every
        if not self.done:
            self.evaluate("before")
        while self.done < self.config.run.updates and not self.stops():
            self.collect()
            self.train()
            if every and self.done % every == 0 and self.done < self.config.run.updates:
                self.evaluate(f"update {self.done}")
        for reason in self.stops():
            self.terminal.say(f"stopped after update {self.done}: {reason}")
        self.evaluate("after")
        return self.report()

    def stops(self) -> list[str]:
        """Why no further update is made, as the store shows it; empty where nothing speaks against one."""
        step, guards = self.store.latest_step(self.run_id), self.config.guards
        reasons = [] if step is None else breaches(step.receipt, guards)
        if out_of_patience([success for _, _, success in self._scored()], guards):
            reasons.append(f"{guards.patience} evaluations brought no better success")
        return reasons

    def best(self) -> dict[str, Any] | None:
        """The evaluation with the highest success so far, and the step that it is of (0: the run's beginning)."""
        scored = self._scored()
        if not scored:
            return None
        name, version, success = scored[best([success for _, _, success in scored])]
        if version == 0 or _is_update(name):  # the name says it: no need to read every step's receipt
            step = 0 if version == 0 else int(name.removeprefix("update "))
        else:
            step = next((row.step for row in self.store.steps(self.run_id) if row.last_version == version), 0)
        folder = str(step_folder(self.steps, step)) if step else None
        return {"evaluation": name, "success": success, "step": step, "folder": folder}

    def collect(self) -> list[str]:
        """Collect the next update's groups, or what is missing of them; returns their ids."""
        update = self.done + 1
        with self.phases("collect"):
            if self._imitates(update) and self.config.warm_start.source != "samples":
                return self._demonstrate(update)
            return self._collect(self.tasks(update), self.config.tasks.samples, "train", f"update {update}", self.config.run.seed)

    def train(self) -> dict[str, Any]:
        """Train on the complete groups that no step has used, commit the step, and return its receipt.

        Raises StoreError where there is no such group, and where the weights at hand are not those of the last committed step: a
        step was made and could not be committed, or another process committed one. A failed update changes neither store nor
        weights.
        """
        self._require_committed()
        update, imported = self.done + 1, self._imports(self.done + 1)
        rows = [] if imported else self.store.groups(self.run_id, purpose="train", complete=True, unused=True)
        if not rows and not imported:
            raise StoreError(f"run {self.config.run.name} has no complete group that is unused; collect first: longstraw collect")
        with self.phases("read"):
            groups = imported or [self.store.load_group(row.group_id) for row in rows]
            if not self._imitates(update):
                require_sampled_as_trained(groups, self.config.trainer.replay.temperature)
        receipt = self._train_alone(update, groups)
        receipt["collected"] = self.collected([row.group_id for row in rows]) | behaviour_report(groups)
        with self.phases("commit"), alone(self.steps):
            if self.done >= update:
                raise StoreError(
                    f"step {update} of run {self.config.run.name} was committed by another process meanwhile; its files stay: "
                    "open the run again to go on from there, in one process"
                )
            files = write_step(self.steps, update, lambda folder: self._save(folder, receipt))
            self.store.commit_step(
                self.run_id,
                step=update,
                first_version=receipt["first_version"],
                last_version=receipt["last_version"],
                group_ids=[row.group_id for row in rows],
                files=files,
                receipt=receipt,
            )
            self.trainer.settle()
            best_step = (self.best() or {"step": 0})["step"]
            prune(self.steps, keep={*range(update - self.config.run.keep + 1, update + 1), best_step})
        self._wake()
        self.terminal.row(update_row(update, receipt))
        self.metrics.log(update, metrics_of(receipt))
        return receipt

    def evaluate(self, name: str, options: Mapping[str, Any] | None = None) -> dict[str, Score]:
        """Evaluate the current weights on the held-out tasks, once per name and version: a second call reads the stored result.

        `options` are added to the tasks' options, for controls.
        """
        for row in self.store.evaluations(self.run_id):
            if (row.name, row.policy_version) == (name, self.trainer.version):
                return {mode: Score.from_dict(values["score"]) for mode, values in row.metrics.items()}
        settings, scores, metrics = self.config.evaluate, {}, {}
        tasks = heldout_tasks(settings, self.config.tasks.env, {**self.config.tasks.options, **(options or {})})
        with self.phases("evaluate"):
            for mode, samples in settings.modes().items():
                ids = self._collect(tasks, samples, "eval", f"{name}, {mode}", settings.seed, greedy=mode == "greedy")
                scores[mode] = score(mode, outcomes(self.store, ids))
                metrics[mode] = {"score": scores[mode].as_dict(), "groups": ids}
                self.terminal.say(f"{name:<10} {scores[mode]}")
        self.store.add_evaluation(self.run_id, name, self.trainer.version, metrics)
        if not options:
            self.metrics.log(self.done, {"evaluate": {mode: score.as_dict() for mode, score in scores.items()}})
        return scores

    def use(self, adapter: Path) -> None:
        """Take another adapter's weights, to evaluate them. Raises ConfigError where the run has updates of its own, AdapterError
        where the adapter does not fit the model."""
        if self.done:
            raise ConfigError(f"run {self.config.run.name} has updates of its own; use another adapter in another run")
        load_adapter(self.model, adapter)
        self.policy.refresh(self.trainer.version, adapter)

    def gain(self, first: str, last: str, mode: str = "sampled") -> tuple[float, Interval]:
        """Points of success that the evaluation `last` is above `first`, paired by task, with its 95 % interval."""
        groups = {row.name: row.metrics[mode]["groups"] for row in self.store.evaluations(self.run_id) if mode in row.metrics}
        for name in (first, last):
            if name not in groups:
                raise StoreError(f"there is no evaluation {name!r} in mode {mode!r}; there are {', '.join(groups) or 'none'}")
        return gain_points(outcomes(self.store, groups[first]), outcomes(self.store, groups[last]))

    def collected(self, group_ids: Sequence[str]) -> dict[str, Any]:
        """What some groups hold: for the curves, the table and the receipt."""
        rows = [row for group_id in group_ids for row in self.store.trajectories(group_id)]
        rewards = [row.reward for row in rows if row.reward is not None]
        parts: Counter[str] = Counter()
        for row in rows:
            parts.update(row.reward_parts)
        return {
            "episodes": len(rows),
            "failed": sum(row.stop_reason in FAILED for row in rows),
            "reward": sum(rewards) / max(len(rewards), 1),
            "success": sum(bool(row.success) for row in rows) / max(len(rows), 1),
            "tokens": sum(row.length for row in rows),
            "stop_reasons": dict(Counter(str(row.stop_reason) for row in rows)),
            "reward_parts": {name: value / max(len(rewards), 1) for name, value in sorted(parts.items())},
        }

    def report(self) -> dict[str, Any]:
        """What the run has shown so far, for people and machines."""
        rows = self.store.evaluations(self.run_id)
        evaluations = {row.name: {mode: values["score"] for mode, values in row.metrics.items()} for row in rows}
        return {
            "run": self.config.run.name,
            "run_id": self.run_id,
            "store": self.config.run.store or str(self.folder / "store.sqlite"),
            "adapter": str(self.step_folder),
            "receipts": f"{self.steps}/*/receipt.json",
            "updates": [
                update_row(step.step, step.receipt) | {"phases": step.receipt["phases"]} for step in self.store.steps(self.run_id)
            ],
            "evaluations": evaluations,
            "best": self.best(),
            "stopped": self.stops(),
            "phases": self.phases.as_dict(),
            "sampler": self.policy.report(),
        }

    def summary(self) -> str:
        """The report for people: reward curve, tokens, time and memory by phase, and where everything lies."""
        return summary(self.report())

    # Inside

    def _run_id(self) -> str:
        """The store's run of this name, or a new one. What the store has of it must be what is asked for."""
        asked = toml.plain(self.config)
        for row in self.store.runs():
            if row.name == self.config.run.name:
                _require_same(row.config, asked, self.config.run.name)
                return row.run_id
        (self.folder / "run.toml").write_text(toml.dump(self.config), encoding="utf-8")
        return self.store.create_run(self.config.run.name, asked)

    def _require_committed(self) -> None:
        step = self.store.latest_step(self.run_id)
        version = 0 if step is None else step.last_version
        if self.trainer.version != version:
            raise StoreError(
                f"the weights at hand are of version {self.trainer.version}, but the last committed step of run "
                f"{self.config.run.name} left version {version}; open the run again to go on from that step"
            )

    def _restore(self) -> None:
        step = self.store.latest_step(self.run_id)
        if step is not None:
            self.trainer.restore(check_step(self.steps, step.step, step.files))
            self.trainer.settle()  # a process may have died between committing the step and this

    def _adapter(self) -> Path | None:
        """Where the policy finds the newest adapter; None while there is none but the untrained one, which changes nothing."""
        return self.step_folder if self.done else None

    def _save(self, folder: Path, receipt: Mapping[str, Any]) -> None:
        self.trainer.save(folder)
        (folder / "receipt.json").write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")

    def _scored(self) -> list[tuple[str, int, float]]:
        """(name, policy version, success) of the run's own evaluations, in order; sampled success where there is one."""
        rows = [row for row in self.store.evaluations(self.run_id) if row.name in ("before", "after") or _is_update(row.name)]
        modes = [row.metrics.get("sampled") or row.metrics["greedy"] for row in rows]
        return [(row.name, row.policy_version, mode["score"]["success"]) for row, mode in zip(rows, modes, strict=True)]

    def _imitates(self, update: int) -> bool:
        return update <= self.config.warm_start.updates

    def _imports(self, update: int) -> list[Group]:
        """Groups of another store, where the update imitates such."""
        settings = self.config.warm_start
        if not self._imitates(update) or settings.source != "store":
            return []
        return stored_groups(settings, update, self.config.tasks.groups)

    def _update(self, update: int, groups: list[Group]) -> dict[str, Any]:
        """The trainer's update with the run's own loss, or with the supervised one in a warm start; its receipt."""
        loss, credit = self.trainer.loss, self.trainer.credit
        if self._imitates(update):
            self.trainer.loss = LossConfig("supervised")
            self.trainer.credit = lambda given: imitate(given, self.config.warm_start.minimum_reward)
        try:
            return self.trainer.update(groups).to_dict()
        finally:
            self.trainer.loss, self.trainer.credit = loss, credit

    def _train_alone(self, update: int, groups: list[Group]) -> dict[str, Any]:
        """The update while the policy gives its memory up. The receipt tells what the run's phases since the last one took."""
        with self.phases("pause"):
            self.policy.pause()
        try:
            with self.phases("train"):
                receipt = self._update(update, groups)
        except Exception:
            self._wake()  # the weights are what they were, and the caller may go on with them
            raise
        receipt["run_phases"] = self.phases.take()
        return receipt

    def _wake(self) -> None:
        with self.phases("wake"):
            self.policy.refresh(self.trainer.version, self._adapter())

    def _demonstrate(self, update: int) -> list[str]:
        """Demonstrations of the environment's solver, one for each of the update's tasks; none where they are imported."""
        if self.config.warm_start.source == "store":
            return []
        shown = Demonstrator(self.tokenizer, self.renderer.end_id, version=self.trainer.version)
        label = f"update {update}, demonstrations"
        return self._collect(self.tasks(update), 1, "train", label, self.config.run.seed, demonstrator=shown)

    def _collect(
        self, tasks: Sequence[Task], size: int, purpose: str, label: str, seed: int, greedy: bool = False,
        demonstrator: Demonstrator | None = None,
    ) -> list[str]:  # fmt: skip
        """One group of `size` finished episodes per task; their ids in the tasks' order."""
        config = self.config.collect
        if demonstrator is not None:  # it plays one episode at a time, in this process
            config = replace(config, concurrency=1, workers="threads", tree=None)
        if purpose == "eval":  # samples of a task must be independent
            config = replace(config, tree=None)
        if greedy:
            config = replace(config, sampling=replace(config.sampling, temperature=0.0))
        line = self.terminal.progress(label, len(tasks) * size, "episodes")

        def progress(state: Progress) -> None:
            line.total = state.total
            reward = "" if state.mean_reward is None else f"  reward {state.mean_reward:.3f}"
            failed = "".join(f"  {count} {reason}" for reason, count in sorted(state.failures.items()))
            line.update(state.episodes, f"{state.tokens_per_second:.0f} tokens/s{reward}{failed}")

        try:
            result = asyncio.run(
                collect(
                    self.store, demonstrator or self.policy, self.renderer, tasks, config,
                    run_id=self.run_id, group_size=size, purpose=purpose, seed=seed, progress=progress,
                    make=make_registered if demonstrator is None else demonstrator.make,
                )
            )  # fmt: skip
        finally:
            line.close()
        return [group_id for group_id in result.group_ids if group_id is not None]


def follow_loop(config: RunConfig, ranks: Ranks) -> None:
    """Take part in the updates of the loop that process 0 runs, until it ends."""
    model, _ = load_model(config.model)
    follow(Trainer(model, config.trainer, ranks=ranks))


def _is_update(name: str) -> bool:
    return name.startswith("update ") and name.removeprefix("update ").isdigit()


def _require_same(stored: Mapping[str, Any], asked: Mapping[str, Any], name: str) -> None:
    before, after = _flat(stored), _flat(asked)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not key.startswith(MAY_CHANGE):
            raise ConfigError(
                f"the store has a run {name!r} with {key} = {before.get(key)!r}, and {after.get(key)!r} is asked for; "
                "give the run another name, or go on with its own settings (run.toml in its folder)"
            )


def _flat(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{where}{key}.") if isinstance(value, Mapping) else {f"{where}{key}": value}
    return flat
