"""Files and back: what is exported comes in again with the same digests; chat files say what was said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from sqlalchemy import select
from store_made import TASK, begin, make_turn, write

from longstraw_agents.cli import main
from longstraw_agents.errors import StoreError
from longstraw_agents.storage import Store, chat, interchange
from longstraw_agents.storage.schema import TurnTable
from longstraw_agents.types import StopReason, ToolCall, Turn

START, END = 1, 2
CHAT = chat.ChatFormat(START, END, lambda ids: "".join(map(chr, ids)))


def digests(store: Store) -> list[tuple]:
    """Content and chain digests of all turns, by branch."""
    columns = (TurnTable.digest, TurnTable.chain)
    with store.database.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(select(*columns).order_by(TurnTable.branch_id, TurnTable.turn))]


def fill(store: Store) -> str:
    run, group = begin(store, size=3)
    call = ToolCall("look \0", {"q": "\ud800"}, result="é\0", seconds=0.125)
    shared = [make_turn(0, 5000, 10), make_turn(1, tool_calls=[call], observation_source=b"\xff\0")]
    write(store, group, 0, [*shared, make_turn(2, reward_parts={"a": 0.1}, notes={"temperature": 0.5})])
    write(store, group, 1, [*shared, make_turn(3)], reward=None)
    part = store.add_trajectory(group, 1, parent="t2", weight=0.25)
    store.append_turn(part, 0, make_turn(9))
    store.finish_trajectory(part, StopReason.TOKEN_LIMIT, 0.1, {"b": 1 / 3}, success=True)
    store.append_turn(store.add_trajectory(store.add_group(run, TASK, 1, purpose="eval", policy_version=4), 0), 0, make_turn(5))
    return run


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_run_comes_back_with_the_same_digests(store: Store, tmp_path: Path, form: str) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    run = fill(store)
    path, again = tmp_path / f"run.{form}", tmp_path / f"again.{form}"
    assert getattr(interchange, f"export_{form}")(store, run, path) == 4
    with Store.open(str(tmp_path / "other.sqlite")) as other:
        imported = getattr(interchange, f"import_{form}")(other, path)
        assert digests(other) == digests(store)
        for mine, theirs in zip(store.groups(run), other.groups(imported), strict=True):
            for name in ("task", "size", "purpose", "policy_version", "complete"):
                assert getattr(mine, name) == getattr(theirs, name), name
            for a, b in zip(store.trajectories(mine.group_id), other.trajectories(theirs.group_id), strict=True):
                for name in ("member", "part", "weight", "turns", "length", "stop_reason", "reward", "reward_parts", "success"):
                    assert getattr(a, name) == getattr(b, name), name
                assert (a.parent is None) == (b.parent is None)
        assert [t.tool_calls for t in other.turns("t1")] == [t.tool_calls for t in store.turns("t1")]
        getattr(interchange, f"export_{form}")(other, imported, again)
    if form == "jsonl":
        assert path.read_text().split("\n")[1:] == again.read_text().split("\n")[1:], "all but the run's own line"


def test_a_broken_file_leaves_nothing(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    interchange.export_jsonl(store, fill(store), path)
    lines = path.read_text().split("\n")
    before = store.runs()
    without_turns, newer = [*lines[:2], lines[2].replace('"turns"', '"turn"')], ['{"kind":"run","version":9}']
    for broken in ([*lines[:3], "{"], without_turns, lines[1:], newer):
        path.write_text("\n".join(broken))
        with pytest.raises(StoreError):
            interchange.import_jsonl(store, path)
    other = tmp_path / "x.parquet"
    other.write_bytes(b"PAR1 no")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    with pytest.raises(StoreError, match="no Parquet file of trajectories"):
        interchange.import_parquet(store, other)
    assert store.runs() == before


def said(role: str, content: str, *, ended: bool = True) -> list[int]:
    return [START, *map(ord, f"{role}\n{content}"), *([END] if ended else [])]


def talk(store: Store, group: str, member: int, answer: str, reward: float) -> None:
    """System and user, a call and its result, an answer that reached its limit before it ended."""
    first = [*said("system", "be brief"), *said("user", "2+2?"), START, *map(ord, "assistant\n")]
    call, result = [*map(ord, "add(2,2)"), END], [*said("tool", "4"), START, *map(ord, "assistant\n")]
    tool = ToolCall("add", {"a": 2, "b": 2}, result="4")
    trajectory = store.add_trajectory(group, member)
    for index, (observation, action, calls) in enumerate(((first, call, [tool]), (result, [*map(ord, answer)], []))):
        turn = Turn(np.array(observation), np.array(action), np.zeros(len(action), np.float32), 0, tool_calls=calls)
        store.append_turn(trajectory, index, turn)
    store.finish_trajectory(trajectory, StopReason.ANSWERED, reward, {})


def test_chat_files(store: Store, tmp_path: Path) -> None:
    run, group = begin(store)
    for member, (answer, reward) in enumerate((("4", 1.0), ("5", 0.0), ("four", 1.0))):
        talk(store, group, member, answer, reward)
    sft, pairs = tmp_path / "sft.jsonl", tmp_path / "pairs.jsonl"
    assert chat.export_sft(store, run, sft, CHAT, least_reward=0.5) == 2
    first = json.loads(sft.read_text().split("\n")[0])["messages"]
    assert [(m["role"], m["content"]) for m in first] == [
        ("system", "be brief"),
        ("user", "2+2?"),
        ("assistant", "add(2,2)"),
        ("tool", "4"),
        ("assistant", "4"),
    ]
    assert chat.export_preferences(store, run, pairs, CHAT) == 2
    pair = json.loads(pairs.read_text().split("\n")[1])
    assert [m["content"] for m in pair["prompt"]] == ["be brief", "2+2?", "add(2,2)", "4"]
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("four", "5")
    assert chat.export_preferences(store, run, pairs, CHAT, margin=1.0) == 0


def test_atif_documents_are_whole_and_come_back(store: Store, tmp_path: Path) -> None:
    run, group = begin(store, size=1)
    talk(store, group, 0, "4", 1.0)
    assert chat.export_atif(store, run, tmp_path / "atif", CHAT, "model") == 1
    path = tmp_path / "atif" / "t1.json"
    document = json.loads(path.read_text())
    assert document["schema_version"] == "ATIF-v1.4" and document["agent"]["model_name"] == "model"
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    assert [(s["source"], s["message"]) for s in document["steps"]] == [
        ("system", "be brief"),
        ("user", "2+2?"),
        ("agent", "add(2,2)"),
        ("user", "4"),
        ("agent", "4"),
    ]
    agent = document["steps"][2]
    assert agent["tool_calls"][0]["function_name"] == "add" and agent["tool_calls"][0]["arguments"] == {"a": 2, "b": 2}
    assert agent["observation"]["results"] == [{"source_call_id": agent["tool_calls"][0]["tool_call_id"], "content": "4"}]
    with Store.open(str(tmp_path / "other.sqlite")) as other:
        chat.import_atif(other, [path], "back")
        assert digests(other) == digests(store)
        assert other.trajectory("t1").reward == 1.0
    history: list[int] = []
    for step in document["steps"]:  # as another program would write it
        if step["source"] == "agent":
            observed = json.loads(step.pop("extra")["longstraw"])["observation"]
            step["metrics"]["prompt_token_ids"] = history + observed
            history = history + observed + step["metrics"]["completion_token_ids"]
    path.write_text(json.dumps(document))
    with Store.open(str(tmp_path / "foreign.sqlite")) as other:
        chat.import_atif(other, [path], "foreign")
        assert np.array_equal(other.load_trajectory("t1").tokens, store.load_trajectory("t1").tokens)
    agent["metrics"].pop("logprobs")
    path.write_text(json.dumps(document))
    with pytest.raises(StoreError, match="step 3 has no"):
        chat.import_atif(store, [path], "text only")
    assert [row.run_id for row in store.runs()] == [run]


def test_the_commands(store: Store, tmp_path: Path) -> None:
    url, path = str(tmp_path / "a.sqlite"), str(tmp_path / "run.jsonl")
    with Store.open(url) as other:
        fill(other)
    for arguments in (["export", url, path, "--run", "r1"], ["import", str(tmp_path / "b.sqlite"), path, "--name", "again"]):
        result = CliRunner().invoke(main, ["db", *arguments])
        assert result.exit_code == 0, result.output
    with Store.open(str(tmp_path / "b.sqlite"), create=False) as back:
        assert [row.name for row in back.runs()] == ["again"]
    result = CliRunner().invoke(main, ["db", "export", url, path, "--run", "r7"])
    assert result.exit_code == 1 and "r7 is not in the store" in result.output
