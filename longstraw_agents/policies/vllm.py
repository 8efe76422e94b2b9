"""Sampling from vLLM in this process: token ids in, token ids and log-probabilities out, an adapter per policy version.

Idea: vLLM batches, caches prefixes and schedules; this module hands it ids and takes ids. Log-probabilities are asked for after
temperature and top-p, so they are of the sampled distribution. A new version is a new adapter under a new number, which comes
back with every result and is compared: an old adapter can't be sampled from unnoticed. On one GPU with the trainer the engine
is put to sleep while training and woken with the next adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longstraw_agents.errors import AdapterError, ConfigError, PolicyError
from longstraw_agents.policies.sampling import Finish, Sample, SampleRequest


@dataclass(frozen=True)
class VLLMConfig:
    """dtype of the model; max_tokens of a trajectory; memory_share of the GPU (None: vLLM's own); max_rank of adapters;
    sleeping: the engine can be put to sleep (CUDA only)."""

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
    """A Policy over an engine of vLLM's own asynchronous kind. Make it inside the running event loop; close it at the end."""

    def __init__(
        self, model: str | Path, stop_ids: Iterable[int], *, version: int = 0, config: VLLMConfig = VLLMConfig()
    ) -> None:
        """model: the base model's folder. Without `serve` the base model itself is sampled."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        extra = {} if config.memory_share is None else {"gpu_memory_utilization": config.memory_share}
        arguments = AsyncEngineArgs(
            model=str(model),
            dtype=config.dtype,
            max_model_len=config.max_tokens,
            enable_lora=True,
            max_lora_rank=config.max_rank,
            max_loras=1,
            logprobs_mode="processed_logprobs",
            enable_sleep_mode=config.sleeping,
            generation_config="vllm",  # else the model's own file changes the sampling
            **extra,
        )
        self.version, self.config = version, config
        self._engine = AsyncLLM.from_engine_args(arguments)
        self._stop_ids = sorted(stop_ids)
        self._adapter: Any = None
        self._numbers = itertools.count()

    async def serve(self, version: int, adapter: str | Path) -> None:
        """Load the adapter (a folder that PEFT wrote) and sample from it from now on.

        No sample may be under way. Raises AdapterError where vLLM does not take it.
        """
        from vllm.lora.request import LoRARequest

        folder = str(Path(adapter).resolve())
        request = LoRARequest(f"version-{version}", version + 1, folder)  # vLLM's numbers begin at 1
        try:
            taken = await self._engine.add_lora(request)
        except Exception as error:
            raise AdapterError(f"vLLM did not take the adapter in {folder}: {type(error).__name__}: {error}") from error
        if not taken or request.lora_int_id not in await self._engine.list_loras():
            raise AdapterError(f"vLLM did not take the adapter in {folder}; its rank must be at most {self.config.max_rank}")
        if self._adapter is not None:
            await self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapter, self.version = request, version

    async def sample(self, request: SampleRequest) -> Sample:
        """See Policy.sample."""
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
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def close_session(self, session: str) -> None:
        """vLLM keeps its own cache of prefixes."""

    async def sleep(self) -> None:
        """Give the GPU's memory to the trainer: weights go to the host, the cache is dropped."""
        if not self.config.sleeping:
            raise ConfigError("the engine was started without sleeping; set VLLMConfig(sleeping=True)")
        await self._engine.sleep(level=1)

    async def wake(self) -> None:
        """Take the memory again. `serve` the new adapter before the next sample."""
        await self._engine.wake_up()

    def close(self) -> None:
        """End the engine's process."""
        self._engine.shutdown()
