"""Stores for the viewer's tests: one with all that pages show, hostile text among it."""

from __future__ import annotations

import numpy as np

from longstraw_agents.storage import Store
from longstraw_agents.trainer.credit import packed
from longstraw_agents.types import StopReason, Task, ToolCall, Turn

#: Each would do something if it were not shown as text.
HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</div></main><h1 class='planted'>planted</h1>",
    "\"'><svg onload=document.title='owned'>",
    "javascript:document.title='owned'",
    "{{ 7 * 7 }}{% raw %}",
    "\x1b[2J\x00\x07\x9b31m",
    "abc\u202edlo\u2066\u200ftxt\u2028end",
    "\ud800 lone",
    "&lt;b&gt; &amp; ]]> <!-- -->",
)
MARKUP = "\n".join(HOSTILE)


class Characters:
    """A tokenizer for stores whose text is to be known: an id is a code point. A piece is long enough to hold a tag."""

    def text(self, ids) -> str:
        return "".join(chr(int(token)) for token in ids)

    def pieces(self, ids) -> list[str]:
        ends = {*range(23, len(ids), 24), len(ids) - 1}
        return [self.text(ids[i - i % 24 : i + 1]) if i in ends else "" for i in range(len(ids))]


def ids_of(text: str) -> np.ndarray:
    return np.array([ord(character) for character in text], np.int32)


def turn_of(observation: str, action: str, **rest) -> Turn:
    logp = -np.linspace(0.01, 9, len(action), dtype=np.float32)
    return Turn(ids_of(observation), ids_of(action), logp, **{"policy_version": 0, **rest})


def receipt_of(step: int, groups: list[str], lengths: dict[str, tuple[int, int]]) -> dict:
    """As a trainer makes it. lengths: by trajectory its one span of loss [start, stop)."""
    metrics = {"kl_old": step / 100, "clip_fraction": 0.1, "clip_low_fraction": 0.04, "mismatch_kl": 0.001, "entropy": 2 / step}
    parts = {"answer": step / 4, HOSTILE[0]: 0.5}
    return {
        "first_version": step - 1, "last_version": step, "gradient": "exact", "groups": groups, "skipped": [], "dropped": [],
        "masked": [], "inputs": {"capture": 10, "replay": 20, "reverse": 10}, "evidence": {"E1": HOSTILE[1]},
        "collected": {"reward": step / 5, "success": step / 10, "tokens": 1000, "entropy": 1.5, "reward_parts": parts},
        "steps": [{"version": step, "loss": 0.1, "gradient_norm": 1.0, "learning_rate": 1e-3, "metrics": metrics}],
        "tokens": {"trajectories": 500, "loss": 50, "tree_targets": 300},
        "phases": {name: {"seconds": 0.5, "peak_mib": 100.0 + step} for name in ("replay", "score", "segment")},
        "credit": {name: [[start, stop, 0.5 - i]] for i, (name, (start, stop)) in enumerate(lengths.items())},
        "log_ratio": {name: packed(np.full(stop - start, 0.1 * i)) for i, (name, (start, stop)) in enumerate(lengths.items())},
    }  # fmt: skip


def fill(store: Store, *, updates: int = 3, members: int = 4) -> str:
    """A run of a few updates whose every text is hostile; returns its id. Its last group is open."""
    run = store.create_run(f"run {MARKUP}", {"model": {"name": "/nowhere"}, "note": MARKUP, "trainer": {"replay": {"chunk": 64}}})
    for step in range(1, updates + 1):
        group = store.add_group(run, Task(f"mine/{HOSTILE[0]}-v0", step, "train", {HOSTILE[1]: MARKUP}), members)
        lengths = {}
        for member in range(members):
            lengths |= _episode(store, group, member, step)
        receipt = receipt_of(step, [group], lengths)
        store.commit_step(
            run, step=step, first_version=step - 1, last_version=step, group_ids=[group], files={"a": "0"}, receipt=receipt
        )
    score = {"success": 0.5, "success_interval": [0.4, 0.6], "mean_return": 1.0, "episodes": 8}
    store.add_evaluation(run, "before", 0, {"sampled": {"score": score, "groups": []}})
    store.add_evaluation(run, HOSTILE[0], updates, {"sampled": {"score": score, "groups": []}})
    open_group = store.add_group(run, Task("mine/open-v0", 0), 2)
    store.append_turn(store.add_trajectory(open_group, 0), 0, turn_of("begun", "yes"))
    return run


def _episode(store: Store, group: str, member: int, step: int) -> dict[str, tuple[int, int]]:
    name = store.add_trajectory(group, member)
    calls = [ToolCall(HOSTILE[2], {HOSTILE[0]: MARKUP}, result=MARKUP), ToolCall("none", {}, error=MARKUP, seconds=0.5)]
    first = turn_of(f"needle {step} {MARKUP} " * 4, f"{MARKUP}{member}", tool_calls=calls, reward_parts={HOSTILE[3]: 0.5})
    second = turn_of("again", f"done {member}")
    store.append_turn(name, 0, first)
    store.append_turn(name, 1, second)
    reward = member / 3 if member else None
    reason = StopReason.ANSWERED if member else StopReason.ENVIRONMENT_ERROR
    store.finish_trajectory(name, reason, reward, {HOSTILE[4]: 0.25}, success=bool(member % 2))
    start = len(first.observation)
    return {name: (start, start + len(first.action))}


def addresses(run: str = "r1") -> list[str]:
    """One of every page and its forms."""
    colours = [f"/trajectories/t2?colour={name}" for name in ("mask", "log-probability", "advantage", "ratio")]
    return [
        "/", f"/runs/{run}", f"/runs/{run}/groups", f"/runs/{run}/groups?order=newest&purpose=train&step=1",
        f"/runs/{run}/receipts", f"/runs/{run}/receipts/1", "/groups/g1", "/groups/g4", "/trajectories/t1",
        "/trajectories/t13", *colours, "/trajectories/t2/tokens?start=100&colour=ratio", "/trajectories/t2/tokens?form=table",
        f"/compare?run={run}&run={run}", "/search", f"/search?q=needle&in={run}", "/search?q=%3Cscript&in=t2",
    ]  # fmt: skip
