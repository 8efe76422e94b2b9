"""ATIF documents against the format's own library, Harbor: ours pass its validator, what its models write is imported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from store_made import begin
from test_store_export import CHAT, END, START, digests, said, talk

from longstraw_agents.errors import StoreError
from longstraw_agents.storage import Store, chat
from longstraw_agents.types import StopReason, ToolCall, Turn

models = pytest.importorskip("harbor.models.trajectories", reason="Harbor, ATIF's own library, is not installed (Python >= 3.12)")


def turn_made(observation: list[int], action: list[int], *calls: ToolCall) -> Turn:
    logp = -np.arange(len(action), dtype=np.float32)
    return Turn(np.array(observation, np.int32), np.array(action, np.int32), logp, 0, reward=0.5, tool_calls=calls)


def test_what_we_export_is_valid(store: Store, tmp_path: Path) -> None:
    from harbor.utils.trajectory_validator import TrajectoryValidator

    run, group = begin(store, size=3)
    talk(store, group, 0, "4", 1.0)
    talk(store, group, 1, "five", None)
    trajectory = store.add_trajectory(group, 2)
    calls = (ToolCall("add", {}, error="no numbers"), ToolCall("add", {"a": [1, None]}, result="\ud800\0"))
    store.append_turn(trajectory, 0, turn_made([*said("user", "\0 hm"), START, *map(ord, "assistant\n")], [65, END], *calls))
    store.append_turn(trajectory, 1, turn_made(list(map(ord, "no message")), [END]))
    store.finish_trajectory(trajectory, StopReason.ANSWERED, 0.0, {}, trailing_observation=said("tool", "the end"))
    assert chat.export_atif(store, run, tmp_path, CHAT, "model") == 3
    paths = [tmp_path / f"t{n}.json" for n in (1, 2, 3)]
    for path in paths:
        validator = TrajectoryValidator()
        assert validator.validate(path), validator.get_errors()
        document = models.Trajectory.model_validate_json(path.read_text())
        path.write_text(json.dumps(document.to_json_dict()))  # what their tools would write again
    last = models.Trajectory.model_validate_json(paths[2].read_text()).steps[-1]
    assert (last.source, last.message) == ("user", "the end")
    with Store.open(str(tmp_path / "other.sqlite")) as other:
        chat.import_atif(other, paths, "back")
        assert digests(other) == digests(store)


def document_of(steps: list, **rest) -> dict:
    agent = models.Agent(name="another", version="1")
    numbered = [models.Step(step_id=i + 1, **step) for i, step in enumerate(steps)]
    return models.Trajectory(session_id="s", agent=agent, steps=numbered, **rest).to_json_dict()


def sampled(prompt: list[int], completion: list[int]) -> dict:
    metrics = models.Metrics(prompt_token_ids=prompt, completion_token_ids=completion, logprobs=[-0.5] * len(completion))
    return {"source": "agent", "message": "x", "metrics": metrics}


def test_what_its_models_write_is_imported(store: Store, tmp_path: Path) -> None:
    call = models.ToolCall(tool_call_id="c", function_name="add", arguments={"a": 1})
    parts = [models.ContentPart(type="text", text="four")]
    result = models.Observation(results=[models.ObservationResult(source_call_id="c", content=parts)])
    steps = [
        {"source": "user", "message": "hello"},
        {**sampled([1, 2], [3]), "is_copied_context": True},
        {"source": "agent", "message": "by rule", "llm_call_count": 0},
        {**sampled([1, 2, 3, 4], [5, 6]), "tool_calls": [call], "observation": result, "llm_call_count": 1},
        sampled([1, 2, 3, 4, 5, 6, 7], [8]),
    ]
    inner = models.Trajectory.model_validate({**document_of([sampled([9], [10])]), "trajectory_id": "inner"})
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(document_of(steps, subagent_trajectories=[inner])))
    chat.import_atif(store, [path], "theirs")
    loaded = store.load_trajectory("t1")
    assert loaded.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert loaded.action_mask.tolist() == [False] * 4 + [True] * 2 + [False, True]
    assert list(store.turns("t1")[0].tool_calls) == [ToolCall("add", {"a": 1}, "four")]
    assert store.load_trajectory("t2").tokens.tolist() == [9, 10]
    path.write_text(json.dumps(document_of([{**sampled([1], [2]), "llm_call_count": 2}])))
    with pytest.raises(StoreError, match="step 1 has no .* of one call"):
        chat.import_atif(store, [path], "several calls")
