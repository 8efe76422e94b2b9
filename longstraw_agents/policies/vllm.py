"""Sampling from vLLM in this process: token ids in, token ids and log-probabilities out, an adapter per policy version.

Idea: vLLM batches, caches prefixes and schedules; this module hands it ids and takes ids. Log-probabilities are asked for after
temperature and top-p, so they are of the sampled distribution. A new version is a new adapter under a new number, which comes
back with every result and is compared: an old adapter can't be sampled from unnoticed. On one GPU with the trainer the engine
is put to sleep while training and woken with the next adapter.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longstraw_agents.errors import AdapterError, ConfigError, PolicyError
from longstraw_agents.policies.sampling import Finish, Sample, SampleRequest


@dataclass(frozen=True)
class VLLMConfig:
    """dtype of the model; max_tokens of a trajectory; memory_share of the GPU (None: vLLM's own); max_rank of adapters;
    sleeping: the engine is put to sleep while the trainer works; on a CPU it gives up no memory then, vLLM can't there."""

    dtype: str = "bfloat16"
    max_tokens: int = 8192
    max_rank: int = 16
    memory_share: float | None = None
    sleeping: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}")
        if self.max_tokens < 2 or self.max_rank < 1:
            raise ConfigError(f"max_tokens must be at least 2 and max_rank 1, got {self.max_tokens} and {self.max_rank}")
        if self.memory_share is not None and not 0 < self.memory_share < 1:
            raise ConfigError(f"memory_share must lie between 0 and 1, got {self.memory_share}")


class VLLMPolicy:
    """A Policy over an engine of vLLM's own asynchronous kind. The engine has an event loop and a thread of its own, so that it
    outlives the loops of those who sample."""

    def __init__(
        self,
        model: str | Path,
        stop_ids: Iterable[int],
        *,
        version: int = 0,
        config: VLLMConfig = VLLMConfig(),
        ignore_end: bool = False,
    ) -> None:
        """model: the base model's folder; until `refresh` names an adapter it is sampled as it is. ignore_end: the model's own
        end token does not end an action unless it is among `stop_ids`."""
        self._ignore_end = ignore_end
        self.version, self.config = version, config
        self._stop_ids = sorted(stop_ids)
        self._adapter: Any = None
        self._asleep = False
        self._sampled = self._under_way = 0
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="longstraw-vllm", daemon=True)
        self._thread.start()
        try:
            self._engine = self._wait(self._start(str(model)))
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    async def _start(self, model: str) -> Any:
        import torch
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        extra = {} if self.config.memory_share is None else {"gpu_memory_utilization": self.config.memory_share}
        arguments = AsyncEngineArgs(
            model=model,
            dtype=self.config.dtype,
            max_model_len=self.config.max_tokens,
            enable_lora=True,
            max_lora_rank=self.config.max_rank,
            max_loras=1,
            logprobs_mode="processed_logprobs",
            enable_sleep_mode=self.config.sleeping and torch.cuda.is_available(),
            enforce_eager=not torch.cuda.is_available(),  # on a CPU compiling takes longer than it saves
            generation_config="vllm",  # else the model's own file changes the sampling
            **extra,
        )
        return AsyncLLM.from_engine_args(arguments)

    async def sample(self, request: SampleRequest) -> Sample:
        """See Policy.sample."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._sample(request), self._loop))

    async def _sample(self, request: SampleRequest) -> Sample:
        if self._asleep:
            raise PolicyError("the engine is asleep while the trainer works; refresh wakes it")
        self._under_way += 1
        try:
            return await self._generate(request)
        finally:
            self._under_way -= 1

    async def _generate(self, request: SampleRequest) -> Sample:
        version, adapter = self.version, self._adapter
        results = self._engine.generate(
            {"prompt_token_ids": request.tokens.tolist()},
            self._parameters(request),
            f"{request.session}-{next(self._numbers)}",
            lora_request=adapter,
        )
        try:
            (output,) = [result async for result in results]  # FINAL_ONLY: there is one
        except Exception as error:
            raise PolicyError(f"vLLM failed: {type(error).__name__}: {error}") from error
        if output.lora_request != adapter:
            raise AdapterError(f"asked vLLM for {adapter} and was served {output.lora_request}")
        result = output.outputs[0]
        ids = np.array(result.token_ids, np.int32)
        logp = [row[int(token)].logprob for token, row in zip(ids, result.logprobs, strict=True)]
        if request.sampling.temperature == 0.0:
            logp = [0.0] * len(ids)
        finish: Finish = "stop" if result.finish_reason == "stop" else "length"
        self._sampled += len(ids)
        return Sample(ids, np.array(logp, np.float32), finish, version)

    def _parameters(self, request: SampleRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            stop_token_ids=self._stop_ids,
            ignore_eos=self._ignore_end,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def close_session(self, session: str) -> None:
        """vLLM keeps its own cache of prefixes."""

    def refresh(self, version: int, adapter: Path | None = None) -> None:
        """Wake up, load the adapter (a folder that PEFT wrote) and sample from it from now on.

        No sample may be under way. Raises AdapterError where vLLM does not take the adapter, PolicyError where it sleeps on.
        """
        if self._asleep:
            _empty_cache()
            self._wait(self._turn(asleep=False))
        self._adapter = self._wait(self._swap(version, adapter))
        self.version = version

    async def _swap(self, version: int, adapter: Path | None) -> Any:
        from vllm.lora.request import LoRARequest

        if self._adapter is not None:
            await self._engine.remove_lora(self._adapter.lora_int_id)
        if adapter is None:
            return None
        folder = str(Path(adapter).resolve())
        request = LoRARequest(f"version-{version}", version + 1, folder)  # vLLM's numbers begin at 1
        try:
            taken = await self._engine.add_lora(request)
        except Exception as error:
            raise AdapterError(f"vLLM did not take the adapter in {folder}: {type(error).__name__}: {error}") from error
        if not taken or request.lora_int_id not in await self._engine.list_loras():
            raise AdapterError(f"vLLM did not take the adapter in {folder}; its rank must be at most {self.config.max_rank}")
        return request

    def pause(self) -> None:
        """Give the GPU's memory to the trainer, where the engine shall sleep: weights go to the host, its cache is dropped."""
        if self._under_way:
            raise PolicyError(f"{self._under_way} actions are being sampled; await all samples before an update")
        if self.config.sleeping and not self._asleep:
            self._wait(self._turn(asleep=True))

    async def _turn(self, *, asleep: bool) -> None:
        """Put the engine to sleep or wake it, and see that it is so."""
        await (self._engine.sleep(level=1) if asleep else self._engine.wake_up())
        if await self._engine.is_sleeping() != asleep:
            raise PolicyError(f"vLLM did not {'fall asleep' if asleep else 'wake up'}")
        self._asleep = asleep

    def report(self) -> dict[str, int]:
        """Tokens sampled."""
        return {"sampled": self._sampled}

    def close(self) -> None:
        """End the engine's process and the thread."""
        self._loop.call_soon_threadsafe(self._engine.shutdown)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _empty_cache() -> None:
    """Let torch give back what it keeps for the trainer: the engine wakes in the same memory."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
