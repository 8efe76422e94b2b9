"""The trainer: groups in, optimizer steps and a receipt out.

One update of the weights on some groups: segment them into prefix trees, score (or not, where the first step's coefficients
do not depend on log-probabilities), evaluate the loss once over all groups, replay and reverse tree by tree, step. Old,
reference and behaviour log-probabilities stay fixed over an update's steps; each step has its own states and coefficients.
Memory does not grow with the number of groups: trees go one after another, and states of several trees are kept between
scoring and replay only within `keep_bytes`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longstraw_agents.errors import AdapterError, ConfigError, GroupError, NonFiniteError
from longstraw_agents.phases import Phases
from longstraw_agents.segmenter import PrefixTree, SegmenterConfig, segment
from longstraw_agents.trainer import delta_rule
from longstraw_agents.trainer.advantages import AdvantageConfig, Prepared, prepare
from longstraw_agents.trainer.bounded import Bounded, BoundedConfig
from longstraw_agents.trainer.credit import packed, spans
from longstraw_agents.trainer.evidence import cite
from longstraw_agents.trainer.experts import own_part, share_experts, whole
from longstraw_agents.trainer.journal import Journal, JournalConfig, digest_of, stamps_of
from longstraw_agents.trainer.kernels import chosen
from longstraw_agents.trainer.loss import Coefficients, Loss, LossBatch, LossConfig, coefficients, make_batch
from longstraw_agents.trainer.offload import offload_of
from longstraw_agents.trainer.optimizer import OptimizerConfig, Stepper
from longstraw_agents.trainer.ranks import Ranks
from longstraw_agents.trainer.recapture import Recapture
from longstraw_agents.trainer.receipt import Receipt, Step, versions
from longstraw_agents.trainer.reduction import require_same, sum_gradients
from longstraw_agents.trainer.replay import Engine, ReplayConfig, Scores, TreeReplay
from longstraw_agents.trainer.shelf import ShelfConfig
from longstraw_agents.types import Group

#: Prepares groups: filters them and gives each loss token its advantage. `advantages.prepare` is the default.
Credit = Callable[[Sequence[Group]], Prepared]


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of an update. steps: optimizer steps on the same groups. keep_bytes: states kept between score and replay.

    recapture: where states are kept between steps and updates, and how many bytes of them; None keeps none. bounded: settings
    of approximate recapture, which is biased; None is exact. journal: where an update that is under way keeps what a new process
    needs to go on with it; None keeps nothing. With one, states of several trees are captured again for their replay.
    """

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    segmenter: SegmenterConfig = field(default_factory=SegmenterConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 1
    keep_bytes: int = 2**30
    recapture: ShelfConfig | None = None
    bounded: BoundedConfig | None = None
    journal: JournalConfig | None = None

    def __post_init__(self) -> None:
        if self.journal is not None and (self.recapture is not None or self.bounded is not None):
            raise ConfigError("trainer.journal holds no states of other updates: leave out trainer.recapture and trainer.bounded")
        if self.journal is not None and (self.steps > 1 or self.replay.placement.bits is not None):
            raise ConfigError("trainer.journal holds one step's exact states: set trainer.steps to 1, and leave out `bits`")
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}; an update makes at least one optimizer step")
        if self.loss.name == "dr_grpo" and self.advantage.divide_by_deviation:
            raise ConfigError("loss dr_grpo does not divide by the deviation: set advantage.divide_by_deviation = false")


