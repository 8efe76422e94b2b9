"""The gradient of a prefix tree against full-sequence autograd through the untouched model, and the refusals of replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longstraw_agents.errors import ModelError, NonFiniteError, StaleStateError, TokenError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import attention, comparison, conventional, kernels, state
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.types import StopReason, Trajectory
from tests import models as zoo


def trajectory(name: str, tokens: list[int], mask: np.ndarray) -> Trajectory:
    T = len(tokens)
    return Trajectory(
        name, np.asarray(tokens, np.int32), mask, np.where(mask, -1.0, np.nan).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32), (T,), (0.0,), 1.0, StopReason.ANSWERED,
    )  # fmt: skip


def deep_group(vocabulary: int, seed: int = 0) -> list[Trajectory]:
    """Six trajectories that part at three depths: unequal branches, shared sampled tokens, one ending inside another."""
    random = np.random.default_rng(seed)
    new = lambda count: random.integers(3, vocabulary, count).tolist()
    root, first, second = new(101), new(70), new(33)
    paths = [root + first + new(40), root + first + new(3), root + first + second + new(90), root + first + second + new(2)]
    paths += [root + new(75), root + first + second]
    shared = random.random(400) < 0.3
    masks = [shared[: len(path)].copy() for path in paths]
    for mask in masks:
        mask[0], mask[-2:] = False, True
    return [trajectory(str(i), path, mask) for i, (path, mask) in enumerate(zip(paths, masks, strict=True))]


def zoo_attention(model: torch.nn.Module, implementation: str) -> None:
    """Choose the untouched model's own attention: its default "sdpa" keeps float64, "eager" computes the softmax in float32."""
    model.config.get_text_config()._attn_implementation = implementation


def coefficients(count: int) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def difference(model: torch.nn.Module, config: ReplayConfig, *, score: bool = False) -> tuple[float, float]:
    """Worst parameter's relative difference of our gradient from conventional training's, and of the log-probabilities."""
    group = deep_group(model.config.get_text_config().vocab_size)
    tree = segment(group)
    c = coefficients(len(tree.entry_node))
    _, logp = conventional.backward(model, group, lambda values: (c * values).sum())
    reference = comparison.gradients(model)
    model.zero_grad()
    replay = Engine(model, config).open(tree)
    if score:
        assert torch.allclose(replay.score().logp, logp, atol=1e-9, rtol=0)
    scores = replay.backward(c)
    ours = comparison.gradients(model)
    model.zero_grad()
    return comparison.compare(ours, reference).worst, float((scores.logp - logp).abs().max())


