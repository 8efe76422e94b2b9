"""The processes of a run: their layout as a mesh, the exchanges between them, and what those cost.

Idea: every process of a run holds the same weights and walks the same trees. Three numbers lay them out: `dp` processes share
out the trees, `cp` share the tokens of a run, `ep` share the experts. Tokens are spread over cp * ep processes, so that
nothing is computed twice; that group is called *context*. Exchanges are torch's functional collectives over a DeviceMesh's
groups. Each is counted (bytes that leave this process) and timed, so that a receipt can say who waited for whom.

Vocabulary
    context    processes that hold parts of the same runs (cp x ep); "dp", "ep" and "cp" as in the mesh
    replicas   processes that hold the same experts (dp x cp)
    world      all processes
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from longstraw_agents.errors import ConfigError, RankError
from longstraw_agents.trainer.watch import Watch

# Torch 2.13 renamed two of its functional collectives; the older names serve 2.11 and 2.12.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

DIMENSIONS = ("dp", "cp", "ep")

_PATIENCE = 0.02  # seconds between two looks for an announcement


@dataclass(frozen=True)
class Layout:
    """How many processes share out trees (dp), a run's tokens (cp) and experts (ep).

    timeout: seconds without progress after which a process counts as hanging, and the run ends; longer than anything that
    one process computes between two exchanges.
    """

    dp: int = 1
    cp: int = 1
    ep: int = 1
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it counts processes and must be at least 1")
        if not self.timeout > 0:
            raise ConfigError(f"timeout is {self.timeout}; it is in seconds and must be above 0")

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.dp * self.cp * self.ep


@dataclass
class Traffic:
    """Bytes this process sent to others and the time it spent in exchanges, by name; seconds include waiting."""

    bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    _spans: list[tuple[Any, Any]] = field(default_factory=list)

    def seconds(self) -> list[float]:
        """Seconds of each exchange since the last `clear`, in order. Waits for the GPU where there is one."""
        if self._spans and not isinstance(self._spans[0][0], float):
            torch.cuda.synchronize()
            return [start.elapsed_time(stop) / 1000 for start, stop in self._spans]
        return [stop - start for start, stop in self._spans]

    def clear(self) -> None:
        """Begin anew."""
        self.bytes.clear()
        self.calls.clear()
        self._spans.clear()


class Ranks:
    """This process's place in the mesh and its exchanges with others. Without a mesh: one process, nothing to exchange."""

    def __init__(self, mesh: DeviceMesh | None = None, store: Store | None = None, watch: Watch | None = None) -> None:
        """mesh: dimensions ("dp", "cp", "ep"); store: where the processes met; watch: its thread. As `join` makes them."""
        self._mesh, self._store, self.watch = mesh, store, watch
        self._heard = 0
        self._groups: dict[str, dist.ProcessGroup] = {}
        self.traffic = Traffic()
        self.entered = 0  # exchanges begun: what a watcher compares between processes
        if mesh is not None:
            for name in DIMENSIONS:
                self._groups[name] = mesh.get_group(name)
            for name, parts in (("context", ("cp", "ep")), ("replicas", ("dp", "cp")), ("world", DIMENSIONS)):
                self._groups[name] = mesh[parts]._flatten(name).get_group()

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.size("world")

    @property
    def number(self) -> int:
        """This process's number among all."""
        return self.rank("world")

    def size(self, group: str) -> int:
        """Number of processes in a group ("dp", "cp", "ep", "context", "replicas", "world")."""
        return self._groups[group].size() if self._groups else 1

    def rank(self, group: str) -> int:
        """This process's number in a group."""
        return self._groups[group].rank() if self._groups else 0

    @contextmanager
    def working(self, phase: str) -> Iterator[None]:
        """Within the block this process works on what the others may wait for: one that hangs there is found out."""
        before = ""
        if self.watch is not None:
            before, self.watch.phase = self.watch.phase, phase
        try:
            yield
        finally:
            if self.watch is not None:
                self.watch.phase = before

    def announce(self, message: dict[str, Any]) -> None:
        """Tell the processes that `listen` what comes next."""
        if self._store is not None:
            self._store.set(f"message/{self._heard}", json.dumps(message))
            self._heard += 1

    def listen(self) -> dict[str, Any]:
        """Wait, however long, for what is announced next."""
        assert self._store is not None, "one process alone has nobody to listen to"
        while not self._store.check([f"message/{self._heard}"]):
            time.sleep(_PATIENCE)
        self._heard += 1
        return json.loads(self._store.get(f"message/{self._heard - 1}"))  # type: ignore[no-any-return]

    # -- exchanges; R is the size of the group ----------------------------------------------------------------------------

    def gather(self, x: Tensor, group: str = "context", name: str = "gather") -> Tensor:
        """Every process's x [...], which have one shape: [R, ...]."""
        R = self.size(group)
        if R == 1:
            return x[None]
        run = lambda: _all_gather(x.contiguous()[None], 0, self._groups[group])
        return self._timed(name, x.nbytes * (R - 1), run)

    def exchange(self, x_R: Tensor, group: str = "context", name: str = "exchange") -> Tensor:
        """All-to-all: x_R [R, ...] holds one part for each process; returns what each process had for this one, [R, ...]."""
        R = self.size(group)
        if R == 1:
            return x_R
        run = lambda: functional.all_to_all_single(x_R.contiguous(), None, None, self._groups[group])
        return self._timed(name, x_R.nbytes // R * (R - 1), run)

    def scatter_sum(self, x_R: Tensor, group: str = "context", name: str = "scatter_sum") -> Tensor:
        """x_R [R, ...]: part r summed over processes goes to process r; returns this process's [...]."""
        R = self.size(group)
        if R == 1:
            return x_R[0]
        run = lambda: _reduce_scatter(x_R.contiguous(), "sum", 0, self._groups[group])
        return self._timed(name, x_R.nbytes // R * (R - 1), run)[0]

    def sum(self, x: Tensor, group: str = "context", name: str = "sum") -> Tensor:
        """The sum over the group, the same bits on every process of it."""
        R = self.size(group)
        if R == 1:
            return x
        run = lambda: functional.all_reduce(x.contiguous(), "sum", self._groups[group])
        return self._timed(name, 2 * x.nbytes * (R - 1) // R, run)

    def broadcast(self, x: Tensor) -> Tensor:
        """Process 0's x, on all processes; the others give a tensor of its shape."""
        if self.world == 1:
            return x
        run = lambda: functional.broadcast(x.contiguous(), 0, self._groups["world"])
        return self._timed("broadcast", x.nbytes * (self.world - 1) if self.number == 0 else 0, run)

    def gather_objects(self, value: Any, group: str = "world") -> list[Any]:
        """Every process's JSON value, in order of rank."""
        if self.size(group) == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = self.gather(torch.tensor(len(data), device=self.device), group, "objects").tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data
        rows = self.gather(padded, group, "objects").cpu().numpy()
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    @property
    def device(self) -> torch.device:
        """Where exchanged tensors lie."""
        if self._mesh is None or self._mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self._mesh.device_type, torch.cuda.current_device())

    def _timed(self, name: str, size: int, run: Callable[[], Tensor]) -> Tensor:
        self.entered += 1
        self.traffic.bytes[name] += size
        self.traffic.calls[name] += 1
        on_gpu = self.device.type == "cuda"
        if self.watch is not None:
            self.watch.entered, self.watch.waiting = self.entered, True
        start = _mark(on_gpu)
        try:
            result = functional.wait_tensor(run())
        except RuntimeError as error:  # a closed connection, or the group's timeout
            who = "another process is gone" if self.watch is None else self.watch.blame()
            raise RankError(
                f"process {self.number} of {self.world}: exchange {name!r} (number {self.entered}) failed: {who} "
                f"({str(error).splitlines()[0]}); run the command again to go on from the last checkpoint"
            ) from error
        finally:
            if self.watch is not None:
                self.watch.waiting = False
        self.traffic._spans.append((start, _mark(on_gpu)))
        return result

    def costs(self) -> list[dict[str, Any]]:
        """What every process sent and how long it waited since the last call: one entry per process, the same on all.

        idle_seconds: in each exchange, the time beyond that of the process which came last to it. Only exchanges that all
        processes take part in the same number of times can be compared so; with dp > 1 it is the time in exchanges instead.
        """
        spent = self.traffic.seconds()
        mine = {"rank": self.number, "exchange_seconds": round(sum(spent), 4), "sent_bytes": dict(self.traffic.bytes)}
        everyone: list[dict[str, Any]] = self.gather_objects(mine)
        times = self.gather_objects([round(s, 6) for s in spent])
        self.traffic.clear()
        aligned = len({len(row) for row in times}) == 1
        least = [min(column) for column in zip(*times, strict=True)] if aligned else []
        for entry, row in zip(everyone, times, strict=True):
            entry["idle_seconds"] = round(sum(row) - sum(least), 4)
        return everyone


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def join(layout: Layout, device: str = "cpu") -> Ranks:
    """Join the processes that torchrun or `longstraw train --nproc` started (RANK, WORLD_SIZE and so on in the environment).

    device: "cpu" (gloo) or "cuda" (NCCL, one GPU per process by LOCAL_RANK). Raises ConfigError where the number of
    processes is not dp * cp * ep.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != layout.size:
        raise ConfigError(
            f"{world} processes were started for dp={layout.dp}, cp={layout.cp}, ep={layout.ep}, which is {layout.size}; "
            f"start {layout.size} of them (longstraw train --nproc, or torchrun --nproc-per-node)"
        )
    if world == 1:
        return Ranks()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    patience = timedelta(seconds=layout.timeout + 60)  # the watch comes first: it knows who is to blame
    store, rank, world = next(rendezvous("env://", timeout=patience))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world, timeout=patience)
    watch = Watch(PrefixStore("watch", store.clone()), rank, world, layout.timeout)
    watch.start()
    mesh = init_device_mesh(device, (layout.dp, layout.cp, layout.ep), mesh_dim_names=DIMENSIONS)
    ranks = Ranks(mesh, PrefixStore("messages", store.clone()), watch)
    for group in ranks._groups.values():  # a mesh makes its groups with torch's own timeout
        dist.distributed_c10d._set_pg_timeout(patience, group)
    return ranks


@contextmanager
def among(layout: Layout, device: str) -> Iterator[Ranks]:
    """The processes of this run for the length of the block; a layout of one process stands for all by tokens (cp).

    device: as for torch, "cuda" or "cpu". An error leaves at once: the others find out. Raises ConfigError where several
    processes were given one GPU.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and torch.device(device).index is not None:
        raise ConfigError(f"device is {device!r} for {world} processes; say 'cuda', and each takes the GPU of its own number")
    ranks = join(replace(layout, cp=world) if layout.size == 1 else layout, torch.device(device).type)
    try:
        yield ranks
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException:  # SystemExit: a follower is done
        leave(ranks)
        raise
    leave(ranks)


def leave(ranks: Ranks) -> None:
    """Leave the run in good order: wait for the others, then take the connections down."""
    if ranks.world == 1:
        return
    try:
        dist.barrier(device_ids=[torch.cuda.current_device()] if ranks.device.type == "cuda" else None)
    except RuntimeError:
        return  # process 0 ended with an error of its own, which it has reported
    if ranks.watch is not None:
        ranks.watch.leave()
    dist.destroy_process_group()
