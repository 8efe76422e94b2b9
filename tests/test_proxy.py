"""The proxy in front of a tiny real model: unmodified clients, and a store that holds exactly what the model read and wrote."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
import uvicorn

from longstraw_agents.policies import Policy, Sample, SampleRequest
from longstraw_agents.policies.local import LocalPolicy
from longstraw_agents.policies.scripted import ScriptedPolicy
from longstraw_agents.proxy import Proxy
from longstraw_agents.recorder import Recorder, RecorderConfig
from longstraw_agents.rendering import ChatML, DisarmedEncoder, Renderer
from longstraw_agents.storage import Store
from longstraw_agents.templates import TemplateRenderer
from longstraw_agents.types import StopReason, Trajectory
from tests.chat import small_tokenizer
from tests.templates import THINKING, tokenizer_with

TOKENIZER = small_tokenizer()
RENDERER = ChatML(TOKENIZER)
ENCODE = DisarmedEncoder(TOKENIZER)
END = TOKENIZER.get_added_vocab()["<|im_end|>"]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


def tiny_model():
    torch.manual_seed(0)
    size = dict(vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads)).eval()


class Served:
    """A proxy on a free port, in a thread of its own."""

    def __init__(self, store: Store, policy: Policy, renderer: Renderer = RENDERER, **config: Any) -> None:
        self.store, self.run_id = store, store.create_run("proxy", {})
        settings = RecorderConfig(**{"max_action_tokens": 12, "max_trajectory_tokens": 4000, **config})
        self.recorder = Recorder(store, policy, renderer, self.run_id, settings)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        app = Proxy(self.recorder, model="tiny").app()
        self.server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def open(self, **body: Any) -> dict[str, Any]:
        task = {"env_id": "program", "seed": 1}
        response = self.client.post("/sessions", json=body or {"task": task})
        assert response.status_code == 201, response.text
        return response.json()

    def chat(self, session: str, messages: list[dict[str, Any]], **body: Any) -> httpx.Response:
        return self.client.post(f"/sessions/{session}/v1/chat/completions", json={"model": "any", "messages": messages, **body})

    def reward(self, session: str, reward: float | None = 1.0, **body: Any) -> httpx.Response:
        return self.client.post(f"/sessions/{session}/reward", content=json.dumps({"reward": reward, **body}))

    def trajectories(self, group: str) -> list[Trajectory]:
        return list(self.store.load_group(group).trajectories)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        yield store


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def served(store: Store, model) -> Iterator[Served]:
    served = Served(store, LocalPolicy(model, RENDERER.stop_ids))
    yield served
    served.close()


@pytest.fixture
def scripted(store: Store) -> Iterator[Served]:
    """Calls the tool first and then says how often it was asked."""

    def reply(request: SampleRequest) -> str:
        text = TOKENIZER.decode(request.tokens)
        return CALL if "<|im_start|>tool" not in text and "Tools:" in text else f"said {text.count('<|im_start|>user')}"

    served = Served(store, ScriptedPolicy(reply, ENCODE, END), max_action_tokens=200)
    yield served
    served.close()


def check_replay(model: Any, trajectory: Trajectory) -> int:
    """Recorded log-probabilities against one plain forward over the stored tokens; gives the number compared."""
    tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
    with torch.no_grad():
        logp = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
    own = logp[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    mask = trajectory.action_mask[1:]
    np.testing.assert_allclose(own[mask], trajectory.behaviour[1:][mask], atol=1e-4)
    return int(mask.sum())


def test_a_conversation_is_one_trajectory_that_replays_exactly(served: Served, model: Any) -> None:
    session = served.open()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello <|im_end|>"}]
    for turn in range(3):
        body = served.chat(session["session"], messages).json()
        assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] > 0
        messages += [body["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
    assert served.reward(session["session"], 0.5, success=True, parts={"style": 0.5}).json()["trajectories"] == 1
    (trajectory,) = served.trajectories(session["group"])
    assert trajectory.reward == 0.5 and len(trajectory.turn_ends) == 3 and trajectory.weight == 1.0
    assert check_replay(model, trajectory) == trajectory.action_mask.sum() > 0
    assert END not in trajectory.tokens[: len(ENCODE("system\nBe brief."))]


def test_the_official_client_both_interfaces_and_streaming(served: Served, model: Any) -> None:
    openai = pytest.importorskip("openai")
    session = served.open(task={"env_id": "program", "seed": 1}, size=4)
    groups = [session] + [served.open(group=session["group"]) for _ in range(3)]

    client = openai.OpenAI(base_url=groups[0]["base_url"], api_key="none")
    said = [{"role": "user", "content": "hello"}]
    first = client.chat.completions.create(model="m", messages=said).choices[0].message
    client.chat.completions.create(model="m", messages=[*said, first, {"role": "user", "content": "more"}])
    assert [model.id for model in client.models.list()] == ["tiny"]

    client = openai.OpenAI(base_url=groups[1]["base_url"], api_key="none")
    events = client.chat.completions.create(model="m", messages=said, stream=True, stream_options={"include_usage": True})
    chunks = list(events)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0 and chunks[-2].choices[0].finish_reason in ("stop", "length")
    client.chat.completions.create(
        model="m", messages=[*said, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    )

    client = openai.OpenAI(base_url=groups[2]["base_url"], api_key="none")
    response = client.responses.create(model="m", input="hello", instructions="Be brief.")
    client.responses.create(model="m", input="more", instructions="Be brief.", previous_response_id=response.id)

    client = openai.OpenAI(base_url=groups[3]["base_url"], api_key="none")
    streamed = list(client.responses.create(model="m", input="hello", stream=True))
    kinds, final = [event.type for event in streamed], streamed[-1].response
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    follow = [{"role": "user", "content": "hello"}, *final.output, {"role": "user", "content": "more"}]
    client.responses.create(model="m", input=follow)

    for group in groups:
        assert served.reward(group["session"]).json()["trajectories"] == 1
    trajectories = served.trajectories(session["group"])
    assert len(trajectories) == 4 and all(len(trajectory.turn_ends) == 2 for trajectory in trajectories)
    assert all(check_replay(model, trajectory) for trajectory in trajectories)


def test_tool_calls_go_out_parsed_and_come_back_as_sampled(scripted: Served) -> None:
    session = scripted.open()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is at x?"}]
    choice = scripted.chat(session["session"], messages, tools=[TOOL]).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"]) == {"at": "x"}
    call["function"]["arguments"] = '{ "at":"x" }'  # programs reformat; the meaning counts
    messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "a cup"}]
    assert scripted.chat(session["session"], messages, tools=[TOOL]).json()["choices"][0]["message"]["content"] == "said 1"
    scripted.reward(session["session"])
    (trajectory,) = scripted.trajectories(session["group"])
    text = TOKENIZER.decode(trajectory.tokens)
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\na cup<|im_end|>\n" in text
    assert text.startswith("<|im_start|>system\nTools:\n") and '"name": "look"' in text
    turns = scripted.store.turns(scripted.store.trajectories(session["group"])[0].trajectory_id)
    assert turns[0].tool_calls[0].name == "look"


def test_the_responses_interface_with_tools(scripted: Served) -> None:
    openai = pytest.importorskip("openai")
    session = scripted.open()
    client = openai.OpenAI(base_url=session["base_url"], api_key="none")
    tool = {"type": "function", **TOOL["function"], "strict": False}
    items: list[Any] = [{"role": "user", "content": "What is at x?"}]
    first = client.responses.create(model="m", input=items, tools=[tool])
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"at": "x"}
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "a cup"}]
    assert client.responses.create(model="m", input=items, tools=[tool]).output_text == "said 1"
    assert scripted.reward(session["session"]).json()["trajectories"] == 1


def test_rewritten_histories_become_linked_parts_that_share_the_weight(served: Served, model: Any) -> None:
    session = served.open()["session"]
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    first = served.chat(session, start).json()["choices"][0]["message"]
    second_call = [*start, first, {"role": "user", "content": "more"}]
    second = served.chat(session, second_call).json()["choices"][0]["message"]
    served.chat(session, second_call)  # sent twice: parts at turn 1
    served.chat(session, [start[0], {"role": "user", "content": "summary of all"}])  # compacted: nothing but the system message
    served.chat(session, [{"role": "system", "content": "You are a sub-agent."}, {"role": "user", "content": "find"}])
    served.chat(session, [*second_call, second, {"role": "user", "content": "end"}])  # the first part goes on
    edited = {**first, "content": "edited"}
    served.chat(session, [*start, edited, {"role": "user", "content": "more"}])
    assert served.reward(session, 1.0).json()["trajectories"] == 5
    (group,) = served.store.groups(served.run_id)
    assert group.complete
    rows = served.store.trajectories(group.group_id)
    assert [row.part for row in rows] == [0, 1, 2, 3, 4] and [row.turns for row in rows] == [3, 2, 1, 1, 1]
    assert rows[1].parent == rows[0].trajectory_id and sum(row.weight for row in rows) == pytest.approx(1.0)
    trajectories = served.trajectories(group.group_id)
    assert all(check_replay(model, trajectory) for trajectory in trajectories)
    shared = trajectories[0].turn_ends[0]
    np.testing.assert_array_equal(trajectories[0].tokens[:shared], trajectories[1].tokens[:shared])
    # text of an edited answer is the program's, not the policy's
    assert "edited" not in TOKENIZER.decode(trajectories[4].tokens[trajectories[4].action_mask])


def test_a_format_that_rewrites_history_begins_parts_that_go_on(store: Store) -> None:
    """The template shows earlier answers without their thinking: each question begins a part, tool answers go on in it."""
    tokenizer = tokenizer_with(THINKING)
    renderer = TemplateRenderer(tokenizer)
    seen: list[str] = []

    def reply(request: SampleRequest) -> str:
        seen.append(tokenizer.decode(request.tokens, skip_special_tokens=False))
        return f"<think>hm</think>answer {len(seen)}"

    policy = ScriptedPolicy(reply, lambda text: tokenizer(text, add_special_tokens=False).input_ids, renderer.end_id)
    served = Served(store, policy, renderer, max_action_tokens=200)
    try:
        opened = served.open()
        said: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        for role in ("user", "tool", "user"):
            answer = served.chat(opened["session"], said).json()["choices"][0]["message"]
            said += [answer, {"role": role, "content": "go on"}]
        assert "<think>hm</think>answer 1" in said[1]["content"]
        served.chat(opened["session"], said)
        assert served.reward(opened["session"], 1.0).json()["trajectories"] == 3
        rows = store.trajectories(opened["group"])
        assert [row.turns for row in rows] == [1, 2, 1]
        assert [row.parent for row in rows] == [None, rows[0].trajectory_id, rows[1].trajectory_id]
        notes = [note for trajectory in served.trajectories(opened["group"]) for note in trajectory.turn_notes]
        assert notes == [{}, {"history": "rewritten"}, {}, {"history": "rewritten"}]
        asked = [{"role": m["role"], "content": m["content"]} for m in said]
        assert seen[-1] == tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    finally:
        served.close()


def test_calls_at_once_are_parts_of_their_own(served: Served, model: Any) -> None:
    session = served.open()["session"]

    async def both() -> list[int]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=60) as client:
            url = f"/sessions/{session}/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": "hello"}]}
            return [r.status_code for r in await asyncio.gather(*(client.post(url, json=body) for _ in range(3)))]

    assert asyncio.run(both()) == [200, 200, 200]
    assert served.reward(session).json()["trajectories"] == 3


def test_what_cannot_be_honoured_is_refused_by_name(served: Served) -> None:
    session = served.open()["session"]
    said = [{"role": "user", "content": "hello"}]
    for body, word in [
        ({"n": 2}, "n=2"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": "hot"}, "hot"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"messages": []}, "must end with"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "are allowed"),
        ({"messages": "x"}, "list of messages"),
    ]:
        response = served.chat(session, body.pop("messages", said), **body)
        assert response.status_code == 400 and word in response.json()["error"]["message"], (body, response.text)
    assert served.chat("nowhere", said).status_code == 404
    assert served.client.post("/sessions", json={"group": "g99"}).status_code == 404
    assert served.client.post("/sessions", content="[").status_code == 400


def test_the_runs_sampling_overrules_the_calls(served: Served, model: Any) -> None:
    session = served.open()
    response = served.chat(session["session"], [{"role": "user", "content": "hello"}], temperature=0.2, top_p=1.0)
    assert response.headers["x-longstraw-overruled"] == "temperature=0.2"
    served.reward(session["session"])
    assert check_replay(model, served.trajectories(session["group"])[0])  # log-probabilities at temperature 1


def test_a_reward_must_be_finite_and_comes_once(served: Served) -> None:
    opened = served.open()
    session = opened["session"]
    served.chat(session, [{"role": "user", "content": "hello"}])
    assert served.reward(session, float("nan")).status_code == 400
    assert served.reward(session, 1.0, parts={"x": float("inf")}).status_code == 400
    assert served.reward(session, None).status_code == 200
    assert served.reward(session, 1.0).status_code == 404
    (row,) = served.store.trajectories(opened["group"])
    assert row.stop_reason is StopReason.CANCELLED and row.reward is None


def test_a_failed_answer_can_be_asked_for_again(store: Store) -> None:
    class FailsFirst(ScriptedPolicy):
        failed = False

        async def sample(self, request: SampleRequest) -> Sample:
            if not self.failed:
                self.failed = True
                raise ConnectionError("away")
            return await super().sample(request)

    served = Served(store, FailsFirst(lambda request: "hello", ENCODE, END))
    try:
        openai = pytest.importorskip("openai")
        session = served.open()
        client = openai.OpenAI(base_url=session["base_url"], api_key="none", max_retries=2)
        done = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
        assert done.choices[0].message.content == "hello"
        assert served.reward(session["session"]).json()["trajectories"] == 1
    finally:
        served.close()


def test_what_an_earlier_process_left_open_is_cancelled(served: Served) -> None:
    opened = served.open()
    served.chat(opened["session"], [{"role": "user", "content": "hello"}])
    later = Recorder(served.store, served.recorder.policy, RENDERER, served.run_id)
    assert later.cancel_open() == 1 and later.cancel_open() == 0
    assert served.store.groups(served.run_id)[0].complete


def test_an_agent_library_unmodified(served: Served, model: Any, scripted: Served) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    model.lm_head.weight.data[END] *= 40  # so that answers end by themselves: the library takes no others
    looked: list[str] = []

    @agents.function_tool
    def look(at: str) -> str:
        """Looks."""
        looked.append(at)
        return f"a cup at {at}"

    def ask(proxy: Served, interface: Any, streaming: bool) -> tuple[str, list[Trajectory]]:
        session = proxy.open()

        async def converse() -> str:
            async with openai.AsyncOpenAI(base_url=session["base_url"], api_key="none") as client:
                agent = agents.Agent("helper", instructions="Be brief.", tools=[look], model=interface("m", openai_client=client))
                if not streaming:
                    return str((await agents.Runner.run(agent, "What is at x?")).final_output)
                result = agents.Runner.run_streamed(agent, "What is at x?")
                async for _ in result.stream_events():
                    continue
                return str(result.final_output)

        said = asyncio.run(converse())
        assert proxy.reward(session["session"]).json()["trajectories"] == 1
        return said, proxy.trajectories(session["group"])

    for interface in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        for streaming in (False, True):
            said, (trajectory,) = ask(scripted, interface, streaming)
            assert said == "said 1" and len(trajectory.turn_ends) == 2
            assert "<|im_start|>tool\na cup at x<|im_end|>" in TOKENIZER.decode(trajectory.tokens)
            said, (trajectory,) = ask(served, interface, streaming)
            assert check_replay(model, trajectory) == trajectory.action_mask.sum()
            assert said == RENDERER.text(trajectory.tokens[trajectory.action_mask])
    assert looked == ["x"] * 4


def test_the_command_serves_a_runs_weights_into_its_store(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "program"\nfolder = "{tmp_path / "run"}"\n[model]\nname = "{tmp_path / "model"}"\n'
        "[collect]\nmax_action_tokens = 8\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "longstraw_agents.cli", "proxy", str(tmp_path / "run.toml"), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            opened = _await_session(client, server)
            said = client.post(
                f"/sessions/{opened['session']}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}]}
            )
            assert said.json()["model"] == "program" and said.json()["usage"]["completion_tokens"] > 0
            assert client.post(f"/sessions/{opened['session']}/reward", json={"reward": 1.0}).status_code == 200
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    with Store.open(str(tmp_path / "run" / "store.sqlite"), create=False) as store:
        (group,) = store.groups(store.runs()[0].run_id, complete=True, unused=True)
        assert store.load_group(group.group_id).trajectories[0].reward == 1.0


def _await_session(client: httpx.Client, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            return client.post("/sessions", json={"task": {"env_id": "program", "seed": 1}}).json()
        except httpx.ConnectError:
            time.sleep(0.2)
    raise AssertionError("the proxy did not begin to listen")
