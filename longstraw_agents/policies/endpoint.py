"""Policies behind an OpenAI-compatible completions endpoint, through the official client.

Idea: the prompt goes as token ids. A server that answers with token ids (vLLM's `return_token_ids`) loses nothing. One that
answers with text alone loses two things: which ids were sampled (other ids may spell the same text) and the log-probability of
the token that ended the action. Such answers are refused, or, where `without_ids="reencode"` says so, encoded from the text for
evaluation; `exact` is then False and training groups are not collected with it.

Vocabulary
    adapter    LoRA weights that a vLLM server holds beside its model, one name per policy version
    processed  log-probabilities after temperature and top-p; raw ones are before, and differ where either is not 1
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from longstraw_agents.errors import AdapterError, ConfigError, PolicyError
from longstraw_agents.policies.sampling import Finish, Sample, SampleRequest, Sampling
from longstraw_agents.redaction import SHORTEST, hide


@dataclass(frozen=True)
class EndpointConfig:
    """base_url ends in /v1. processed_logprobs: the server reports log-probabilities after temperature and top-p (vLLM:
    --logprobs-mode processed_logprobs); without it only temperature 1 and top_p 1, or greedy, are accepted. concurrency: calls
    at once."""

    base_url: str
    model: str
    api_key: str = "none"
    processed_logprobs: bool = False
    without_ids: Literal["refuse", "reencode"] = "refuse"
    timeout_seconds: float = 600.0
    concurrency: int = 64

    def __post_init__(self) -> None:
        if not self.base_url.rstrip("/").endswith("/v1"):
            raise ConfigError(f"base_url must end in /v1, got {self.base_url!r}")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.without_ids not in ("refuse", "reencode"):
            raise ConfigError(f'without_ids must be "refuse" or "reencode", got {self.without_ids!r}')
        if len(self.api_key) >= SHORTEST:  # shorter ones are placeholders, such as "none"
            hide(self.api_key)


class EndpointPolicy:
    """A Policy over one model name of an endpoint."""

    def __init__(
        self,
        config: EndpointConfig,
        stop_ids: Iterable[int],
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        version: int = 0,
    ) -> None:
        """stop_ids: tokens that end an action. encode: text to ids, needed for without_ids="reencode" alone."""
        from openai import OpenAI

        if config.without_ids == "reencode" and encode is None:
            raise ConfigError('without_ids="reencode" needs `encode`, the model\'s own tokenizer')
        self.config, self.version, self.model = config, version, config.model
        self.exact = config.without_ids == "refuse"
        self._stop_ids = sorted(stop_ids)
        self._encode = encode
        self._sampled = 0
        # The plain client in threads: the asynchronous one belongs to a single event loop, and every collection has its own.
        self._client = OpenAI(base_url=config.base_url, api_key=config.api_key, timeout=config.timeout_seconds, max_retries=2)
        self._threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="longstraw-endpoint")

    async def sample(self, request: SampleRequest) -> Sample:
        """See Policy.sample. Raises ConfigError for a sampling whose log-probabilities the server does not report."""
        require_reported(request.sampling, processed=self.config.processed_logprobs)
        version, model = self.version, self.model
        try:
            call = partial(self._client.completions.create, **self._arguments(request, model))
            response = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except Exception as error:  # the client has a class for each status; all of them mean the same here
            raise PolicyError(f"{self.config.base_url} did not answer: {type(error).__name__}: {error}") from error
        if response.model != model:
            raise AdapterError(f"asked {self.config.base_url} for {model!r} and was served {response.model!r}")
        choice = response.choices[0]
        finish: Finish = "stop" if choice.finish_reason == "stop" else "length"
        ids, behaviour = self._tokens(choice, finish)
        if request.sampling.temperature == 0.0:
            behaviour = np.zeros(len(ids), np.float32)
        self._sampled += len(ids)
        return Sample(ids, behaviour, finish, version)

    async def close_session(self, session: str) -> None:
        """The server keeps its own cache of prefixes."""

    def report(self) -> dict[str, int]:
        """Tokens sampled."""
        return {"sampled": self._sampled}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._threads.shutdown(cancel_futures=True)

    def _arguments(self, request: SampleRequest, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": request.tokens.tolist(),
            "max_tokens": request.max_new_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": request.seed % 2**31,
            "logprobs": 1,
            # A server takes whatever is not said here from the model's generation_config.json.
            "extra_body": {
                "return_token_ids": True,
                "stop_token_ids": self._stop_ids,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "skip_special_tokens": False,
            },
        }

    def _tokens(self, choice: Any, finish: Finish) -> tuple[Any, Any]:
        reported = [value for value in (choice.logprobs.token_logprobs if choice.logprobs else [])]
        ids = (choice.model_extra or {}).get("token_ids")
        if ids is None:
            if self._encode is None:
                raise PolicyError(
                    f"{self.config.base_url} gives no token ids, so what was sampled is not known; serve the model with vLLM, "
                    'or set without_ids="reencode" for evaluation'
                )
            ids = list(self._encode(choice.text)) + (self._stop_ids[:1] if finish == "stop" else [])
            reported = reported if len(reported) == len(ids) else [0.0] * len(ids)
        if len(reported) != len(ids):
            raise PolicyError(f"{self.config.base_url} gave {len(ids)} tokens and {len(reported)} log-probabilities")
        return np.array(ids, np.int32), np.array(reported, np.float32)


class VLLMServerPolicy(EndpointPolicy):
    """A Policy over a vLLM server that swaps adapters per version.

    The server needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and must see the adapter's folder. One that shares
    its GPU with the trainer sleeps meanwhile; it needs --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1.
    """

    def __init__(
        self,
        config: EndpointConfig,
        stop_ids: Iterable[int],
        *,
        version: int = 0,
        name: str = "longstraw",
        sleeping: bool = False,
    ) -> None:
        """name: what the adapters are called by, with the version; two runs on one server need two names. sleeping: the server is
        put to sleep by `pause` and woken by `refresh`."""
        super().__init__(config, stop_ids, version=version)
        self._name, self._sleeping = name, sleeping
        self._asleep = False

    def refresh(self, version: int, adapter: Path | None = None) -> None:
        """Load the adapter (a folder that PEFT wrote) as `version`, check that it is listed, and sample from it from now on.

        The one before is unloaded: no sample may be under way. Raises AdapterError where the server does not take it, PolicyError
        where it sleeps on.
        """
        if self._asleep:
            self._turn(asleep=False)
        before, name = self.model, self.config.model
        if adapter is not None:
            name, folder = f"{self._name}-{version}", str(Path(adapter).resolve())
            self._post("load_lora_adapter", {"lora_name": name, "lora_path": folder})
            served = {model.id: model.model_extra or {} for model in self._client.models.list()}
            if served.get(name, {}).get("root") != folder:
                raise AdapterError(f"the server lists {sorted(served)}; {name} from {folder} is not among them")
        self.model, self.version = name, version
        if before not in (self.config.model, name):
            self._post("unload_lora_adapter", {"lora_name": before})

    async def sample(self, request: SampleRequest) -> Sample:
        """See Policy.sample."""
        if self._asleep:
            raise PolicyError("the server is asleep while the trainer works; refresh wakes it")
        return await super().sample(request)

    def pause(self) -> None:
        """Put the server to sleep, where it shall; else it keeps its memory: it is another machine's, or another GPU's."""
        if self._sleeping and not self._asleep:
            self._turn(asleep=True)

    def _turn(self, *, asleep: bool) -> None:
        """Put the server to sleep or wake it, and see that it is so."""
        root = self.config.base_url.rstrip("/").removesuffix("/v1")
        try:
            self._client.post(f"{root}/{'sleep?level=1' if asleep else 'wake_up'}", cast_to=object)
            found: Any = self._client.get(f"{root}/is_sleeping", cast_to=object)
        except Exception as error:  # the client has a class for each status; all of them mean the same here
            raise PolicyError(
                f"{root} can't be put to sleep or woken: {type(error).__name__}: {error}; start it with --enable-sleep-mode and "
                "VLLM_SERVER_DEV_MODE=1"
            ) from error
        if found != {"is_sleeping": asleep}:
            raise PolicyError(f"{root} did not {'fall asleep' if asleep else 'wake up'}: it says {found}")
        self._asleep = asleep

    def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            self._client.post(f"/{path}", body=body, cast_to=str)
        except Exception as error:
            raise AdapterError(f"{self.config.base_url}/{path} refused {body}: {type(error).__name__}: {error}") from error


def require_reported(sampling: Sampling, *, processed: bool) -> None:
    """Raises ConfigError where raw log-probabilities would not be those of the sampled distribution."""
    if not processed and sampling.temperature != 0.0 and (sampling.temperature, sampling.top_p) != (1.0, 1.0):
        raise ConfigError(
            f"temperature {sampling.temperature} and top_p {sampling.top_p} need log-probabilities of the changed distribution; "
            "start the server with --logprobs-mode processed_logprobs and set processed_logprobs, or use 1 and 1"
        )
