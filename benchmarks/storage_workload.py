"""A collection whose every word is known beforehand: what was acknowledged must be in the store, once and whole.

Vocabulary
    acknowledgement   a line that the worker writes after a call of the store returned
    lost              acknowledged, but not in the store
    half              in the store, but not as it was written
    double            in the store twice, or too much of it
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from longstraw_agents.errors import LongStrawError
from longstraw_agents.storage import GroupRow, Store, admin
from longstraw_agents.types import StopReason, Task, ToolCall, Turn

MEMBERS, TURNS, SHARED = 3, 5, 2


def turn_of(group: int, member: int, index: int) -> Turn:
    """Turn `index` of a member; the first SHARED turns are the same for all members of a group."""
    random = np.random.default_rng([group, 0 if index < SHARED else member + 1, index])
    size = int(random.integers(20, 400))
    ids, logp = random.integers(0, 49152, size).astype(np.int32), -random.random(size // 4).astype(np.float32)
    call = ToolCall("look", {"index": index}, result=f"{group}/{index}\0")
    return Turn(ids[size // 4 :], ids[: size // 4], logp, group, reward=index / 3, tool_calls=[call])


def same(left: Turn, right: Turn) -> bool:
    """Whether two turns are equal in all that this workload writes."""
    arrays = all(np.array_equal(getattr(left, n), getattr(right, n)) for n in ("observation", "action", "behaviour"))
    return arrays and left.reward == right.reward and list(left.tool_calls) == list(right.tool_calls)


def run_of(store: Store, name: str) -> str | None:
    """The run of this name."""
    return next((run.run_id for run in store.runs() if run.name == name), None)


def groups_of(store: Store, name: str) -> list[GroupRow]:
    """The groups of the run of this name; none if there is no run yet."""
    run = run_of(store, name)
    return store.groups(run) if run else []


def work(store: Store, name: str, groups: int, acknowledge: Callable[[str], None]) -> None:
    """Collects up to `groups` groups into the run `name`, from wherever an earlier worker was stopped."""
    run = run_of(store, name) or store.create_run(name, {"groups": groups})
    acknowledge("run")
    while True:
        rows = store.groups(run)
        if rows and not rows[-1].complete:
            number, group = len(rows) - 1, rows[-1].group_id
        elif rows and rows[-1].step is None:
            number = len(rows) - 1
            used = [rows[-1].group_id]
            receipt = {"group": number}
            store.commit_step(
                run, step=number, first_version=number, last_version=number + 1, group_ids=used, files={}, receipt=receipt
            )
            acknowledge(f"step {number}")
            continue
        elif len(rows) == groups:
            return
        else:
            number, group = len(rows), store.add_group(run, Task("fault", len(rows)), MEMBERS)
            acknowledge(f"group {number}")
        for member in range(MEMBERS):
            _collect(store, group, number, member, acknowledge)


def _collect(store: Store, group: str, number: int, member: int, acknowledge: Callable[[str], None]) -> None:
    trajectory = store.add_trajectory(group, member)
    row = store.trajectory(trajectory)
    if row.stop_reason is not None:
        return
    for index in range(row.turns, TURNS):
        store.append_turn(trajectory, index, turn_of(number, member, index))
        acknowledge(f"turn {number} {member} {index}")
    store.finish_trajectory(trajectory, StopReason.ANSWERED, member / 2, {})
    acknowledge(f"finish {number} {member}")


def to_file(path: Path) -> Callable[[str], None]:
    """Acknowledges into a file, one system call a line."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    return lambda line: (os.write(descriptor, f"{line}\n".encode()), None)[1]


def damage(store: Store) -> list[str]:
    """What a check of the whole store finds."""
    return [f"half: {problem.where}: {problem.what}" for problem in admin.check(store)]


def faults(store: Store, name: str, acknowledged: list[str]) -> list[str]:
    """Everything that is lost, half or double in the run `name`; empty if all is as it should be."""
    found: list[str] = []
    runs = [run.run_id for run in store.runs() if run.name == name]
    if len(runs) > 1:
        found.append("double: run")
    if not runs:
        return found + (["lost: run"] if acknowledged else [])
    groups = store.groups(runs[0])
    if [group.task.seed for group in groups] != list(range(len(groups))):
        found.append("double: group")
    there = {"run", *(f"group {number}" for number in range(len(groups)))}
    for number, group in enumerate(groups):
        there |= contents(store, group.group_id, number, found)
    steps = store.steps(runs[0])
    there |= {f"step {step.step}" for step in steps}
    if [step.group_ids for step in steps] != [(group.group_id,) for group in groups[: len(steps)]]:
        found.append("half: step")
    return found + [f"lost: {line}" for line in acknowledged if line not in there]


def contents(store: Store, group: str, number: int, found: list[str]) -> set[str]:
    """What one group holds, as acknowledgements; faults go to `found`."""
    there = set()
    rows = store.trajectories(group)
    if len({row.member for row in rows}) != len(rows):
        found.append(f"double: trajectory in group {number}")
    for row in rows:
        try:
            turns = store.turns(row.trajectory_id)
        except LongStrawError as error:
            found.append(f"half: {error}")
            continue
        if len(turns) > TURNS:
            found.append(f"double: turn in group {number}, member {row.member}")
        for index, turn in enumerate(turns):
            if not same(turn, turn_of(number, row.member, index)):
                found.append(f"half: turn {number} {row.member} {index}")
            there.add(f"turn {number} {row.member} {index}")
        if row.stop_reason is not None:
            if len(turns) != TURNS or row.reward != row.member / 2:
                found.append(f"half: finish {number} {row.member}")
            there.add(f"finish {number} {row.member}")
    return there
