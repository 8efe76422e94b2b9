"""The sampler gives its memory up while the trainer works and comes back with the new adapter: fake engines, and the loop."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import letters
import numpy as np
import pytest

from longstraw_agents import loop as loop_module
from longstraw_agents.errors import AdapterError, PolicyError
from longstraw_agents.loop import Loop, RunConfig
from longstraw_agents.phases import Phases
from longstraw_agents.policies import Sample, SampleRequest
from longstraw_agents.policies.endpoint import EndpointConfig, VLLMServerPolicy
from longstraw_agents.policies.local import LocalPolicy
from longstraw_agents.policies.vllm import VLLMConfig, VLLMPolicy
from tests.test_endpoint import END, Server

PROMPT = np.array([1, 2, 3], np.int32)


@dataclass(frozen=True)
class Lora:
    lora_name: str
    lora_int_id: int
    lora_path: str


class Engine:
    """Stands in for vLLM's engine: says what it was asked, in order. `stubborn`: it neither sleeps nor wakes."""

    def __init__(self, arguments: Any) -> None:
        self.arguments, self.calls, self.asleep, self.stubborn = arguments, [], False, False
        self.held: set[int] = set()
        self.hold: asyncio.Event | None = None

    @classmethod
    def from_engine_args(cls, arguments: Any) -> Engine:
        return cls(arguments)

    async def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")
        self.asleep = not self.stubborn

    async def wake_up(self) -> None:
        self.calls.append("wake up")
        self.asleep = self.stubborn

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def add_lora(self, request: Lora) -> bool:
        assert not self.asleep
        self.calls.append(f"add {request.lora_name}")
        self.held.add(request.lora_int_id)
        return Path(request.lora_path).exists()

    async def remove_lora(self, number: int) -> None:
        self.held.discard(number)

    async def list_loras(self) -> set[int]:
        return self.held

    async def generate(self, prompt: Any, parameters: Any, name: str, lora_request: Any) -> AsyncIterator[Any]:
        assert not self.asleep
        while self.hold is not None:
            await asyncio.sleep(0.01)
        row = types.SimpleNamespace(token_ids=[7, END], logprobs=[{7: _Logp(-1.0)}, {END: _Logp(-2.0)}], finish_reason="stop")
        yield types.SimpleNamespace(lora_request=lora_request, outputs=[row])

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@dataclass(frozen=True)
class _Logp:
    logprob: float


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in vLLM's place, as far as the policy uses them."""
    keywords = lambda **given: types.SimpleNamespace(**given)
    for name, contents in {
        "vllm": {"AsyncEngineArgs": keywords, "SamplingParams": keywords},
        "vllm.v1.engine.async_llm": {"AsyncLLM": Engine},
        "vllm.sampling_params": {"RequestOutputKind": types.SimpleNamespace(FINAL_ONLY="final")},
        "vllm.lora.request": {"LoRARequest": Lora},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        for parent in ("vllm.v1", "vllm.v1.engine", "vllm.lora"):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))


@pytest.fixture
def policy(vllm: None) -> Iterator[VLLMPolicy]:
    policy = VLLMPolicy("base", [END], config=VLLMConfig(sleeping=True))
    yield policy
    policy.close()


def ask(policy: Any) -> Sample:
    return asyncio.run(policy.sample(SampleRequest("s", PROMPT, 4, 0)))


def test_the_engine_sleeps_is_not_asked_and_wakes_with_the_new_adapter(policy: VLLMPolicy, tmp_path: Path) -> None:
    engine: Engine = policy._engine
    policy.refresh(1, tmp_path)
    assert ask(policy).version == 1
    policy.pause()
    policy.pause()  # once is enough
    with pytest.raises(PolicyError, match="asleep"):
        ask(policy)
    policy.refresh(2, tmp_path)
    assert engine.calls == ["add version-1", "sleep 1", "wake up", "add version-2"] and engine.held == {3}
    got = ask(policy)
    assert got.version == 2 and got.ids.tolist() == [7, END] and got.behaviour.tolist() == [-1.0, -2.0]
    policy.pause()
    with pytest.raises(AdapterError):
        policy.refresh(3, tmp_path / "nowhere")
    assert policy.version == 2 and not engine.asleep


