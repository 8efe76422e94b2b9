"""Reading page by page gives what reading everything gives, and a store opened to look at cannot be written."""

from __future__ import annotations

import numpy as np
import pytest
from store_made import TASK, begin, make_turn, tokens_of, write

from longstraw_agents.errors import ConfigError, NotStoredError, StoreError
from longstraw_agents.storage import Store, StoreConfig, browse
from longstraw_agents.types import StopReason, ToolCall

SHARED = [make_turn(seed, tool_calls=[ToolCall("look", {"at": seed}, result="x")]) for seed in range(3)]


@pytest.fixture
def forked(store: Store) -> tuple[str, str, list[str]]:
    """A run with a group of three: two part after three turns, the third is one turn."""
    run, group = begin(store, size=3)
    left = write(store, group, 0, [*SHARED, make_turn(10), make_turn(11)], reward=0.25)
    right = write(store, group, 1, [*SHARED, make_turn(20, observation=5000)], reward=1.0)
    return run, group, [left, right, write(store, group, 2, [make_turn(30)], reward=None)]


def test_pages_of_turns_are_the_turns(store: Store, forked) -> None:
    for trajectory in forked[2]:
        whole = store.turns(trajectory)
        for count in (1, 2, 10):
            rows = [row for first in range(0, len(whole), count) for row in browse.turns(store, trajectory, first, count)]
            assert [row.index for row in rows] == list(range(len(whole)))
            for row, turn in zip(rows, whole, strict=True):
                assert np.array_equal(store.read_tokens(trajectory, row.start, row.border), turn.observation)
                assert np.array_equal(store.read_tokens(trajectory, row.border, row.stop), turn.action)
                assert row.reward == turn.reward and list(row.tool_calls) == list(turn.tool_calls)
                assert [browse.turn_at(store, trajectory, at) for at in (row.start, row.stop - 1)] == [row.index] * 2
    assert browse.turns(store, forked[2][0], 99, 5) == []


def test_ranges_are_the_trajectory_s(store: Store, forked) -> None:
    name = forked[2][1]
    whole = store.load_trajectory(name)
    ranges = [(0, len(whole.tokens)), (35, 125), (120, 120), (100, 5130)]
    for (start, stop), (ids, logp) in zip(ranges, browse.read_ranges(store, name, ranges), strict=True):
        assert np.array_equal(ids, whole.tokens[start:stop])
        assert np.array_equal(logp, whole.behaviour[start:stop], equal_nan=True)


def test_passages_hold_everything_once(store: Store, forked) -> None:
    run, _, (left, right, last) = forked
    for batch in (1, 2, 100):
        found = list(browse.passages(store, run, batch=batch))
        total = sum(len(tokens_of(turns)) for turns in (SHARED, store.turns(left)[3:], store.turns(right)[3:], store.turns(last)))
        assert sum(len(passage.ids) for passage in found) == total
        one = list(browse.passages(store, run, trajectory_id=right, batch=batch))
        assert np.array_equal(
            np.concatenate([p.ids for p in sorted(one, key=lambda p: p.start)]), tokens_of(store.turns(right))
        )
    places = [(passage.branch, passage.turn) for passage in found]
    for passage, trajectory in zip(found, browse.through(store, run, places), strict=True):
        stop = passage.start + len(passage.ids)
        assert np.array_equal(store.read_tokens(trajectory, passage.start, stop), passage.ids)
        turn = browse.turns(store, trajectory, passage.turn, 1)[0]
        part = (turn.border, turn.stop) if passage.action else (turn.start, turn.border)
        assert part[0] <= passage.start < part[1] and passage.begins == (passage.start == part[0])
    rest = list(browse.passages(store, run, after=(found[2].branch, found[2].start)))
    assert [(p.branch, p.start) for p in rest] == [(p.branch, p.start) for p in found[3:]]


def test_groups_come_widest_first_and_in_pages(store: Store, forked) -> None:
    run, group, _ = forked
    narrow, empty = store.add_group(run, TASK, 2), store.add_group(run, TASK, 1, purpose="eval")
    for member, reward in enumerate((0.5, 0.75)):
        write(store, narrow, member, [make_turn(member)], reward=reward)
    ids = lambda **kind: [summary.group.group_id for summary in browse.groups(store, run, **kind)]
    assert ids() == [group, narrow, empty] == ids(count=2) + ids(offset=2)
    assert ids(order="newest") == [empty, narrow, group] and ids(purpose="eval") == [empty]
    first = browse.groups(store, run)[0]
    assert (first.lowest, first.highest, first.spread, first.trajectories) == (0.25, 1.0, 0.75, 3)
    assert browse.groups(store, run, purpose="eval")[0].spread is None
    assert browse.group(store, narrow) == next(row for row in store.groups(run) if row.group_id == narrow)
    with pytest.raises(ConfigError, match="spread"):
        browse.groups(store, run, order="size")


def test_counts_and_gathered(store: Store, forked) -> None:
    run, group, names = forked
    other = store.add_group(run, TASK, 1)
    store.append_turn(store.add_trajectory(other, 0), 0, make_turn(1))
    store.commit_step(run, step=1, first_version=0, last_version=1, group_ids=[group], files={}, receipt={})
    tokens = sum(store.trajectory(name).length for name in names)
    assert browse.counts(store)[run] == browse.RunCounts(2, 4, 1, 11, tokens + 40, 1) == browse.counts(store, run)[run]
    (gathered,) = browse.gathered(store, run)
    assert gathered.step == 1 and gathered.tokens == tokens and gathered.began <= gathered.ended
    assert [step.step for step in store.steps(run, first=1, count=1)] == [1] and store.steps(run, first=2) == []
    assert [summary.group.group_id for summary in browse.groups(store, run, step=1)] == [group]
    with pytest.raises(NotStoredError):
        browse.run(store, "r99")


def test_a_store_that_is_looked_at_is_not_written(store_url: str) -> None:
    with Store.open(store_url) as store:
        run, group = begin(store)
        open_one = store.add_trajectory(group, 1)
        with Store.open(store_url, create=False, config=StoreConfig(read_only=True)) as looking:
            for write_it in (
                lambda: looking.create_run("x", {}),
                lambda: looking.append_turn(open_one, 0, make_turn(1)),
                lambda: looking.finish_trajectory(open_one, StopReason.CANCELLED, None, {}),
                lambda: looking.delete_run(run),
            ):
                with pytest.raises(StoreError, match="read.?only"):
                    write_it()
            store.append_turn(open_one, 0, make_turn(1))  # others go on writing
            assert looking.trajectory(open_one).turns == 1