class Trainer:
    """Trains a transformers causal language model, whole or through PEFT adapters, on groups of trajectories."""

    def __init__(
        self, model: nn.Module, config: TrainerConfig = TrainerConfig(), *, loss: Loss | None = None,
        credit: Credit | None = None, reference: nn.Module | None = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """loss: a callable in place of config.loss. credit: a function in place of config.advantage.

        reference: the model of the KL term; by default the model itself with its adapters switched off. ranks: the processes
        that share the work, each with a trainer like this one; all of them are given the same groups.
        Raises ConfigError where a KL term has no reference, ModelError for a model that cannot be replayed exactly.
        """
        self.model, self.config = model, config
        self.ranks = ranks or Ranks()
        if self.ranks.world > 1 and (config.recapture is not None or config.bounded is not None):
            raise ConfigError("several processes keep no states between steps: leave out trainer.recapture and trainer.bounded")
        if self.ranks.world > 1 and config.journal is not None:
            raise ConfigError("several processes can't be resumed within an update: leave out trainer.journal")
        self.sharded = share_experts(model, self.ranks)
        self.engine = Engine(model, config.replay, self.ranks)
        self.loss: LossConfig | Loss = loss or config.loss
        self.credit = credit or (lambda groups: prepare(groups, config.advantage))
        self.recapture = None if config.recapture is None else Recapture.of(self.engine, config.recapture)
        self.bounded = None if config.bounded is None else Bounded(self.engine, config.bounded, self.recapture)
        self.journal = None if config.journal is None else Journal(config.journal)
        self.version = 0
        self.stepper = Stepper(model, config.optimizer, self.ranks, self.sharded)
        self._reference = None if reference is None else Engine(reference, config.replay, self.ranks)
        if config.loss.kl_weight > 0 and reference is None and not hasattr(model, "disable_adapter"):
            raise ConfigError(
                f"kl_weight is {config.loss.kl_weight}, but the model has no adapters to switch off; "
                "pass reference=, a frozen copy of the model, or set kl_weight to 0"
            )

    def update(self, groups: Sequence[Group]) -> Receipt:
        """One update on `groups`; the weights change in place and `version` counts the optimizer steps.

        If every group is skipped (equal rewards, too few valid ones) no step is made and the receipt says so.
        Raises NonFiniteError (weights unchanged) and GroupError for an update without groups.
        """
        if not groups:
            raise GroupError("an update was given no group; collect at least one group of two trajectories")
        prepared = self.credit(groups)
        return self.run(prepared) if prepared.kept else self._receipt(prepared)

    def run(self, prepared: Prepared) -> Receipt:
        """`update` on groups whose advantages are known, at least one."""
        receipt, phases = self._receipt(prepared), Phases()
        copied = held.copied if (held := offload_of(self.model)) is not None else 0
        self.engine.stamps.forget()
        with phases("segment"):
            trees = [segment(group.trajectories, self.config.segmenter) for group, _ in prepared.kept]
        self._describe(trees, receipt)
        with nullcontext() if self.journal is None else self.journal.update(self._stamps(prepared, trees)):
            with phases("reference"):
                reference = self._reference_logp(trees, receipt) if self.config.loss.kl_weight > 0 else None
            old: Tensor | None = None
            for _ in range(self.config.steps):
                old = self._step(prepared, trees, old, reference, receipt, phases)
            if self.journal is not None:
                self.journal.step_made()
        receipt.last_version = self.version
        if self.recapture is not None:
            receipt.recapture = self.recapture.report()
        if self.bounded is not None:
            receipt.bounded = self.bounded.report()
            receipt.gradient = "bounded" if receipt.bounded["approximate_trees"] else receipt.gradient
        if self.journal is not None:
            receipt.journal = self.journal.report()
        receipt.phases = phases.as_dict()
        receipt.setting |= {"kernels": chosen() + delta_rule.chosen(), "head": self.engine.head.name}
        if (held := offload_of(self.model)) is not None:
            receipt.setting |= {"weights": "host", "weight_bytes_copied": held.copied - copied}
        self._describe_ranks(receipt)
        receipt.evidence = {"E1": "all passes finished; loss, coefficients and gradients are finite"} | cite(self.model)
        return receipt

    def settle(self) -> None:
        """The last update's step is saved, or not wanted: its journal is removed. Without a journal nothing happens."""
        if self.journal is not None:
            self.journal.settle()

    def _stamps(self, prepared: Prepared, trees: list[PrefixTree]) -> dict[str, str]:
        """What the update and its step depend on, for the journal."""
        data = [
            np.ascontiguousarray(array).tobytes()
            for group, of_group in prepared.kept
            for trajectory, advantages in zip(group.trajectories, of_group, strict=True)
            for array in (trajectory.action_mask, trajectory.behaviour, np.float64(trajectory.weight), advantages)
        ]
        loss = asdict(self.loss) if isinstance(self.loss, LossConfig) else getattr(self.loss, "__name__", "callable")
        stamps = stamps_of(self.engine, trees) | {
            "version": str(self.version), "data": digest_of(*data), "loss": str(loss),
            "optimizer": f"{asdict(self.config.optimizer)} after {self.stepper.steps} steps",
        }  # fmt: skip
        return stamps if self._reference is None else stamps | {"reference": stamps_of(self._reference, trees)["weights"]}

    # -- one optimizer step ---------------------------------------------------------------------------------------------

    def _step(
        self, prepared: Prepared, trees: list[PrefixTree], old: Tensor | None, reference: Tensor | None,
        receipt: Receipt, phases: Phases,
    ) -> Tensor:  # fmt: skip
        """Score, loss, replay and reverse, step. Returns the old log-probabilities [N] of the update."""
        entropy_wanted = self.config.loss.entropy_weight > 0
        skip_scores = old is None and isinstance(self.loss, LossConfig) and not self.loss.first_step_needs_scores
        replays: list[TreeReplay | None] = [None] * len(trees)
        if skip_scores:
            # c_t at ratio 1 does not depend on the log-probabilities: zeros stand in, the replay gives the real ones.
            count = sum(len(tree.entry_node) for tree in trees)
            now = Scores(self._zeros(count), self._zeros(count) if entropy_wanted else None)
        else:
            with phases("score"), self.ranks.working("score"):
                now = self._score(trees, replays, entropy_wanted, receipt)
        batch = make_batch(prepared.kept, now.logp if old is None else old, reference)
        found = coefficients(self.loss, now.logp, batch, now.entropy)
        self.stepper.zero_grad()
        with phases("replay"), self.ranks.working("replay"):
            seen = self._backward(trees, replays, found, receipt)
        if skip_scores:
            batch = make_batch(prepared.kept, seen.logp, reference)
            found = coefficients(self.loss, seen.logp, batch, seen.entropy)
        receipt.log_ratio = _log_ratios(seen.logp if skip_scores else now.logp, batch)
        with phases("step"), self.ranks.working("step"):
            self._apply(found, batch, receipt)
        return batch.old

    def _score(
        self, trees: list[PrefixTree], replays: list[TreeReplay | None], entropy: bool, receipt: Receipt
    ) -> Scores:
        parts, held = [], 0
        mine = share_out(trees, self.ranks)
        for index, tree in enumerate(trees):
            if index not in mine:
                parts.append(self._nothing(tree, entropy))
                continue
            replay = self._open(tree)
            before = replay.counts.copy()
            parts.append(replay.score(entropy=entropy))
            receipt.inputs.update(replay.counts - before)
            receipt.seconds.update(replay.seconds)
            held += replay.state.nbytes()["state"]
            if (held <= self.config.keep_bytes and self.journal is None) or len(trees) == 1:
                replay.counts.clear()
                replay.seconds.clear()
                replays[index] = replay
        return self._of_all(_join(parts))

    def _backward(
        self, trees: list[PrefixTree], replays: list[TreeReplay | None], found: Coefficients, receipt: Receipt
    ) -> Scores:
        parts, last, mine = [], 0, share_out(trees, self.ranks)
        for index, tree in enumerate(trees):
            first, last = last, last + len(tree.entry_node)
            if index not in mine:
                parts.append(self._nothing(tree, found.entropy is not None))
                continue
            replay = replays[index] or self._open(tree)
            replays[index] = None  # its state goes as soon as it is done
            if self.bounded is not None:
                self.bounded.before_backward(tree, replay, found.logp[first:last])
            parts.append(replay.backward(found.logp[first:last], None if found.entropy is None else found.entropy[first:last]))
            receipt.inputs.update(replay.counts)
            report = replay.report()
            receipt.flips.update(report["flips"])
            receipt.seconds.update(replay.seconds)
            for kind, size in report["bytes"].items():
                receipt.state_bytes[kind] = max(receipt.state_bytes.get(kind, 0), size)
            if self.bounded is not None:
                self.bounded.after_backward(tree, replay)
        return self._of_all(_join(parts))

    def _nothing(self, tree: PrefixTree, entropy: bool) -> Scores:
        """What a process adds for a tree that others work on."""
        count = len(tree.entry_node)
        return Scores(self._zeros(count), self._zeros(count) if entropy else None)

    def _of_all(self, scores: Scores) -> Scores:
        """Scores of all trees, from the processes that share them out."""
        entropy = None if scores.entropy is None else self.ranks.sum(scores.entropy, "dp", "log-probabilities")
        return Scores(self.ranks.sum(scores.logp, "dp", "log-probabilities"), entropy)

    def _open(self, tree: PrefixTree) -> TreeReplay:
        return self.engine.open(tree, self.recapture, self.journal) if self.bounded is None else self.bounded.open(tree)

    def _apply(self, found: Coefficients, batch: LossBatch, receipt: Receipt) -> None:
        """Sum over processes, clip and step, unless a gradient is not finite: then the weights stay and the batch is named."""
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        sum_gradients(trained, self.ranks, self.sharded)
        norm = self.stepper.gradient_norm()
        if not math.isfinite(norm):
            name = next(
                (n for n, p in self.model.named_parameters() if p.grad is not None and not bool(torch.isfinite(p.grad).all())),
                "the sum over all parameters",
            )
            self.stepper.zero_grad()
            raise NonFiniteError(
                f"the gradient of {name} is not finite in the update of groups {', '.join(batch.group_ids)}; no step was made"
            )
        rate = self.stepper.step()
        self.version += 1
        if self.ranks.world > 1:
            require_same(trained, self.ranks, self.version, self.sharded)
        receipt.steps.append(Step(self.version, found.loss, norm, rate, found.metrics))

    def _reference_logp(self, trees: list[PrefixTree], receipt: Receipt) -> Tensor:
        """Log-probabilities [N] under the reference's weights: a pass of its own that keeps nothing else."""
        engine = self._reference or self.engine
        off = nullcontext() if self._reference is not None else self.model.disable_adapter()  # type: ignore[operator]
        parts, mine = [], share_out(trees, self.ranks)
        with off:
            for index, tree in enumerate(trees):
                if index not in mine:
                    parts.append(self._nothing(tree, entropy=False))
                    continue
                replay = engine.open(tree, journal=self.journal)
                parts.append(replay.score())
                receipt.inputs["reference"] += replay.counts["capture"] + replay.counts["score"]
        return self._of_all(_join(parts)).logp

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.promote_types(self.engine.dtype, torch.float32), device=self.engine.device)

    # -- receipt --------------------------------------------------------------------------------------------------------

    def _receipt(self, prepared: Prepared) -> Receipt:
        setting = {
            "model": getattr(self.engine.base.config, "name_or_path", "") or type(self.engine.base).__name__,
            "model_type": self.engine.base.config.model_type,
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "device": str(self.engine.device),
            "trained_parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "chunk": self.config.replay.chunk,
            "pack": self.config.replay.pack,
            "loss": asdict(self.loss) if isinstance(self.loss, LossConfig) else getattr(self.loss, "__name__", "callable"),
            "advantage": asdict(self.config.advantage),
            "versions": versions(),
        }
        return Receipt(
            self.version, self.version, self.config.replay.gradient, groups=[g.group_id for g, _ in prepared.kept],
            skipped=[(group, str(reason)) for group, reason in prepared.skipped],
            dropped=[(group, name, str(reason)) for group, name, reason in prepared.dropped],
            masked=[(group, name, str(reason)) for group, name, reason in prepared.masked],
            credit={
                trajectory.trajectory_id: spans(trajectory, advantages)
                for group, of_group in prepared.kept
                for trajectory, advantages in zip(group.trajectories, of_group, strict=True)
            },
            setting=setting,
        )  # fmt: skip

    def _describe(self, trees: list[PrefixTree], receipt: Receipt) -> None:
        receipt.tokens = {
            "trajectories": sum(len(t.tokens) for tree in trees for t in tree.trajectories),
            "tree_targets": sum(tree.targets for tree in trees),
            "unmerged_targets": sum(tree.unmerged_targets for tree in trees),
            "loss": sum(len(tree.entry_node) for tree in trees),
        }
        if self.config.replay.gradient == "detached":
            receipt.borders = [[(node.start, node.stop) for node in tree.nodes] for tree in trees]

    def _describe_ranks(self, receipt: Receipt) -> None:
        """What each process held, sent and waited for; counts of inputs become those of all trees."""
        if self.ranks.world == 1:
            return
        peak = max(phase.get("gpu_peak_mib", phase["peak_mib"]) for phase in receipt.phases.values())
        mine = {"state_bytes": receipt.state_bytes, "peak_mib": peak, "inputs": dict(receipt.inputs)}
        everyone = self.ranks.gather_objects(mine)
        receipt.ranks = [held | cost for held, cost in zip(everyone, self.ranks.costs(), strict=True)]
        one_of_each = everyone[:: self.ranks.size("context")]  # processes of one context count the same runs
        receipt.inputs = sum((Counter(held.pop("inputs")) for held in one_of_each), Counter())

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the adapter (PEFT's format) or the model (transformers' format), the optimizer's state, and the version.

        Every process takes part, and process 0 writes: the files are the same for any number of them.
        """
        write = self.checkpoint()
        if self.ranks.number == 0:
            write(directory)

    def checkpoint(self) -> Callable[[Path], None]:
        """What `save` writes, gathered from all processes: a function that writes it into a directory."""
        state = {name: self._whole(name, tensor) for name, tensor in self.model.state_dict().items()} if self.sharded else None
        optimizer = self._moments(self.stepper.state_dict(), self._whole)

        def write(directory: Path) -> None:
            directory.mkdir(parents=True, exist_ok=True)
            self.model.save_pretrained(directory, **({} if state is None else {"state_dict": state}))  # type: ignore[operator]
            torch.save(optimizer, directory / "optimizer.pt")
            about = {"version": self.version, "update": "" if self.journal is None else self.journal.made}
            (directory / "trainer.json").write_text(json.dumps(about) + "\n")

        return write

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote, into this trainer's model. Raises AdapterError where it belongs to another model."""
        _load_weights(self.model, directory, self._own_part)
        state = torch.load(directory / "optimizer.pt", weights_only=True, map_location="cpu")
        self.stepper.load_state_dict(self._moments(state, self._own_part))
        about = json.loads((directory / "trainer.json").read_text())
        self.version = int(about["version"])
        if self.journal is not None:
            self.journal.made = about.get("update", "")  # earlier versions did not write it

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        return whole(name, tensor, self.ranks, self.sharded)

    def _own_part(self, name: str, tensor: Tensor) -> Tensor:
        return own_part(name, tensor, self.ranks, self.sharded)

    def _moments(self, state: dict[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
        """The optimizer's state with its tensors changed as their parameters are."""
        if not self.sharded:
            return state
        names = {id(p): name for name, p in self.model.named_parameters()}
        order = [names[id(p)] for group in self.stepper.optimizer.param_groups for p in group["params"]]
        moments = {
            index: {key: change(order[index], value) if value.ndim else value for key, value in entry.items()}
            for index, entry in state["optimizer"]["state"].items()
        }
        return state | {"optimizer": state["optimizer"] | {"state": moments}}


def _load_weights(model: nn.Module, directory: Path, own_part: Callable[[str, Tensor], Tensor]) -> None:
    if not hasattr(model, "peft_config"):
        # Through transformers: what its files name and how it stacks experts is its own affair.
        stored = type(model).from_pretrained(directory, dtype=model.dtype).state_dict()  # type: ignore[attr-defined]
        result = model.load_state_dict({name: own_part(name, tensor) for name, tensor in stored.items()}, strict=False)
        tied = set(getattr(model, "_tied_weights_keys", None) or ())
        missing = [name for name in result.missing_keys if name not in tied]
    else:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        result = set_peft_model_state_dict(model, load_file(directory / "adapter_model.safetensors"))
        missing = [name for name in result.missing_keys if "lora_" in name]
    if missing or result.unexpected_keys:
        raise AdapterError(
            f"{directory} does not belong to this model: {len(missing)} of its tensors are missing and "
            f"{len(result.unexpected_keys)} unexpected, first {(missing + list(result.unexpected_keys))[0]}; "
            "load it with the model and adapter settings it was trained with"
        )


def share_out(trees: Sequence[PrefixTree], ranks: Ranks) -> set[int]:
    """Indices of the trees that this process works on: the largest first, each to the processes with the least to do."""
    load = [0] * ranks.size("dp")
    mine: set[int] = set()
    for index in sorted(range(len(trees)), key=lambda i: -trees[i].targets):
        owner = load.index(min(load))
        load[owner] += trees[index].targets
        if owner == ranks.rank("dp"):
            mine.add(index)
    return mine


def _log_ratios(logp: Tensor, batch: LossBatch) -> dict[str, str]:
    """By trajectory: log-probabilities minus the behaviour's, packed."""
    gap = (logp - batch.behaviour).cpu().numpy()
    of_each = np.split(gap, np.cumsum(batch.token_counts.cpu().numpy())[:-1])
    return {name: packed(values) for name, values in zip(batch.trajectory_ids, of_each, strict=True)}


def _join(parts: Sequence[Scores]) -> Scores:
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return Scores(torch.cat([part.logp for part in parts]), torch.cat(entropies) if entropies else None)