def test_an_engine_that_does_not_do_as_it_is_told_is_noticed(policy: VLLMPolicy, tmp_path: Path) -> None:
    engine: Engine = policy._engine
    engine.stubborn = True
    with pytest.raises(PolicyError, match="did not fall asleep"):
        policy.pause()
    engine.stubborn = False
    policy.pause()
    engine.stubborn = True
    with pytest.raises(PolicyError, match="did not wake up"):
        policy.refresh(1, tmp_path)


def test_nothing_is_put_to_sleep_while_it_samples(policy: VLLMPolicy) -> None:
    engine: Engine = policy._engine

    async def during() -> Sample:
        engine.hold = asyncio.Event()
        sampling = asyncio.create_task(policy.sample(SampleRequest("s", PROMPT, 4, 0)))
        await asyncio.sleep(0.05)
        with pytest.raises(PolicyError, match="being sampled"):
            policy.pause()
        engine.hold = None
        return await sampling

    assert asyncio.run(during()).version == 0
    policy.pause()
    assert engine.asleep


def test_an_engine_that_shall_not_sleep_keeps_awake(vllm: None) -> None:
    policy = VLLMPolicy("base", [END])
    policy.pause()
    assert ask(policy).version == 0 and not policy._engine.calls
    policy.close()


def test_a_server_sleeps_and_wakes_before_it_takes_the_adapter(tmp_path: Path) -> None:
    server = Server()
    try:
        policy = VLLMServerPolicy(EndpointConfig(server.url, "base"), [END], sleeping=True)
        policy.refresh(1, tmp_path)
        policy.pause()
        assert server.asleep
        with pytest.raises(PolicyError, match="asleep"):
            ask(policy)
        policy.refresh(2, tmp_path)
        assert not server.asleep and ask(policy).version == 2 and list(server.adapters) == ["longstraw-2"]
        server.stubborn = True
        with pytest.raises(PolicyError, match="did not fall asleep"):
            policy.pause()
        server.dev_mode = False
        with pytest.raises(PolicyError, match="VLLM_SERVER_DEV_MODE=1"):
            policy.pause()
    finally:
        server.close()


class Sleeper(LocalPolicy):
    """A local policy that notes when it is told to give its memory up, and fails when it is asked meanwhile."""

    asleep = False

    async def sample(self, request: SampleRequest) -> Sample:
        assert not self.asleep
        return await super().sample(request)

    def pause(self) -> None:
        super().pause()
        self.asleep = True

    def refresh(self, version: int, adapter: Path | None = None) -> None:
        super().refresh(version, adapter)
        self.asleep = False


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    def open_policy(settings: Any, model: Any, stop_ids: Any, *, version: int, **rest: Any) -> Sleeper:
        return Sleeper(model, stop_ids, version=version)

    monkeypatch.setattr(loop_module, "open_policy", open_policy)
    return letters.letters_config(letters.make_model(tmp_path / "model"), tmp_path / "run")


def test_the_loop_trains_while_the_policy_sleeps_and_the_receipt_has_each_phases_memory(config: RunConfig) -> None:
    with Loop(config) as loop:
        update = loop.trainer.update
        asleep: list[bool] = []

        def failing(groups: Any) -> Any:
            asleep.append(loop.policy.asleep)  # type: ignore[attr-defined]
            raise RuntimeError("out of memory")

        loop.collect()
        loop.trainer.update = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError):
            loop.train()
        assert asleep == [True] and not loop.policy.asleep  # type: ignore[attr-defined]
        loop.trainer.update = update  # type: ignore[method-assign]
        first = loop.train()
        loop.collect()
        second = loop.train()
    assert {"load", "collect", "read", "pause", "train", "wake"} <= first["run_phases"].keys()
    assert {"wake", "commit", "collect", "read", "pause", "train"} == second["run_phases"].keys()
    assert all(phase["peak_mib"] > 0 for phase in second["run_phases"].values())


def test_what_child_processes_hold_is_seen() -> None:
    import subprocess

    phases = Phases()
    with phases("alone"):
        pass
    held = "import sys; held = bytearray(b'x' * 50_000_000); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        with phases("with a child"):
            pass
    finally:
        child.communicate(b"")
    grown = phases.by_name["with a child"].children_mib - phases.by_name["alone"].children_mib
    assert grown > 45 and phases.take().keys() == {"alone", "with a child"} and phases.take() == {}
