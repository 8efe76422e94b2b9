"""The journal of an update under way: a new process goes on from its last checkpoint, to the same bits.

Idea: an update is a fixed sequence of passes over its trees, and a pass a fixed sequence of runs. What it has in hand between two
runs is the results of the passes before, the gradients so far, the scores so far, and the state with its cotangents. The journal
writes that down now and then. A process that finds a checkpoint walks the same passes, skips the runs that were done, and takes
over at the border what was written: nothing has to say where in the walk it was but a count.

What a run wrote into the state does not change while it is on the current path, so it is written once, in a file of its own.
Cotangents change with every run behind it, so each checkpoint has files of its own for them, of the positions not yet reversed.
The checkpoint's own file names all of these and is moved into place last; then files that it does not name are removed. A process
that is killed at any moment leaves the checkpoint before or the one after, with all of its files.

Vocabulary
    pass         one scoring or one backward walk of a tree; passes of an update are numbered
    border       between two runs of a pass
    checkpoint   what is needed to go on from a border
    stamps       digests and settings, by name, that decide what an update computes; a checkpoint is read under the same ones only
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from longstraw_agents.errors import ConfigError, CorruptionError, NonFiniteError, StaleStateError, UpdateStoppedError
from longstraw_agents.segmenter import PrefixTree
from longstraw_agents.trainer import snapshot, wholefile
from longstraw_agents.trainer.passes import Checkpoint, Pass, Result, Written
from longstraw_agents.trainer.receipt import versions
from longstraw_agents.trainer.stamps import tensor_digest
from longstraw_agents.trainer.state import Run, StateCache

if TYPE_CHECKING:
    from longstraw_agents.trainer.replay import Engine, Scores, TreeReplay

_LOG = logging.getLogger(__name__)

_CHECKPOINT = "checkpoint.safetensors"
#: Names of the files beside it, and of files under way.
_OWN = re.compile(
    rf"(state|cotangent)-\d+\.safetensors|{re.escape(wholefile.HIDDEN)}\d+-(state-\d+|cotangent-\d+|checkpoint)\.safetensors"
)
#: A checkpoint takes at most about a fifth of the time: the pause after it is this many times what it took.
_PAUSE = 4


@dataclass(frozen=True)
class JournalConfig:
    """Where checkpoints lie (a folder for nothing else), and how often they are written: `seconds` between two, or more where one
    takes long.

    stop_after: seconds of work on an update after which it stops with a checkpoint, raising UpdateStoppedError; None: never.
    """

    directory: Path
    seconds: float = 60.0
    stop_after: float | None = None

    def __post_init__(self) -> None:
        if self.directory == Path():
            raise ConfigError("journal directory is the current folder; name a folder that holds nothing else")
        if not self.seconds >= 0:
            raise ConfigError(f"journal seconds is {self.seconds}; it must be at least 0")
        if self.stop_after is not None and not self.stop_after >= 0:
            raise ConfigError(f"journal stop_after is {self.stop_after}; it must be at least 0, or left out")


class Journal:
    """See the module's head. One journal serves one update after the other: `update` around its passes, then `settle`."""

    def __init__(self, config: JournalConfig) -> None:
        self.config = config
        #: Digest of the stamps of the update whose step made the present weights; "" where no journal was kept of it.
        self.made = ""
        self._folder: int | None = None  # the locked folder, while it can be used
        self._start()

    def _start(self) -> None:
        self._stamps: dict[str, str] | None = None  # of the update that is under way, or was last
        self._found: Checkpoint | None = None
        self._results: list[Result] = []
        self._files = 0  # numbers of files
        self._counts: Counter[str] = Counter()  # inputs of this process
        self._written: Counter[str] = Counter()
        self._seconds = 0.0
        self._failed = 0
        self._error = ""
        self._begun = time.monotonic()
        self._due = self._begun + self.config.seconds
        self._end = math.inf if self.config.stop_after is None else self._begun + self.config.stop_after

    # -- an update ------------------------------------------------------------------------------------------------------

    @contextmanager
    def update(self, stamps: Mapping[str, str]) -> Iterator[None]:
        """Begin an update, or go on with it; within the block its passes run. What was written stays until `settle`.

        What is left of the update that `made` the present weights is removed. Raises StaleStateError, naming what differs, where
        the folder holds another unfinished update; CorruptionError where its checkpoint is not what was written;
        ConfigError where another process works with it. A folder that can't be written is no error: the update is not
        resumable then, and the report says so.
        """
        self._start()
        try:
            self._begin(dict(stamps))
            yield
        except NonFiniteError as error:
            if self._found is None and not self._written["checkpoints"]:
                raise
            raise NonFiniteError(
                f"{error}; a checkpoint may hold it already: remove {self.config.directory} to compute the update anew"
            ) from error
        finally:
            self._let_go()

    def step_made(self) -> None:
        """The update's step was made: the weights are what it left."""
        self.made = "" if self._stamps is None else _digest_of_stamps(self._stamps)

    def settle(self) -> None:
        """The step of the last update, or of the one that `made` the weights, is kept elsewhere, or not wanted: remove all files.
        What is another update's stays."""
        done = {self.made} if self._stamps is None else {self.made, _digest_of_stamps(self._stamps)}
        self._stamps = None
        if done == {""}:
            return
        try:
            self._lock()
            about = self._in_place()
            if about is None or _digest_of_stamps(about["stamps"]) in done:
                (self.config.directory / _CHECKPOINT).unlink(missing_ok=True)
                self._sweep()
        except (OSError, ConfigError, CorruptionError) as error:
            _LOG.warning("files of a finished update were not removed: %s", error)
        finally:
            self._let_go()

    def report(self) -> dict[str, Any]:
        """For a receipt: inputs by kind of run, of processes before this one and of this one; what was written; how often a
        checkpoint could not be, and why it last could not."""
        before = {} if self._found is None else self._found.about["inputs"]
        return {
            "resumed": self._found is not None, "inputs_before": dict(before), "inputs_now": dict(self._counts),
            "checkpoints": self._written["checkpoints"], "bytes": self._written["bytes"], "seconds": round(self._seconds, 3),
            "failed": self._failed, "error": self._error,
        }  # fmt: skip

    def open(self, replay: TreeReplay, out: Scores, sums: dict[Tensor, Tensor | None], given: Sequence[Tensor | None]) -> Pass:
        """The next pass of the update. sums: gradients that are summed apart from `.grad`. given: what the pass depends on
        beside stamps and passes before."""
        digest = digest_of(*(b"none" if tensor is None else tensor_digest(tensor) for tensor in given))
        number, found = len(self._results), self._found
        if found is not None and number < found.about["pass"]:
            about, tensors = found.about["results"][number], found.part(f"result/{number}")
            _require_given(about["given"], digest, number)
            return Pass(self, replay, out, sums, digest, finished=Result(about, tensors))
        if found is not None and number == found.about["pass"]:
            _require_given(found.about["given"], digest, number)
            return Pass(self, replay, out, sums, digest, resumed=found)
        return Pass(self, replay, out, sums, digest)

    # -- files ----------------------------------------------------------------------------------------------------------

    def _begin(self, stamps: dict[str, str]) -> None:
        self._stamps = stamps
        try:
            self._lock()
            checkpoint = self.config.directory / _CHECKPOINT
            if checkpoint.exists():
                self._find(checkpoint, stamps)
            self._sweep()
        except OSError as error:
            self._let_go()
            self._fail(error)

    def _lock(self) -> None:
        if self._folder is None:
            self.config.directory.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.config.directory, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(folder)
                raise ConfigError(f"another process works with the journal in {self.config.directory}; wait for it") from None
            self._folder = folder

    def _let_go(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def _find(self, path: Path, stamps: dict[str, str]) -> None:
        try:
            about, tensors = wholefile.read(path)
        except CorruptionError as error:
            raise CorruptionError(f"{error}; remove {path.parent} to begin the update anew") from error
        theirs = about["stamps"]
        if _digest_of_stamps(theirs) == self.made:
            _LOG.info("the journal in %s is of an update whose step was made: it is removed", path.parent)
            path.unlink()
            return
        differ = [name for name in sorted(theirs.keys() | stamps.keys()) if theirs.get(name) != stamps.get(name)]
        if differ:
            name = differ[0]
            raise StaleStateError(
                f"{path.parent} holds an unfinished update whose {', '.join(differ)} differ ({name}: {theirs.get(name)} there, "
                f"{stamps.get(name)} now); go on with its own settings and data, or remove the folder to begin anew"
            )
        self._found = Checkpoint(about, tensors)
        self._files = about["files"]
        done = sum(about["inputs"].values())
        _LOG.warning("an update goes on from its journal in %s: %d inputs are done", path.parent, done)

    def _in_place(self) -> dict[str, Any] | None:
        """The head of the checkpoint that lies in the folder, whoever wrote it; None where there is none."""
        path = self.config.directory / _CHECKPOINT
        return wholefile.read_about(path) if path.exists() else None

    def _sweep(self) -> None:
        """Remove what the checkpoint does not name: files of the journal's own names, and files under way."""
        about = self._in_place()
        written = [] if about is None else about["written"]
        keep = {_CHECKPOINT, *(entry[kind] for entry in written for kind in ("state", "cotangent"))}
        for path in list(self.config.directory.iterdir()):
            if _OWN.fullmatch(path.name) and path.name not in keep:
                path.unlink()

    def _fail(self, error: OSError) -> None:
        _LOG.warning("a checkpoint of an update was not written, the one before stays: %s", error)
        self._failed += 1
        self._error = str(error)

    def name(self, kind: str) -> str:
        """A new file's name."""
        self._files += 1
        return f"{kind}-{self._files}.safetensors"

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def count(self, run: Run) -> None:
        """A run was done."""
        kind = "capture" if run.writes else "backward" if run.gradient else "score"
        self._counts[kind] += run.length * run.rows

    def finished(self, result: Result) -> None:
        """A pass came to its end."""
        self._results.append(result)

    def border(self, work: Pass) -> None:
        """Between two runs: write a checkpoint if it is time. Raises UpdateStoppedError where the piece is at its end."""
        now = time.monotonic()
        stops = now >= self._end
        if self._folder is None or (now < self._due and not stops):
            return
        written = self._write(work)
        took = time.monotonic() - now
        self._seconds += took
        self._due = time.monotonic() + max(self.config.seconds, _PAUSE * took)
        if not written:
            self._end = max(self._end, self._due)  # without a checkpoint it does not stop, and does not try at every border
        elif stops:
            raise UpdateStoppedError(
                f"the update stopped after {now - self._begun:.0f} s, as asked for; its journal is in {self.config.directory}: "
                "start it again with the same settings to go on"
            )

    def _write(self, work: Pass) -> bool:
        """Write a checkpoint; whether it was done. Where it fails, the one before stays."""
        folder, state = self.config.directory, work.replay.state
        for device in {layer.device for layer in state.layers if layer.device is not None and layer.device.type == "cuda"}:
            torch.cuda.synchronize(device)  # states in host memory are read by the host
        entries = [self._named(entry, state) for entry in work.written]
        before = {entry.state for entry in work.written}
        files = [(entry, entry.state, snapshot.states) for entry in entries if entry.state and entry.state not in before]
        files += [(entry, entry.cotangent, snapshot.cotangents) for entry in entries if entry.cotangent]

        def write(file: tuple[Written, str, Callable[[StateCache, int, int], dict[str, Tensor]]]) -> int:
            entry, name, part = file
            return wholefile.write(folder / name, {"name": name}, part(state, entry.start, entry.stop))

        try:
            _require_room(folder, sum(snapshot.size(state, e.start, e.stop) for e in entries))
            with ThreadPoolExecutor(wholefile.AT_ONCE) as pool:
                size = sum(pool.map(write, files))
            size += wholefile.write(folder / _CHECKPOINT, *self._describe(work, entries))
        except OSError as error:
            self._fail(error)
            written = False
        else:
            work.written[:] = entries
            self._written.update(checkpoints=1, bytes=size)
            written = True
        with suppress(OSError, CorruptionError):
            self._sweep()  # by what lies in the folder: a checkpoint may be in place though its last sync failed
        return written

    def _named(self, entry: Written, state: StateCache) -> Written:
        """With names of its files in the next checkpoint: of its state, written once, and of its cotangents, if it has any."""
        cotangent = self.name("cotangent") if snapshot.size(state, entry.start, entry.stop) else None
        return replace(entry, state=entry.state or self.name("state"), cotangent=cotangent)

    def _describe(self, work: Pass, entries: Sequence[Written]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The checkpoint's own file."""
        about, tensors = work.describe()
        about |= {
            "stamps": self._stamps, "pass": len(self._results), "results": [result.about for result in self._results],
            "written": [asdict(entry) for entry in entries], "files": self._files, "inputs": dict(self._all_inputs()),
        }  # fmt: skip
        for index, result in enumerate(self._results):
            tensors |= {f"result/{index}/{name}": tensor for name, tensor in result.tensors.items()}
        return about, tensors

    def _all_inputs(self) -> Counter[str]:
        before = {} if self._found is None else self._found.about["inputs"]
        return Counter(before) + self._counts


def stamps_of(engine: Engine, trees: Sequence[PrefixTree]) -> dict[str, str]:
    """What an update of these trees depends on: weights, tokens and settings of the engine. Loss and data are the caller's."""
    config = engine.config
    trained = [name for name, p in engine.model.named_parameters() if p.requires_grad]
    return {
        "weights": _weights(engine), "trained": digest_of(*(name.encode() for name in trained)), "tokens": _tokens(trees),
        "device": engine.device.type, "type": str(engine.dtype), "gradient": config.gradient, "chunk": str(config.chunk),
        "pack": str(config.pack), "logit_piece": str(config.logit_piece), "temperature": repr(config.temperature),
        "placement": f"{config.placement.place} {config.placement.page} {config.placement.outputs}",
        "versions": " ".join(f"{name} {version}" for name, version in versions().items()),
    }  # fmt: skip


def digest_of(*parts: bytes) -> str:
    """A digest of byte strings, borders included."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def _digest_of_stamps(stamps: Mapping[str, str]) -> str:
    return digest_of(*(f"{name} {stamps[name]}".encode() for name in sorted(stamps)))


def _weights(engine: Engine) -> str:
    """All weights: those that states depend on by the engine's own stamps, the few others (norm, head) anew."""
    layers = {id(tensor) for tensor in chain(engine.decoder.layers.parameters(), engine.decoder.layers.buffers())}
    named = chain(engine.model.named_parameters(), engine.model.named_buffers())
    others = (name.encode() + tensor_digest(tensor) for name, tensor in named if id(tensor) not in layers)
    return digest_of(engine.stamps.stamps().inputs[-1].encode(), *others)


def _tokens(trees: Sequence[PrefixTree]) -> str:
    arrays: list[np.ndarray] = []
    for tree in trees:
        arrays += [tree.entry_trajectory, tree.entry_position, tree.entry_node, tree.entry_slot]
        for node in tree.nodes:
            arrays += [np.asarray([node.start, -1 if node.parent is None else node.parent]), node.tokens, node.loss_targets]
    return digest_of(*(np.ascontiguousarray(array).tobytes() for array in arrays))


def _require_room(folder: Path, size: int) -> None:
    """Raise OSError where files of `size` bytes don't fit: before they are written, which takes long."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(errno.ENOSPC, f"a checkpoint of {size} bytes does not fit {folder}, which has {free} left")


def _require_given(before: str, now: str, number: int) -> None:
    if before != now:
        raise StaleStateError(
            f"pass {number} of the update was journaled with other coefficients of the loss; loss or advantages differ from the "
            "run's before: go on with the same, or remove the journal's folder to begin the update anew"
        )
