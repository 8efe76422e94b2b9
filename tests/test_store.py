"""The store's interface, on SQLite and on PostgreSQL: what goes in comes out, once, and nothing else does."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_made import TASK, assert_same_turn, begin, make_turn, tokens_of, write

from longstraw_agents.errors import (
    ConfigError,
    NonFiniteError,
    NotStoredError,
    SchemaError,
    StoreError,
    StoreFullError,
    TokenError,
)
from longstraw_agents.storage import Store, StoreConfig, admin
from longstraw_agents.types import StopReason, Task, ToolCall, Turn


def test_a_trajectory_comes_back_as_it_was(store: Store) -> None:
    _, group = begin(store)
    calls = [ToolCall("search", {"q": "x", "n": 3}, result="found", seconds=0.25), ToolCall("open", {}, error="no file")]
    notes = {"temperature": 0.7, "history": "kept", "top_p": 0.1}
    turns = [
        make_turn(0, 5000, 4500),
        make_turn(1, 0, 7, notes=notes),
        make_turn(2, 12, 0, tool_calls=calls, reward_parts={"format": 0.5}, observation_source=b"\xff\0raw"),
    ]
    trajectory = store.add_trajectory(group, 2, weight=0.5)
    for index, turn in enumerate(turns):
        store.append_turn(trajectory, index, turn)
    store.finish_trajectory(trajectory, StopReason.TURN_LIMIT, 0.75, {"answer": 0.75}, success=False, trailing_observation=[5, 6])
    loaded = store.load_trajectory(trajectory)
    assert np.array_equal(loaded.tokens, [*tokens_of(turns), 5, 6])
    assert loaded.turn_ends == (9500, 9507, 9519, 9521)
    assert loaded.turn_rewards == (0.0, 1 / 7, 2 / 7, 0.0) and loaded.turn_notes == ({}, notes, {}, {})
    assert (loaded.reward, loaded.stop_reason, loaded.weight) == (0.75, StopReason.TURN_LIMIT, 0.5)
    assert np.array_equal(np.flatnonzero(loaded.action_mask), [*range(5000, 9500), *range(9500, 9507)])
    assert np.array_equal(loaded.behaviour[5000:9507], np.concatenate([turns[0].behaviour, turns[1].behaviour]))
    assert np.isnan(loaded.behaviour[~loaded.action_mask]).all()
    assert set(loaded.policy_version[5000:9500]) == {0} and set(loaded.policy_version[~loaded.action_mask]) == {-1}
    for stored, given_ in zip(store.turns(trajectory), turns, strict=False):
        assert_same_turn(stored, given_)
    row = store.trajectory(trajectory)
    assert (row.member, row.turns, row.length, row.success, dict(row.reward_parts)) == (2, 4, 9521, False, {"answer": 0.75})


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_histories_that_share_turns_stay_apart(store: Store, data: st.DataObject) -> None:
    """Any mixture of equal and different turns, forks included, against plain lists."""
    _, group = begin(store, size=6)
    library = [make_turn(seed, observation=1 + 700 * (seed % 3), action=seed) for seed in range(4)]
    expected: dict[str, list[Turn]] = {}
    for member in range(data.draw(st.integers(1, 5))):
        fork = data.draw(st.sampled_from([None, *expected]))
        turns = 0 if fork is None else data.draw(st.integers(0, len(expected[fork])))
        trajectory = store.add_trajectory(group, member, parent=fork, parent_turns=turns)
        expected[trajectory] = [] if fork is None else expected[fork][:turns]
    for _ in range(data.draw(st.integers(0, 25))):
        trajectory = data.draw(st.sampled_from(sorted(expected)))
        turn = library[data.draw(st.integers(0, 3))]
        store.append_turn(trajectory, len(expected[trajectory]), turn)
        expected[trajectory].append(turn)
    for trajectory, turns in expected.items():
        store.finish_trajectory(trajectory, StopReason.ANSWERED, None, {})
        tokens = tokens_of(turns)
        assert np.array_equal(store.load_trajectory(trajectory).tokens, tokens)
        start = data.draw(st.integers(0, len(tokens)))
        stop = data.draw(st.integers(start, len(tokens)))
        assert np.array_equal(store.read_tokens(trajectory, start, stop), tokens[start:stop])
        assert len(store.turns(trajectory)) == len(turns)
        for stored, given_ in zip(store.turns(trajectory), turns, strict=True):
            assert_same_turn(stored, given_)


def test_shared_turns_are_stored_once(store: Store) -> None:
    _, group = begin(store)
    shared = [make_turn(seed) for seed in range(20)]
    write(store, group, 0, [*shared, make_turn(100)])
    before = store.stats()
    write(store, group, 1, [*shared, make_turn(101)])
    forked = store.add_trajectory(group, 2, parent=store.trajectories(group)[0].trajectory_id, parent_turns=20)
    store.append_turn(forked, 20, make_turn(101))
    after = store.stats()
    assert after.turns - before.turns == 1, "the second trajectory adds its one turn, the fork rides on it"
    assert after.tokens - before.tokens == 2 * 21 * 40


def test_sending_a_write_again_changes_nothing(store: Store) -> None:
    _, group = begin(store)
    trajectory = store.add_trajectory(group, 0)
    for _ in range(2):
        assert store.add_trajectory(group, 0) == trajectory
        store.append_turn(trajectory, 0, make_turn(0))
    store.append_turn(trajectory, 1, make_turn(1))
    store.append_turn(trajectory, 0, make_turn(0))
    for _ in range(2):
        store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {"a": 1.0})
    store.append_turn(trajectory, 1, make_turn(1))
    assert (store.trajectory(trajectory).turns, store.stats().turns) == (2, 2)


def test_history_cannot_be_changed(store: Store) -> None:
    _, group = begin(store)
    trajectory = store.add_trajectory(group, 0)
    store.append_turn(trajectory, 0, make_turn(0))
    with pytest.raises(StoreError, match="another turn 0"):
        store.append_turn(trajectory, 0, make_turn(1))
    with pytest.raises(StoreError, match="turn 1 must come next"):
        store.append_turn(trajectory, 2, make_turn(2))
    store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})
    with pytest.raises(StoreError, match="finished"):
        store.append_turn(trajectory, 1, make_turn(1))
    with pytest.raises(StoreError, match="finished already"):
        store.finish_trajectory(trajectory, StopReason.ANSWERED, 2.0, {})
    assert store.trajectory(trajectory).turns == 1


def test_bad_content_is_refused_and_leaves_nothing(store: Store) -> None:
    _, group = begin(store)
    trajectory = store.add_trajectory(group, 0)
    before = store.stats()
    with pytest.raises(NonFiniteError):
        store.append_turn(trajectory, 0, make_turn(0, reward=float("nan")))
    with pytest.raises(NonFiniteError):
        store.append_turn(trajectory, 0, Turn(np.array([1]), np.array([2]), np.array([np.nan], np.float32), 0))
    with pytest.raises(TokenError):
        store.append_turn(trajectory, 0, Turn(np.array([-1]), np.zeros(0, np.int32), np.zeros(0, np.float32), 0))
    with pytest.raises(TokenError):
        store.append_turn(trajectory, 0, Turn(np.array([1.5]), np.zeros(0, np.int32), np.zeros(0, np.float32), 0))
    with pytest.raises(StoreError, match="token 0"):
        store.append_turn(trajectory, 0, make_turn(0, observation=0))
    with pytest.raises(NonFiniteError):
        store.finish_trajectory(trajectory, StopReason.ANSWERED, float("inf"), {})
    with pytest.raises(ConfigError):
        store.add_trajectory(group, 4)
    assert store.stats() == before


def test_any_finite_number_is_a_reward(store: Store) -> None:
    _, group = begin(store)
    for member, value in enumerate([-0.0, 5e-324, -1.7e308, 0.1 + 0.2]):
        turn = make_turn(member, reward=value, reward_parts={"part": value})
        trajectory = store.add_trajectory(group, member, weight=abs(value))
        store.append_turn(trajectory, 0, turn)
        store.finish_trajectory(trajectory, StopReason.ANSWERED, value, {"part": value})
        assert_same_turn(store.turns(trajectory)[0], turn)
        assert store.load_trajectory(trajectory).reward == value
    with pytest.raises(NonFiniteError, match="weight"):
        store.add_trajectory(store.add_group("r1", TASK, 1), 0, weight=float("nan"))


def test_what_is_not_there_is_named(store: Store) -> None:
    run, group = begin(store)
    for call in (
        lambda: store.load_trajectory("t99"),
        lambda: store.load_group("nonsense"),
        lambda: store.groups("r99"),
        lambda: store.delete_run("r99"),
        lambda: store.read_tokens(group, 0, 1),
    ):
        with pytest.raises(NotStoredError):
            call()
    trajectory = store.add_trajectory(group, 0)
    with pytest.raises(StoreError, match="0 tokens"):
        store.read_tokens(trajectory, 0, 1)
    with pytest.raises(StoreError, match="still open"):
        store.load_group(group)


def test_groups_are_found_by_what_they_lack(store: Store) -> None:
    run, group = begin(store, size=2)
    other = store.add_group(run, Task("e", 1), 1, purpose="eval", policy_version=3)
    write(store, group, 0, [make_turn(0)])
    write(store, other, 0, [make_turn(0)])
    half = store.add_trajectory(group, 1)
    store.append_turn(half, 0, make_turn(5))
    assert [row.trajectory_id for row in store.open_trajectories(run)] == [half]
    assert [g.group_id for g in store.groups(run, complete=False)] == [group]
    assert [g.group_id for g in store.groups(run, purpose="eval", complete=True)] == [other]
    store.finish_trajectory(half, StopReason.ENVIRONMENT_ERROR, None, {})
    assert [g.group_id for g in store.groups(run, complete=True, unused=True)] == [group, other]
    found = store.groups(run)[0]
    assert (found.task, found.size, found.policy_version, found.complete, found.step) == (TASK, 2, 0, True, None)
    assert [t.reward for t in store.load_group(group).trajectories] == [1.0, None]


def test_parts_of_an_episode(store: Store) -> None:
    _, group = begin(store, size=1)
    first = store.add_trajectory(group, 0)
    store.append_turn(first, 0, make_turn(0))
    second = store.add_trajectory(group, 0, parent=first, weight=0.5)
    assert second == store.add_trajectory(group, 0, parent=first) != first
    for trajectory in (first, second):
        store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})
    assert [(row.member, row.part, row.parent) for row in store.trajectories(group)] == [(0, 0, None), (0, 1, first)]
    assert store.groups("r1")[0].complete


def test_a_step_is_committed_once(store: Store) -> None:
    run, group = begin(store, size=1)
    write(store, group, 0, [make_turn(0)])
    assert store.latest_step(run) is None
    step = {"step": 0, "first_version": 0, "last_version": 2, "group_ids": [group]}
    step |= {"files": {"adapter": "ab"}, "receipt": {"x": 1.5}}
    for _ in range(2):
        store.commit_step(run, **step)
    assert len(store.steps(run)) == 1
    with pytest.raises(StoreError, match="other content"):
        store.commit_step(run, **{**step, "receipt": {"x": 2}})
    with pytest.raises(StoreError, match="trained on once"):
        store.commit_step(run, **{**step, "step": 1})
    with pytest.raises(StoreError, match="must come next"):
        store.commit_step(run, **{**step, "step": 5, "group_ids": []})
    store.commit_step(run, **{**step, "step": 1, "first_version": 2, "last_version": 3, "group_ids": []})
    latest = store.latest_step(run)
    assert latest is not None
    assert (latest.step, latest.last_version, latest.group_ids) == (1, 3, ())
    assert (latest.files, latest.receipt) == ({"adapter": "ab"}, {"x": 1.5})
    assert store.groups(run, unused=True) == []
    evaluation = store.add_evaluation(run, "heldout", 3, {"success": 0.5})
    assert [(e.evaluation_id, e.policy_version, e.metrics) for e in store.evaluations(run)] == [(evaluation, 3, {"success": 0.5})]


@given(name=st.text(st.characters(codec=None)), value=st.text(st.characters(codec=None)))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_text_survives(store: Store, name: str, value: str) -> None:
    """NUL, lone surrogates, backslashes: in names, options, tool calls."""
    run = store.create_run(name, {value: name})
    task = Task(value, 1, name, {"text": value})
    group = store.add_group(run, task, 1)
    call = ToolCall(name, {value: [value]}, result=value, error=name)
    source = value.encode("utf-8", "surrogatepass")
    trajectory = write(store, group, 0, [make_turn(0, tool_calls=[call], observation_source=source)])
    assert [(r.name, r.config) for r in store.runs() if r.run_id == run] == [(name, {value: name})]
    assert store.load_group(group).task == task
    turn = store.turns(trajectory)[0]
    assert (turn.tool_calls[0], turn.observation_source) == (call, source)


def test_the_store_outlives_its_process(store_url: str) -> None:
    with Store.open(store_url) as store:
        run, group = begin(store)
        trajectory = write(store, group, 0, [make_turn(0)])
        loaded = store.load_trajectory(trajectory)
    with Store.open(store_url, create=False) as store:
        assert [r.run_id for r in store.runs()] == [run]
        assert np.array_equal(store.load_trajectory(trajectory).tokens, loaded.tokens)


def test_a_deleted_run_is_gone_and_its_ids_are_not_given_again(store: Store) -> None:
    run, group = begin(store)
    trajectory = write(store, group, 0, [make_turn(0)])
    other, other_group = begin(store)
    kept = write(store, other_group, 0, [make_turn(0)])
    store.delete_run(run)
    assert [r.run_id for r in store.runs()] == [other]
    with pytest.raises(NotStoredError):
        store.load_trajectory(trajectory)
    assert np.array_equal(store.load_trajectory(kept).tokens, tokens_of([make_turn(0)]))
    assert begin(store)[0] not in (run, other)


def test_tokens_are_streamed(store: Store) -> None:
    _, group = begin(store)
    turns = [make_turn(seed, 3000, 500) for seed in range(3)]
    trajectory = write(store, group, 0, turns)
    parts = list(store.iterate_tokens(trajectory, size=4000))
    assert [len(part) for part in parts] == [4000, 4000, 2500]
    assert np.array_equal(np.concatenate(parts), tokens_of(turns))
    other = write(store, group, 1, turns[1:])
    ranges = [(trajectory, 3400, 3600), (other, 0, 1), (trajectory, 10_500, 10_500), (other, 6000, 7000)]
    for ids, (name, start, stop) in zip(store.read_batch(ranges), ranges, strict=True):
        assert np.array_equal(ids, tokens_of(turns if name == trajectory else turns[1:])[start:stop])


def test_a_newer_or_foreign_schema_is_refused(tmp_path) -> None:
    path = tmp_path / "store.sqlite"
    with Store.open(str(path)):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(SchemaError, match="9999.*newer"):
        Store.open(str(path))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0000'")
    connection.close()
    with pytest.raises(SchemaError, match="0000.*longstraw db upgrade"):
        Store.open(str(path))
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE things (x)")
    connection.close()
    with pytest.raises(SchemaError, match="things"):
        Store.open(str(other))
    with pytest.raises(StoreError, match="no store at"):
        Store.open(str(tmp_path / "none.sqlite"), create=False)
    with pytest.raises(StoreError):
        Store.open("nosuchdatabase://x/y")


def test_a_quota_is_a_clear_error(store_url: str) -> None:
    with Store.open(store_url) as store:
        _, group = begin(store)
        trajectory = store.add_trajectory(group, 0)
        size = store.stats().size_bytes
    small = StoreConfig(quota_bytes=size + 2_000_000)
    with Store.open(store_url, config=small) as store, pytest.raises(StoreFullError, match="quota"):
        for index in range(200):
            store.append_turn(trajectory, index, make_turn(index, 20000, 0))
    with Store.open(store_url) as store:
        assert store.trajectory(trajectory).turns == index
        assert len(store.turns(trajectory)) == index


def test_the_reserve_is_for_deleting(store_url: str) -> None:
    with Store.open(store_url) as store:
        run, group = begin(store)
        write(store, group, 0, [make_turn(index, 3000, 10) for index in range(300)])
        kept = store.create_run("kept", {})
    with Store.open(store_url) as store:
        size = store.stats().size_bytes
    with Store.open(store_url, config=StoreConfig(quota_bytes=size, reserve_bytes=2**62)) as store:
        with pytest.raises(StoreFullError, match="quota"):
            store.create_run("more", {})
        store.delete_run(run)
        assert admin.gc(store, compact=True).blobs > 300
        assert [row.run_id for row in store.runs()] == [kept]
    with Store.open(store_url) as store:
        assert store.stats().size_bytes < size - 500_000
    if "://" not in store_url:
        with Store.open(store_url, config=StoreConfig(reserve_bytes=2**62)) as store:
            with pytest.raises(StoreFullError, match="reserve"):
                store.create_run("more", {})


def test_the_models_are_what_the_migrations_make(store_url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from longstraw_agents.storage.schema import Base

    with Store.open(store_url) as store, store.database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False})
        assert compare_metadata(context, Base.metadata) == []
