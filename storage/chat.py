"""Trajectories as text for other tools: chat messages for supervised fine-tuning, preference pairs, and ATIF.

The store holds ids. Messages are cut out of them at the chat format's control tokens, which text from an environment can never
contain (it is encoded with them disarmed), so no message can pretend to be another. Text is what the ids decode to.

ATIF is the Agent Trajectory Interchange Format of the Harbor project, version 1.4: one JSON document a trajectory. It has no
place for the ids of an observation, for rewards of steps or for sources: they are under `extra.longstraw` of a step, as a JSON
text (ATIF's readers refuse lone surrogates; elsewhere U+FFFD stands for them), and with them a document of ours comes back
exactly. Of a document of another origin, ids and log-probabilities are needed; text alone is refused. What such a document
copied for context, or did without a model, is observed, not sampled; trajectories of subagents inside it become groups of their
own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from longstraw_agents.errors import StoreError
from longstraw_agents.storage.interchange import turn_of, turn_record
from longstraw_agents.storage.records import TrajectoryRow
from longstraw_agents.storage.schema import canonical
from longstraw_agents.storage.store import Store
from longstraw_agents.types import StopReason, Task, TokenArray, ToolCall, Turn

ATIF = "ATIF-v1.4"


@dataclass(frozen=True)
class ChatFormat:
    """How ids become messages: `start` and `end` are the ids of the control tokens around a message, `decode` gives text.

    A message is start, role, newline, content, end (ChatML).
    """

    start: int
    end: int
    decode: Callable[[Sequence[int]], str]

    def messages(self, ids: TokenArray) -> list[dict[str, str]]:
        """The messages in a trajectory's ids; one without an end is what was written of it. A header without content is none."""
        starts = [*np.flatnonzero(ids == self.start).tolist(), len(ids)]
        found = []
        for begin, stop in zip(starts[:-1], starts[1:], strict=True):
            body = ids[begin + 1 : stop]
            ends = np.flatnonzero(body == self.end)
            role, newline, content = self.decode((body[: ends[0]] if len(ends) else body).tolist()).partition("\n")
            if newline and (content or len(ends)):
                found.append({"role": role, "content": content})
        return found


def export_sft(store: Store, run_id: str, path: Path, chat: ChatFormat, *, least_reward: float | None = None) -> int:
    """One JSON line `{"messages": [...]}` for each finished trajectory of the run whose reward is at least `least_reward`.

    Returns their number. Trajectories without a valid reward are left out.
    """

    def lines() -> Iterator[dict[str, Any]]:
        for _, rows in _rewarded(store, run_id):
            for row in rows:
                if least_reward is None or _reward(row) >= least_reward:
                    yield {"messages": chat.messages(store.load_trajectory(row.trajectory_id).tokens)}

    return _write_lines(path, lines())


def export_preferences(store: Store, run_id: str, path: Path, chat: ChatFormat, *, margin: float = 0.0) -> int:
    """One JSON line `{"prompt", "chosen", "rejected"}` for each pair of a group whose rewards differ by more than `margin`.

    Each is a list of messages; the prompt is what both begin with. Returns the number of pairs.
    """

    def lines() -> Iterator[dict[str, Any]]:
        for _, rows in _rewarded(store, run_id):
            said = {row.trajectory_id: chat.messages(store.load_trajectory(row.trajectory_id).tokens) for row in rows}
            for pair in combinations(rows, 2):
                better, worse = sorted(pair, key=_reward, reverse=True)
                if _reward(better) - _reward(worse) <= margin:
                    continue
                chosen, rejected = said[better.trajectory_id], said[worse.trajectory_id]
                shared = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
                prompt = chosen[:shared]
                yield {"prompt": prompt, "chosen": chosen[shared:], "rejected": rejected[shared:]}

    return _write_lines(path, lines())


