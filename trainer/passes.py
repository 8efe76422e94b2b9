"""One pass of an update as the journal sees it: which runs were done before, and what lies on the current path.

Vocabulary: see `journal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longstraw_agents.errors import CorruptionError, StaleStateError
from longstraw_agents.trainer import snapshot, wholefile
from longstraw_agents.trainer.state import Run

if TYPE_CHECKING:
    from longstraw_agents.trainer.journal import Journal
    from longstraw_agents.trainer.replay import Scores, TreeReplay


@dataclass(frozen=True)
class Written:
    """A captured run [start, stop) of the current path, its files, and whether the recurrent state at its end was dropped."""

    start: int
    stop: int
    dropped: bool = False
    state: str | None = None
    cotangent: str | None = None


@dataclass
class Result:
    """What is left of a pass that has finished."""

    about: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass
class Checkpoint:
    """What was read: the number of the pass, the runs of it that were done, results of the passes before."""

    about: dict[str, Any]
    tensors: dict[str, Tensor]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors under `name`."""
        return {key.removeprefix(f"{name}/"): tensor for key, tensor in self.tensors.items() if key.startswith(f"{name}/")}


@dataclass
class Pass:
    """One pass of an update, as the journal sees it."""

    journal: Journal
    replay: TreeReplay
    out: Scores
    sums: dict[Tensor, Tensor | None]
    given: str
    finished: Result | None = None  # by an earlier process
    resumed: Checkpoint | None = None
    done: int = 0  # runs

    def __post_init__(self) -> None:
        if self.finished is not None:
            _fill(self.out, self.finished.tensors)

    @property
    def written(self) -> list[Written]:
        """The captured runs of the current path."""
        return self.replay.written

    @property
    def skips(self) -> bool:
        """Whether the next run was done by an earlier process."""
        return self.finished is not None or (self.resumed is not None and self.done < self.resumed.about["runs"])

    def ran(self, run: Run) -> None:
        """A run was done: what lay behind its start is not on the path any more."""
        self.written[:] = [entry for entry in self.written if entry.stop <= run.start]
        if run.writes:
            self.written.append(Written(run.start, run.stop))
        self.journal.count(run)

    def drop(self, border: int) -> None:
        """See `StateCache.drop`."""
        self.written[:] = [replace(entry, dropped=True) if entry.stop == border else entry for entry in self.written]

    def border(self) -> None:
        """A run is done, or was skipped: take over what was written of the border, or write what is due."""
        skipped = self.skips
        self.done += 1
        if not skipped:
            self.journal.border(self)
        elif self.resumed is not None and not self.skips:
            self._take_over(self.resumed)

    def close(self) -> None:
        """The pass is at its end. Raises StaleStateError where it was shorter than the one that was journaled."""
        if self.finished is not None:
            about = self.finished.about
            self.replay.counts, self.replay.seconds = Counter(about["counts"]), Counter(about["seconds"])
            self.replay.told = about["told"]
            self.journal.finished(self.finished)
            return
        if self.skips:
            raise StaleStateError(
                f"a pass ended after {self.done} runs, but its journal has {self.resumed and self.resumed.about['runs']}; "
                f"remove {self.journal.config.directory} to begin the update anew"
            )
        about = self._counted() | {"told": self.replay.report(), "given": self.given}
        self.journal.finished(Result(about, {name: tensor.clone() for name, tensor in _scores(self.out).items()}))

    # -- what a checkpoint holds, but for the files of its state -------------------------------------------------------------

    def describe(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Of this pass at this border."""
        replay = self.replay
        about = self._counted() | {"runs": self.done, "given": self.given, "flips": snapshot.flips(replay.state)}
        parts = {
            "out": _scores(self.out),
            "gradient": snapshot.gradients(replay.engine.model, self.sums),
            "outline": snapshot.outline(replay.state),
        }
        return about, {f"{part}/{name}": tensor for part, named in parts.items() for name, tensor in named.items()}

    def _counted(self) -> dict[str, Any]:
        return {"counts": dict(self.replay.counts), "seconds": dict(self.replay.seconds)}

    def _take_over(self, found: Checkpoint) -> None:
        """Bring state, gradients, scores and counts to where the checkpoint was written."""
        replay, state, folder = self.replay, self.replay.state, self.journal.config.directory
        self.written[:] = [Written(**entry) for entry in found.about["written"]]
        for entry, tensors in _read(folder, [(entry, entry.state) for entry in self.written]):
            snapshot.restore_states(state, entry.start, entry.stop, tensors)
            if entry.dropped:
                state.drop(entry.stop)
        snapshot.restore_outline(state, found.part("outline"))
        for entry, tensors in _read(folder, [(entry, entry.cotangent) for entry in self.written]):
            snapshot.restore_cotangents(state, entry.start, entry.stop, tensors)
        snapshot.restore_flips(state, found.about["flips"])
        snapshot.restore_gradients(replay.engine.model, self.sums, found.part("gradient"))
        _fill(self.out, found.part("out"))
        replay.counts, replay.seconds = Counter(found.about["counts"]), Counter(found.about["seconds"])


def _read(folder: Path, files: Sequence[tuple[Written, str | None]]) -> Iterator[tuple[Written, dict[str, Tensor]]]:
    """The tensors of each file that there is, a few read at once. Raises CorruptionError for one that is not what was written."""

    def read(name: str) -> dict[str, Tensor]:
        try:
            about, tensors = wholefile.read(folder / name)
            if about.get("name") != name:
                raise CorruptionError(f"{folder / name} was written as {about.get('name')}")
        except CorruptionError as error:
            raise CorruptionError(f"{error}; remove {folder} to begin the update anew") from error
        return tensors

    named = [(entry, name) for entry, name in files if name is not None]
    with ThreadPoolExecutor(wholefile.AT_ONCE) as pool:
        for first in range(0, len(named), wholefile.AT_ONCE):  # no more than these are in memory
            few = named[first : first + wholefile.AT_ONCE]
            yield from zip((entry for entry, _ in few), pool.map(read, (name for _, name in few)), strict=True)


def _scores(out: Scores) -> dict[str, Tensor]:
    return {"logp": out.logp} | ({} if out.entropy is None else {"entropy": out.entropy})


def _fill(out: Scores, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in _scores(out).items():
        tensor.copy_(tensors[name])