@pytest.mark.parametrize("training", ["full", "lora"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradient_of_a_deep_tree_equals_full_sequence_autograd(name: str, training: str) -> None:
    model = zoo.build(name, training=training, dtype=torch.float64)
    with lifted():
        for config in (ReplayConfig(chunk=10**6, pack=1), ReplayConfig(chunk=50, pack=200), ReplayConfig(chunk=17, pack=1)):
            worst, logp = difference(model, config, score=config.chunk == 50)
            assert worst < 1e-10 and logp < 1e-10
    zoo_attention(model, "sdpa")
    worst, _ = difference(model, ReplayConfig(chunk=64))  # untouched: norms and rotary embeddings up-cast to float32 inside
    assert worst < 1e-6


def test_detached_is_biased_and_does_not_depend_on_chunks() -> None:
    model = zoo.build("llama", dtype=torch.float64)
    with lifted():
        results = [difference(model, ReplayConfig("detached", chunk=chunk, pack=1))[0] for chunk in (10**6, 17)]
    assert results[0] > 1e-2 and abs(results[0] - results[1]) < 1e-10


def test_the_shared_prefix_runs_once_however_many_branches_there_are() -> None:
    model = zoo.build("llama")
    vocabulary = model.config.vocab_size
    random = np.random.default_rng(0)
    root = random.integers(3, vocabulary, 200).tolist()
    counts = []
    for size in (2, 8):
        tails = [random.integers(3, vocabulary, 30).tolist() for _ in range(size)]
        mask = np.r_[np.zeros(200, bool), np.ones(30, bool)]
        tree = segment([trajectory(str(i), root + tail, mask) for i, tail in enumerate(tails)])
        replay = Engine(model, ReplayConfig(chunk=64)).open(tree)
        replay.score()
        replay.backward(torch.ones(len(tree.entry_node)))
        counts.append((replay.counts["root_capture"], replay.counts["root_reverse"]))
    assert counts == [(199, 199)] * 2


def test_stale_states_are_refused_even_when_weights_change_behind_torch() -> None:
    model = zoo.build("llama", dtype=torch.float32)
    tree = segment(deep_group(model.config.vocab_size))
    for change in (
        lambda weight: weight.data.add_(1e-3),
        lambda weight: torch.nn.init.zeros_(weight),
        lambda weight: weight.data.view(-1)[7:8].mul_(-1),
    ):
        replay = Engine(model).open(tree)
        replay.score()
        change(model.model.layers[1].self_attn.k_proj.weight)
        with pytest.raises(StaleStateError, match="layer 1"):
            replay.backward(torch.ones(len(tree.entry_node)))


def test_refusals_name_what_is_wrong() -> None:
    model = zoo.build("llama")
    tree = segment(deep_group(model.config.vocab_size))
    c = torch.ones(len(tree.entry_node))
    c[5] = float("nan")
    with pytest.raises(NonFiniteError, match=f"position {tree.entry_position[5]} of trajectory"):
        Engine(model).open(tree).backward(c)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(TokenError, match="vocabulary"):
        Engine(model).open(segment([trajectory("x", [1, 10**6, 2], np.array([False, True, True]))]))
    model.config.model_type = "unheard_of"
    with pytest.raises(ModelError, match="unheard_of"):
        Engine(model)


@pytest.mark.parametrize("gradient", ["exact", "detached"])
@pytest.mark.parametrize(("name", "block"), [("llama", 2**18), ("llama", 31), ("mistral", 31), ("gemma3", 2**18)])
def test_a_kernel_that_joins_prefix_and_chunk_gives_the_same_gradient(name: str, block: int, gradient: str, monkeypatch) -> None:
    """A bottom-right kernel (as FlashAttention is) reads prefix and chunk in one buffer: same numbers as the merged parts.

    So does its backward pass block by block, where the prefix has more than `block` positions.
    """
    monkeypatch.setattr(attention, "BLOCK", block)
    monkeypatch.setattr(state, "BLOCK", block)

    class Joining(kernels.CpuFlash):
        bottom_right = True

        def forward(self, q, k, v, causal, scale):
            see = attention.Visibility(k.shape[2] - q.shape[2], 0, causal)
            return attention.reference_forward(q, k, v, see, scale)

        def backward(self, dout, q, k, v, out, lse, causal, scale):
            see = attention.Visibility(k.shape[2] - q.shape[2], 0, causal)
            return attention.reference_backward(dout, q, k, v, out, lse, see, scale)

    model = zoo.build(name, dtype=torch.float64)
    group = deep_group(model.config.vocab_size)
    tree, gradients = segment(group), []
    for available in (kernels.KERNELS, (Joining(),)):
        monkeypatch.setattr(kernels, "KERNELS", available)
        monkeypatch.setattr(kernels, "_CHOICES", {})
        Engine(model, ReplayConfig(gradient, chunk=23, pack=60)).open(tree).backward(coefficients(len(tree.entry_node)))
        gradients.append(comparison.gradients(model))
        model.zero_grad()
    assert comparison.compare(gradients[1], gradients[0]).worst < 1e-10


def test_a_kernel_with_wrong_gradients_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(kernels.CpuFlash):
        def backward(self, dout, q, k, v, out, lse, causal, scale):
            dq, dk, dv = super().backward(dout, q, k, v, out, lse, causal, scale)
            return dq, dk * 1.05, dv

    shape = (torch.device("cpu"), torch.float32, 4, 2, 16, 16)
    assert kernels.passes_check(kernels.CpuFlash(), *shape) and not kernels.passes_check(Wrong(), *shape)
    assert "left out" in caplog.text
