"""Check, collect, copy and migrate a store, by the functions and by `longstraw db`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from sqlalchemy import text
from store_made import TASK, assert_same_turn, begin, make_turn, tokens_of, write, write_old_store

from longstraw_agents.cli import main
from longstraw_agents.errors import CorruptionError, SchemaError, StoreError
from longstraw_agents.storage import Store, StoreConfig, admin
from longstraw_agents.storage.database import Database
from longstraw_agents.storage.schema import REVISION
from longstraw_agents.types import StopReason, ToolCall


def fill(store: Store) -> str:
    """A run with shared history, tool calls, a step, an evaluation and an open trajectory; its group."""
    run, group = begin(store, size=3)
    calls = [ToolCall("search", {"q": 1}, "found")]
    turns = [make_turn(0, 3000, 1500), make_turn(1, tool_calls=calls, observation_source=b"\xff"), make_turn(2)]
    write(store, group, 0, turns)
    write(store, group, 1, [*turns[:2], make_turn(3, 9000, 1)])
    write(store, group, 2, [make_turn(4)], reward=None)
    store.commit_step(run, step=0, first_version=0, last_version=1, group_ids=[group], files={}, receipt={"loss": 0.5})
    store.add_evaluation(run, "heldout", 1, {"success": 1.0})
    store.add_trajectory(store.add_group(run, TASK, 1), 0)
    return group


def damage(store: Store, statement: str) -> None:
    with store.database.engine.begin() as connection:
        assert connection.execute(text(statement)).rowcount >= 1


def test_a_sound_store_has_no_problems(store: Store) -> None:
    fill(store)
    assert admin.check(store) == []


DAMAGE = {
    "reward": ("UPDATE trajectories SET reward = 0.5 WHERE id = 1", "trajectories"),
    "turn reward": ("UPDATE turns SET reward = 9.0 WHERE turn = 1 AND branch_id = 1", "t1, turn 1"),
    "blob missing": (
        "DELETE FROM blobs WHERE digest = (SELECT tokens FROM spans WHERE branch_id = 1 AND start = 3000)",
        "t1, turn 0",
    ),
    "blob swapped": (
        "UPDATE blobs SET data = (SELECT b.data FROM blobs b JOIN spans s ON s.tokens = b.digest WHERE s.branch_id = 1 AND "
        "s.start = 4540) WHERE digest = (SELECT tokens FROM spans WHERE branch_id = 1 AND start = 4500)",
        "t1, turn 1",
    ),
    "span missing": ("DELETE FROM spans WHERE branch_id = 1 AND start = 3000", "t1, turn 0"),
    "turn missing": ("DELETE FROM turns WHERE branch_id = 1 AND turn = 2", "t1, turn 2"),
    "chain": ("UPDATE turns SET chain = digest WHERE branch_id = 1 AND turn = 2", "t1, turn 2"),
    "marks": ("UPDATE spans SET marks = tokens WHERE branch_id = 1 AND start = 3000", "t1, turn 0"),
    "behaviour": ("UPDATE spans SET behaviour = NULL WHERE branch_id = 1 AND start = 3000", "t1, turn 0"),
    "call": ("DELETE FROM tool_calls", "t1, turn 1"),
    "source": ("DELETE FROM blobs WHERE digest = (SELECT source FROM turns WHERE source IS NOT NULL)", "t1, turn 1"),
    "receipt": ("UPDATE steps SET receipt = '{}'", "steps"),
    "step group": ("DELETE FROM step_groups", "run r1"),
    "group size": ("UPDATE groups SET size = 4 WHERE id = 1", "groups"),
    "trajectory missing": ("DELETE FROM trajectories WHERE id = 3", "group g1"),
    "task": ("UPDATE tasks SET seed = 8", "task 1"),
    "evaluation": ("UPDATE evaluations SET policy_version = 2", "evaluations"),
    "evaluation missing": ("DELETE FROM evaluations", "run r1"),
    "policy": ("UPDATE policies SET step = 5 WHERE version = 1", "run r1"),
    "policy missing": ("DELETE FROM policies WHERE version = 0", "run r1"),
    "group used": ("UPDATE step_groups SET position = 1", "step_groups"),
    "runs": ("UPDATE store SET runs = 2", "store"),
    "run missing": ("DELETE FROM runs", "store"),
    "call name": ("UPDATE tool_calls SET name = 'look'", "t1, turn 1"),
    "span moved": ("UPDATE spans SET branch_id = 3 WHERE branch_id = 1 AND start = 4540", "t1, turn 2"),
    "config": ("UPDATE runs SET config = '{'", "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_named(store: Store, kind: str) -> None:
    fill(store)
    statement, place = DAMAGE[kind]
    damage(store, statement)
    problems = [f"{problem.where}: {problem.what}" for problem in admin.check(store)]
    assert any(place in problem for problem in problems), problems


VANISHED = {
    "run": ("DELETE FROM runs WHERE id = 2", Store.runs),
    "store": ("DELETE FROM store", Store.runs),
    "group": ("DELETE FROM groups WHERE id = 2", lambda store: store.groups("r1")),
    "open group": ("DELETE FROM groups WHERE id = 2", lambda store: store.open_trajectories("r1")),
    "group of another run": ("UPDATE groups SET run_id = 2 WHERE id = 2", lambda store: store.groups("r2")),
    "trajectory": ("DELETE FROM trajectories WHERE id = 4", lambda store: store.open_trajectories("r1")),
    "finished": ("UPDATE trajectories SET stop_reason = 'answered' WHERE id = 4", lambda store: store.open_trajectories("r1")),
    "step": ("DELETE FROM steps", lambda store: store.latest_step("r1")),
    "steps": ("DELETE FROM steps", lambda store: store.steps("r1")),
    "used": ("DELETE FROM step_groups", lambda store: store.groups("r1")),
    "evaluation": ("DELETE FROM evaluations", lambda store: store.evaluations("r1")),
    "turn": ("DELETE FROM turns WHERE branch_id = 1 AND turn = 1", lambda store: store.outlines(["t1"])),
    "reward": ("UPDATE turns SET reward = 9.0 WHERE branch_id = 1 AND turn = 1", lambda store: store.outlines(["t1"])),
    "tokens": (
        "UPDATE spans SET tokens = (SELECT tokens FROM spans WHERE branch_id = 1 AND start = 4570) "
        "WHERE branch_id = 1 AND start = 4530",
        lambda store: store.read_tokens("t1", 4530, 4535),
    ),
}


@pytest.mark.parametrize("kind", VANISHED)
def test_what_vanished_is_missed_when_it_is_read(store: Store, kind: str) -> None:
    fill(store)
    store.create_run("another", {})
    statement, read = VANISHED[kind]
    read(store)
    damage(store, statement)
    with pytest.raises(CorruptionError):
        read(store)


def test_what_is_not_damaged_stays_usable(store: Store) -> None:
    group = fill(store)
    damage(store, "DELETE FROM blobs WHERE digest = (SELECT tokens FROM spans WHERE branch_id = 2 AND start = 4540)")
    with pytest.raises(CorruptionError, match="trajectory t2, turn 2"):
        store.load_trajectory("t2")
    with pytest.raises(CorruptionError, match="t2"):
        store.load_group(group)
    assert len(store.load_trajectory("t1").tokens) == 4580
    assert np.array_equal(store.read_tokens("t2", 0, 4540), store.read_tokens("t1", 0, 4540))


def test_a_swapped_blob_is_never_served(store: Store) -> None:
    fill(store)
    damage(store, DAMAGE["blob swapped"][0])
    for read in (lambda: store.load_trajectory("t1"), lambda: store.turns("t1"), lambda: store.read_tokens("t1", 4510, 4511)):
        with pytest.raises(CorruptionError, match="trajectory t1, turn 1"):
            read()
    assert len(store.read_tokens("t1", 0, 4500)) == 4500


def test_gc_takes_only_what_nothing_needs(store: Store) -> None:
    run, group = begin(store)
    write(store, group, 0, [make_turn(0), make_turn(1, tool_calls=[ToolCall("a", {})], observation_source=b"x")])
    other, other_group = begin(store)
    kept = write(store, other_group, 0, [make_turn(0)])
    assert admin.gc(store).blobs == 0
    store.delete_run(run)
    assert admin.gc(store, compact=True).blobs == 5, "ids twice, log-probabilities, source and call of the second turn"
    assert np.array_equal(store.load_trajectory(kept).tokens, tokens_of([make_turn(0)]))
    assert admin.check(store) == []


def test_a_copy_is_the_same_store(store_url: str, tmp_path) -> None:
    """To the other database and back."""
    first, back = str(tmp_path / "first.sqlite"), str(tmp_path / "back.sqlite")
    with Store.open(first) as store:
        group = fill(store)
    counts = admin.copy(first, store_url)
    assert counts == admin.copy(store_url, back) and counts["trajectories"] == 4
    for place in (store_url, back):
        with Store.open(first) as a, Store.open(place) as b:
            assert admin.check(b) == []
            assert (a.runs(), a.groups("r1"), a.steps("r1"), a.evaluations("r1")) == (
                b.runs(),
                b.groups("r1"),
                b.steps("r1"),
                b.evaluations("r1"),
            )
            for one, other in zip(a.load_group(group).trajectories, b.load_group(group).trajectories, strict=True):
                assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.behaviour, other.behaviour, equal_nan=True)
            assert begin(b)[0] == "r2", "new ids come after the copied ones"
    with pytest.raises(StoreError, match="not empty"):
        admin.copy(first, back)


def test_the_commands(tmp_path) -> None:
    path, target, report = (str(tmp_path / name) for name in ("store.sqlite", "copy.sqlite", "report.json"))
    with Store.open(path) as store:
        fill(store)

    def run(*arguments: str, status: int = 0) -> dict:
        result = CliRunner().invoke(main, ["db", *arguments, "--json", report])
        assert result.exit_code == status, result.output
        return json.loads(open(report).read())

    assert run("upgrade", path)["after"] == REVISION
    assert run("check", path) == {"problems": []}
    assert run("stats", path)["trajectories"] == 4
    assert run("copy", path, target)["turns"] == 5
    assert run("gc", target, "--compact", "--delete-run", "r1")["blobs"] > 5
    with Store.open(path) as store:
        damage(store, "DELETE FROM spans WHERE start = 3000")
    assert run("check", path, status=1)["problems"]
    missing = CliRunner().invoke(main, ["db", "stats", str(tmp_path / "none.sqlite")])
    assert missing.exit_code == 1 and "no store at" in missing.output and "Traceback" not in missing.output


def test_a_store_of_the_first_schema_goes_on(store_url: str) -> None:
    write_old_store(store_url)
    with pytest.raises(SchemaError, match="0001.*longstraw db upgrade"):
        Store.open(store_url)
    assert admin.upgrade_store(store_url) == ("0001", REVISION)
    with Store.open(store_url) as store:
        assert admin.check(store) == []
        first, second, last = store.groups("r1")
        assert (first.complete, first.step, second.step, last.complete, last.step) == (True, 0, 1, False, None)
        assert [step.group_ids for step in store.steps("r1")] == [("g1",), ("g2",)]
        assert len(store.evaluations("r1")) == 1 and [row.trajectory_id for row in store.open_trajectories("r1")] == ["t7"]
        assert len(store.turns("t6")) == 5 and store.load_group("g2").trajectories[2].reward == 1.0
        store.append_turn("t7", 1, make_turn(1))
        store.finish_trajectory("t7", StopReason.ANSWERED, 1.0, {})
        write(store, "g3", 1, [make_turn(2)])
        store.commit_step("r1", step=2, first_version=2, last_version=3, group_ids=["g3"], files={}, receipt={})
        assert admin.check(store) == []


def test_an_upgrade_does_not_seal_damage_in(store_url: str) -> None:
    write_old_store(store_url)
    database = Database(store_url, StoreConfig(), create=False)
    database.write(lambda connection: connection.execute(text("UPDATE groups SET size = 9 WHERE id = 2")))
    database.close()
    admin.upgrade_store(store_url)
    with Store.open(store_url) as store:
        with pytest.raises(CorruptionError, match="groups"):
            store.groups("r1")
        assert len(store.load_group("g1").trajectories) == 3


def test_an_empty_or_newer_store_is_not_upgraded(tmp_path) -> None:
    path = str(tmp_path / "store.sqlite")
    with Store.open(path) as store:
        damage(store, "UPDATE alembic_version SET version_num = '0999'")
    with pytest.raises(SchemaError, match="0999"):
        admin.upgrade_store(path)


def test_a_store_without_notes_is_brought_forward_and_its_seals_still_fit(store: Store, store_url: str) -> None:
    rows = store.trajectories(fill(store))
    before = [store.turns(row.trajectory_id) for row in rows]
    with store.database.engine.begin() as connection:
        connection.execute(text("ALTER TABLE turns DROP COLUMN notes"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0002'"))
    store.close()
    with pytest.raises(SchemaError, match="longstraw db upgrade"):
        Store.open(store_url)
    assert admin.upgrade_store(store_url) == ("0002", REVISION)
    with Store.open(store_url) as again:
        assert admin.check(again) == [] and len(before) == 3
        for row, turns in zip(rows, before, strict=True):
            for one, other in zip(again.turns(row.trajectory_id), turns, strict=True):
                assert_same_turn(one, other)


def test_a_store_is_read_while_it_is_written(store: Store, store_url: str) -> None:
    """A reader keeps the state it began with, and does not stop the writer."""
    _, group = begin(store)
    trajectory = store.add_trajectory(group, 0)
    store.append_turn(trajectory, 0, make_turn(0))
    with Store.open(store_url) as reader:

        def action(connection) -> tuple[int, int]:
            count = text("SELECT count(*) FROM turns")
            before = connection.execute(count).scalar_one()
            store.append_turn(trajectory, 1, make_turn(1))
            return before, connection.execute(count).scalar_one()

        assert reader.database.read(action) == (1, 1)
        assert reader.trajectory(trajectory).turns == 2
    store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})
