"""Endpoint policies against a server that answers as vLLM does, as one without token ids does, or wrongly."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from longstraw_agents.collection import CollectConfig, collect
from longstraw_agents.errors import AdapterError, ConfigError, PolicyError
from longstraw_agents.policies import SampleRequest, Sampling
from longstraw_agents.policies.endpoint import EndpointConfig, EndpointPolicy, VLLMServerPolicy
from longstraw_agents.policies.replayed import ReplayPolicy
from longstraw_agents.storage import Store
from tests.chat import countdown, make_countdown
from tests.test_collection import ENCODE, END, RENDERER, TOKENIZER, Repeater

PROMPT = np.array([5, 6, 7], np.int32)


class Server:
    """Says "hello" and ends. `with_ids`, `renames` and `loses` change what it gets wrong."""

    def __init__(self) -> None:
        self.with_ids, self.renames, self.loses = True, False, False
        self.requests: list[dict[str, Any]] = []
        self.adapters: dict[str, str] = {}
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
            Route("/sleep", self.turn, methods=["POST"]),
            Route("/wake_up", self.turn, methods=["POST"]),
            Route("/is_sleeping", self.turn, methods=["GET"]),
        ]
        self.asleep, self.stubborn, self.dev_mode = False, False, True
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if body["model"] not in ("base", *self.adapters):
            return JSONResponse({"error": {"message": "no such model"}}, status_code=404)
        ids = [*ENCODE("hello"), END][: body["max_tokens"]]
        logp = [-0.5 - index for index in range(len(ids))]
        finish = "stop" if ids[-1] == END else "length"
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
        choice["logprobs"] = {"token_logprobs": logp, "tokens": [""] * len(ids), "text_offset": [], "top_logprobs": None}
        if self.with_ids:
            choice["token_ids"] = ids
        name = "base" if self.renames else body["model"]
        return JSONResponse({"id": "x", "object": "text_completion", "created": 0, "model": name, "choices": [choice]})

    async def models(self, request: Request) -> Response:
        listed = {"base": "base", **({} if self.loses else self.adapters)}
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "x", "root": root} for name, root in listed.items()]
        return JSONResponse({"object": "list", "data": data})

    async def load(self, request: Request) -> Response:
        body = await request.json()
        if not Path(body["lora_path"]).exists():
            return JSONResponse({"error": {"message": "no such folder"}}, status_code=404)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return Response("ok")

    async def unload(self, request: Request) -> Response:
        del self.adapters[(await request.json())["lora_name"]]
        return Response("ok")

    async def turn(self, request: Request) -> Response:
        """Sleep, wake, or say which; what a server without VLLM_SERVER_DEV_MODE does not have."""
        if not self.dev_mode:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        if request.url.path != "/is_sleeping" and not self.stubborn:
            self.asleep = request.url.path == "/sleep" and request.query_params["level"] == "1"
        return JSONResponse({"is_sleeping": self.asleep})

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def ask(policy: EndpointPolicy, **options: Any):
    return asyncio.run(policy.sample(SampleRequest("s", PROMPT, **{"max_new_tokens": 10, "seed": 3, **options})))


def test_ids_go_out_and_come_back_with_their_log_probabilities(server: Server) -> None:
    policy = EndpointPolicy(EndpointConfig(server.url, "base"), [END], version=4)
    got = ask(policy)
    assert got.ids.tolist() == [*ENCODE("hello"), END] and got.finish == "stop" and got.version == 4
    np.testing.assert_allclose(got.behaviour, [-0.5 - index for index in range(len(got.ids))])
    sent = server.requests[0]
    assert sent["prompt"] == PROMPT.tolist() and sent["stop_token_ids"] == [END] and sent["seed"] == 3
    # whatever is not said is taken from the model's own generation settings
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["repetition_penalty"]) == (1.0, 1.0, -1, 1.0)
    assert ask(policy, max_new_tokens=1).finish == "length"
    assert policy.report() == {"sampled": len(got.ids) + 1}


def test_log_probabilities_that_are_not_of_the_sampled_distribution_are_refused(server: Server) -> None:
    raw = EndpointPolicy(EndpointConfig(server.url, "base"), [END])
    for sampling in (Sampling(temperature=0.7), Sampling(top_p=0.9)):
        with pytest.raises(ConfigError, match="processed_logprobs"):
            ask(raw, sampling=sampling)
    assert ask(raw, sampling=Sampling(temperature=0.0)).behaviour.tolist() == [0.0] * 3
    processed = EndpointPolicy(EndpointConfig(server.url, "base", processed_logprobs=True), [END])
    assert ask(processed, sampling=Sampling(temperature=0.7)).behaviour[0] == -0.5


def test_without_token_ids_only_evaluation_is_possible(server: Server, tmp_path: Path) -> None:
    server.with_ids = False
    with pytest.raises(PolicyError, match="no token ids"):
        ask(EndpointPolicy(EndpointConfig(server.url, "base"), [END]))
    with pytest.raises(ConfigError, match="needs `encode`"):
        EndpointPolicy(EndpointConfig(server.url, "base", without_ids="reencode"), [END])
    policy = EndpointPolicy(EndpointConfig(server.url, "base", without_ids="reencode"), [END], encode=ENCODE)
    assert ask(policy).ids.tolist() == [*ENCODE("hello"), END]
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        settings: dict[str, Any] = {"run_id": store.create_run("r", {}), "group_size": 2, "make": make_countdown}
        with pytest.raises(ConfigError, match="no evidence for training"):
            asyncio.run(collect(store, policy, RENDERER, [countdown(1)], CollectConfig(), **settings))
        assert asyncio.run(collect(store, policy, RENDERER, [countdown(1)], CollectConfig(), purpose="eval", **settings)).complete


def test_another_model_than_the_asked_one_is_noticed(server: Server, tmp_path: Path) -> None:
    policy = VLLMServerPolicy(EndpointConfig(server.url, "base"), [END])
    policy.refresh(1, tmp_path)
    assert ask(policy).version == 1 and server.requests[-1]["model"] == "longstraw-1"
    server.renames = True
    with pytest.raises(AdapterError, match="was served 'base'"):
        ask(policy)


def test_adapters_are_swapped_by_version(server: Server, tmp_path: Path) -> None:
    policy = VLLMServerPolicy(EndpointConfig(server.url, "base"), [END], name="mine")
    for version in (1, 2):
        policy.refresh(version, tmp_path)
        assert list(server.adapters) == [f"mine-{version}"] and ask(policy).version == version
    with pytest.raises(AdapterError, match="refused"):
        policy.refresh(3, tmp_path / "nowhere")
    assert ask(policy).version == 2  # the one before is still served
    server.loses = True
    with pytest.raises(AdapterError, match="is not among them"):
        policy.refresh(4, tmp_path)


def test_a_server_that_is_away_is_the_policys_failure() -> None:
    with pytest.raises(PolicyError, match="did not answer"):
        ask(EndpointPolicy(EndpointConfig("http://127.0.0.1:9/v1", "base", timeout_seconds=2), [END]))
    with pytest.raises(ConfigError, match="must end in /v1"):
        EndpointConfig("http://127.0.0.1:9", "base")


def test_recorded_episodes_are_played_again_and_changes_noticed(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        run_id = store.create_run("r", {})

        def again(policy: Any, seed: int, temperature: float = 1.0, **options: Any):
            tasks = [countdown(seed, **options)]
            config = CollectConfig(max_action_tokens=40, retries=0, sampling=Sampling(temperature))
            settings: dict[str, Any] = {"run_id": run_id, "group_size": 3, "make": make_countdown, "purpose": "eval"}
            return asyncio.run(collect(store, policy, RENDERER, tasks, config, **settings))

        (group,) = again(Repeater(), 1).group_ids
        names = [row.trajectory_id for row in store.trajectories(group)]
        replayed = again(ReplayPolicy(store, names, RENDERER.stop_ids, version=1), 1)
        pairs = zip(store.load_group(group).trajectories, store.load_group(replayed.group_ids[0]).trajectories, strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.behaviour, other.behaviour)
        with pytest.raises(ConfigError, match="of another distribution"):
            again(ReplayPolicy(store, names, RENDERER.stop_ids, version=3), 1, 0.5)
        changed = again(ReplayPolicy(store, names, RENDERER.stop_ids, version=2), 1, noisy=True)
        assert changed.progress.failures == {"policy_error": 3}


def test_opening_a_policy_from_settings(server: Server, tmp_path: Path) -> None:
    import torch
    import transformers

    from longstraw_agents.policies.local import LocalPolicy
    from longstraw_agents.policies.opening import PolicySettings, open_policy
    from longstraw_agents.trainer.models import LoraSettings, add_adapter, save_adapter

    torch.manual_seed(0)
    size = dict(vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)).eval()
    assert isinstance(open_policy(PolicySettings(), plain, [END], version=3, adapter=None), LocalPolicy)
    served = PolicySettings(kind="server", url=server.url, model="base")
    with pytest.raises(ConfigError, match="the model has none"):
        open_policy(served, plain, [END], version=0, adapter=None)
    model = add_adapter(plain, LoraSettings())
    policy = open_policy(served, model, [END], version=0, adapter=None)
    assert ask(policy).version == 0 and server.requests[-1]["model"] == "base"  # type: ignore[arg-type]
    policy.pause()
    policy.refresh(1, save_adapter(model, tmp_path))
    assert ask(policy).version == 1 and server.requests[-1]["model"] == "longstraw-1"  # type: ignore[arg-type]
    policy.close()
    for wrong in ({"kind": "server"}, {"kind": "oracle"}):
        with pytest.raises(ConfigError):
            PolicySettings(**wrong)  # type: ignore[arg-type]