def export_atif(store: Store, run_id: str, folder: Path, chat: ChatFormat, model: str) -> int:
    """Writes one ATIF document for each finished trajectory of the run into `folder`; returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for group in store.groups(run_id):
        for row in store.trajectories(group.group_id):
            if row.stop_reason is not None:
                document = _atif_document(row, group.task, store.turns(row.trajectory_id), chat, model)
                (folder / f"{row.trajectory_id}.json").write_text(canonical(_unicode(document)), encoding="ascii")
                count += 1
    return count


def import_atif(store: Store, paths: Sequence[Path], name: str) -> str:
    """Reads ATIF documents into a new run, one group for each; returns its id.

    Raises StoreError for a document whose steps lack ids or log-probabilities, or whose history is not append-only.
    """
    run = store.create_run(name, {"imported": ATIF})
    try:
        for path in paths:
            _import_document(store, run, json.loads(path.read_text(encoding="utf-8")), path)
    except BaseException:
        store.delete_run(run)
        raise
    return run


def _rewarded(store: Store, run_id: str) -> Iterator[tuple[str, list[TrajectoryRow]]]:
    """The finished trajectories with a valid reward, group by group."""
    for group in store.groups(run_id):
        rows = [row for row in store.trajectories(group.group_id) if row.stop_reason is not None and row.reward is not None]
        yield group.group_id, rows


def _reward(row: TrajectoryRow) -> float:
    assert row.reward is not None
    return row.reward


def _write_lines(path: Path, records: Iterator[dict[str, Any]]) -> int:
    """Writes JSON lines to a file that appears whole or not at all."""
    count, part = 0, path.with_name(path.name + ".part")
    with open(part, "w", encoding="ascii") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            count += 1
    part.rename(path)
    return count


def _atif_document(row: TrajectoryRow, task: Task, turns: Sequence[Turn], chat: ChatFormat, model: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for turn in turns:
        for message in _observed(chat, turn.observation):
            source = message["role"] if message["role"] in ("system", "user") else "user"
            steps.append({"step_id": len(steps) + 1, "source": source, "message": message["content"]})
        if len(turn.action) or not len(turn.observation):
            steps.append(_agent_step(len(steps) + 1, turn, chat))
        else:  # what the environment said last
            steps[-1]["extra"] = {"longstraw": _beside(turn)}
    kept = {"env_id": task.env_id, "seed": task.seed, "split": task.split, "options": dict(task.options)}
    end = {"reward": row.reward, "reward_parts": dict(row.reward_parts), "success": row.success, "stop_reason": row.stop_reason}
    sampled = sum(len(turn.action) for turn in turns)
    return {
        "schema_version": ATIF,
        "session_id": row.trajectory_id,
        "agent": {"name": "longstraw-agents", "version": "1", "model_name": model},
        "steps": steps,
        "final_metrics": {"total_completion_tokens": sampled, "total_steps": len(steps)},
        "extra": {"longstraw": canonical({"task": kept, "end": end})},
    }


def _observed(chat: ChatFormat, ids: TokenArray) -> list[dict[str, str]]:
    """The messages of an observation; text outside of any message is the user's."""
    found = chat.messages(ids)
    return found or ([{"role": "user", "content": chat.decode(ids.tolist())}] if len(ids) else [])


def _agent_step(number: int, turn: Turn, chat: ChatFormat) -> dict[str, Any]:
    step: dict[str, Any] = {
        "step_id": number,
        "source": "agent",
        "message": chat.decode([i for i in turn.action.tolist() if i != chat.end]),
        "metrics": {
            "completion_tokens": len(turn.action),
            "completion_token_ids": turn.action.tolist(),
            "logprobs": turn.behaviour.tolist(),
        },
        "extra": {"longstraw": _beside(turn)},
    }
    if turn.tool_calls:
        names = [f"call_{number}_{i}" for i in range(len(turn.tool_calls))]
        calls = list(zip(names, turn.tool_calls, strict=True))
        step["tool_calls"] = [
            {"tool_call_id": name, "function_name": call.name, "arguments": dict(call.arguments)} for name, call in calls
        ]
        results = [{"source_call_id": name, "content": _said(call)} for name, call in calls]
        step["observation"] = {"results": results}
    return step


