"""vLLM itself, in process and as a server, on SmolLM2: its log-probabilities are transformers' own, adapters change them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from longstraw_agents.errors import AdapterError, ConfigError, PolicyError
from longstraw_agents.policies import Sample, SampleRequest, Sampling
from longstraw_agents.policies.endpoint import EndpointConfig, VLLMServerPolicy
from longstraw_agents.policies.vllm import VLLMConfig, VLLMPolicy
from longstraw_agents.trainer.models import SMOLLM2, ModelConfig, cache_folder, load_model, save_adapter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.smollm2,
    pytest.mark.skipif(not (cache_folder() / SMOLLM2 / "config.json").exists(), reason="SmolLM2 is not in the cache"),
]
END = 2
PROMPT = np.array([1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198], np.int32)


@pytest.fixture(scope="module")
def model() -> Any:
    """The trainer's model, with an adapter that is not zero."""
    model, _ = load_model(ModelConfig(dtype="float32"))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


@pytest.fixture(scope="module")
def adapter(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMPolicy]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    policy = VLLMPolicy(cache_folder() / SMOLLM2, [END], config=VLLMConfig(dtype="float32", max_tokens=512, sleeping=True))
    yield policy
    policy.close()


def sample(policy: Any, number: int = 4, **options: Any) -> list[Sample]:
    async def together() -> list[Sample]:
        requests = [SampleRequest(f"s{seed}", PROMPT, 24, seed, **options) for seed in range(number)]
        return await asyncio.gather(*(policy.sample(request) for request in requests))

    return asyncio.run(together())


def own(model: Any, got: Sample, temperature: float = 1.0, adapted: bool = True) -> np.ndarray:
    """Log-probabilities of the sampled tokens by one plain forward of transformers."""
    ids = torch.from_numpy(np.concatenate([PROMPT, got.ids]).astype(np.int64))[None]
    with torch.no_grad():
        if adapted:
            logits = model(ids).logits
        else:
            with model.disable_adapter():
                logits = model(ids).logits
    logp = torch.log_softmax(logits[0].float() / temperature, -1)
    return logp[len(PROMPT) - 1 : -1].gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


def test_in_process_adapters_and_sampling(engine: VLLMPolicy, model: Any, adapter: Path, tmp_path: Path) -> None:
    for got in sample(engine):
        np.testing.assert_allclose(got.behaviour, own(model, got, adapted=False), atol=1e-3)
        assert got.version == 0 and (got.ids[-1] == END) == (got.finish == "stop") and END not in got.ids[:-1]
    engine.refresh(7, adapter)
    for got in sample(engine):
        np.testing.assert_allclose(got.behaviour, own(model, got), atol=1e-3)
        assert got.version == 7 and np.abs(own(model, got) - own(model, got, adapted=False)).max() > 0.01
    for got in sample(engine, sampling=Sampling(temperature=0.6)):
        np.testing.assert_allclose(got.behaviour, own(model, got, temperature=0.6), atol=2e-3)
    for got in sample(engine, sampling=Sampling(top_p=0.5)):
        assert (got.behaviour >= own(model, got) - 1e-3).all()  # renormalized over fewer tokens
    (greedy,) = sample(engine, 1, sampling=Sampling(temperature=0.0))
    assert not greedy.behaviour.any()
    first, again = sample(engine), sample(engine)
    assert [got.ids.tolist() for got in first] == [got.ids.tolist() for got in again]
    with pytest.raises(AdapterError, match="did not take"):
        engine.refresh(8, tmp_path / "nowhere")
    engine.refresh(9, None)
    for got in sample(engine, 1):
        np.testing.assert_allclose(got.behaviour, own(model, got, adapted=False), atol=1e-3)


def test_the_engine_sleeps_and_wakes_with_the_new_adapter(engine: VLLMPolicy, model: Any, adapter: Path) -> None:
    """A CPU's engine gives no memory up, but it stops, and says that it sleeps."""
    engine.refresh(20)
    engine.pause()
    with pytest.raises(PolicyError, match="asleep"):
        sample(engine, 1)
    engine.refresh(21, adapter)
    for got in sample(engine, 2):
        np.testing.assert_allclose(got.behaviour, own(model, got), atol=1e-3)
        assert got.version == 21


def test_bad_settings_are_refused() -> None:
    for options in ({"dtype": "int8"}, {"max_tokens": 1}, {"memory_share": 1.5}):
        with pytest.raises(ConfigError):
            VLLMConfig(**options)  # type: ignore[arg-type]


def test_a_server_swaps_adapters(model: Any, adapter: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_LOGGING_LEVEL": "WARNING"}
    settings["VLLM_SERVER_DEV_MODE"] = "1"
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(cache_folder() / SMOLLM2), "--served-model-name", "base"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--enable-lora"]
    command += ["--max-lora-rank", "8", "--logprobs-mode", "processed_logprobs"]
    server = subprocess.Popen(command, env={**os.environ, **settings}, start_new_session=True)
    try:
        config = EndpointConfig(f"http://127.0.0.1:{port}/v1", "base", processed_logprobs=True)
        policy = VLLMServerPolicy(config, [END], sleeping=True)
        _await_listening(port, server)
        for got in sample(policy):
            np.testing.assert_allclose(got.behaviour, own(model, got, adapted=False), atol=1e-3)
        policy.refresh(1, adapter)
        for got in sample(policy, sampling=Sampling(temperature=0.7)):
            np.testing.assert_allclose(got.behaviour, own(model, got, temperature=0.7), atol=2e-3)
            assert got.version == 1 and (got.ids[-1] == END) == (got.finish == "stop")
        policy.pause()
        policy.refresh(2, adapter)
        for got in sample(policy):
            np.testing.assert_allclose(got.behaviour, own(model, got), atol=1e-3)
        with pytest.raises(AdapterError):
            policy.refresh(3, adapter / "nowhere")
    finally:
        server.terminate()
        server.wait(60)


def _await_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended before it listened"
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(1)
    raise AssertionError("the server did not begin to listen")
