"""An unmodified agent program, recorded through the proxy and trained on.

    longstraw proxy examples/tool_use.toml          in one terminal
    python examples/agent_through_proxy.py          in another (pip install openai)
    longstraw train examples/tool_use.toml          when the proxy is stopped

`agent` is any program that speaks OpenAI's API; here it is the official client in a loop. The session gives the base URL that it
is started with, and takes the reward at the end. Eight episodes of one task make a group.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

PROXY = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8321"
EPISODES = 8


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST JSON to the proxy."""
    request = urllib.request.Request(PROXY + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def agent(base_url: str, question: str) -> str:
    """The agent program: it knows nothing of this project."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="unused")
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(2):
        reply = client.chat.completions.create(model="any", messages=messages).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Are you sure? Answer with one word."}]
    return reply


def main() -> None:
    """One group of episodes."""
    task = {"env_id": "examples/colour", "seed": 1, "split": "train", "options": {}}
    session = post("/sessions", {"task": task, "size": EPISODES})
    for number in range(EPISODES):
        if number:
            session = post("/sessions", {"group": session["group"]})
        answer = agent(session["base_url"], "What colour is the sky on a clear day?")
        reward = float("blue" in answer.lower())
        post(f"/sessions/{session['session']}/reward", {"reward": reward, "success": bool(reward), "parts": {}})
        print(f"episode {number + 1} of group {session['group']}: reward {reward}, {answer!r}")


if __name__ == "__main__":
    main()