def _beside(turn: Turn) -> str:
    """What ATIF has no field for, as JSON."""
    return canonical({name: value for name, value in turn_record(turn).items() if name not in ("action", "behaviour")})


def _ours(part: Mapping[str, Any]) -> dict[str, Any]:
    """What `extra.longstraw` of a document or a step says; empty where another program wrote it."""
    return dict(json.loads((part.get("extra") or {}).get("longstraw", "{}")))


def _unicode(value: Any) -> Any:
    """A JSON-able value with U+FFFD in place of lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {_unicode(key): _unicode(item) for key, item in value.items()}
    return [_unicode(item) for item in value] if isinstance(value, list | tuple) else value


def _said(call: ToolCall) -> str:
    return call.result if call.result is not None else f"error: {call.error}"


def _import_document(store: Store, run: str, document: Mapping[str, Any], path: Path) -> None:
    if not str(document.get("schema_version", "")).startswith("ATIF-v1."):
        raise StoreError(f"{path} is no ATIF document of version 1; its schema_version is {document.get('schema_version')!r}")
    ours = _ours(document)
    task = Task(**ours["task"]) if "task" in ours else Task("atif", 0, "train", {"session": document.get("session_id")})
    trajectory = store.add_trajectory(store.add_group(run, task, 1), 0)
    history = np.zeros(0, np.int32)
    for index, step in enumerate(filter(_is_turn, document["steps"])):
        turn = _step_turn(step, history, f"{path}, step {step.get('step_id')}")
        history = np.concatenate([history, turn.observation, turn.action])
        store.append_turn(trajectory, index, turn)
    end = ours.get("end", {"reward": None, "reward_parts": {}, "success": None, "stop_reason": StopReason.ANSWERED})
    store.finish_trajectory(
        trajectory, StopReason(end["stop_reason"]), end["reward"], end["reward_parts"], success=end["success"]
    )
    for inner in document.get("subagent_trajectories") or []:
        _import_document(store, run, inner, path)


def _is_turn(step: Mapping[str, Any]) -> bool:
    """Whether a step ends a turn: ours say so; of others, those that a model sampled here."""
    sampled = step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0
    return sampled or bool(_ours(step))


def _step_turn(step: Mapping[str, Any], history: TokenArray, where: str) -> Turn:
    metrics, ours = step.get("metrics") or {}, _ours(step)
    if ours:
        return turn_of({**ours, "action": metrics.get("completion_token_ids", []), "behaviour": metrics.get("logprobs", [])})
    action, logp = metrics.get("completion_token_ids"), metrics.get("logprobs")
    if action is None or logp is None or (step.get("llm_call_count") or 1) > 1:
        raise StoreError(f"{where} has no completion_token_ids or logprobs of one call; text alone cannot be trained on exactly")
    prompt = np.asarray(metrics.get("prompt_token_ids") or [], np.int32)
    if len(prompt) <= len(history) or not np.array_equal(prompt[: len(history)], history):
        raise StoreError(f"{where}: prompt_token_ids do not continue the steps before it; only append-only histories fit")
    observation, calls = prompt[len(history) :], _foreign_calls(step)
    return Turn(observation, np.asarray(action, np.int32), np.asarray(logp, np.float32), policy_version=0, tool_calls=calls)


def _foreign_calls(step: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """A step's tool calls with the text of their results."""
    results: dict[str | None, str] = {}
    for result in (step.get("observation") or {}).get("results", []):
        content = result.get("content") or ""
        text = content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)
        results[result.get("source_call_id")] = text
    return tuple(
        ToolCall(call["function_name"], call["arguments"], results.get(call["tool_call_id"]))
        for call in step.get("tool_calls") or []
    )
