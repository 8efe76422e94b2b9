"""Log-probabilities of loss tokens: what the class computes, in pieces, and by a library's kernel where it passes its check."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import transformers

from longstraw_agents.trainer import head as heads
from longstraw_agents.trainer.head import Head, find_head
from tests import models


def exact(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, softcap: float | None) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]


class HalfGradient(torch.autograd.Function):
    """Right forward, and a gradient that is a little off."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.02


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_kernel_is_taken_only_if_all_it_gives_is_right(softcap: float | None, caplog: pytest.LogCaptureFixture) -> None:
    head = Head(torch.nn.Linear(64, 1000, bias=False, dtype=torch.bfloat16), softcap)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.nn.init.normal_(head.module.weight, std=0.5)  # logits beyond the cap
    uncapped = lambda h, w, t, cap: exact(h, w, t, None if cap else 5.0)
    wrong = {
        "logp": uncapped,
        "hidden": lambda h, w, t, cap: exact(HalfGradient.apply(h), w, t, cap),
        "weight": lambda h, w, t, cap: exact(h, HalfGradient.apply(w), t, cap),
        "RuntimeError": lambda h, w, t, cap: torch.zeros(3).view(2),
    }
    assert heads.passes_check(head, exact) and not caplog.records
    for name, kernel in wrong.items():
        assert not heads.passes_check(head, kernel) and name in caplog.records[-1].getMessage()


def test_a_taken_kernel_gives_scores_and_gradients_and_entropies_stay_ours() -> None:
    draw = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(16, 50, bias=False)
    hidden, target = torch.randn(9, 16, generator=draw), torch.randint(0, 50, (9,), generator=draw)
    c, calls = torch.randn(9, generator=draw), []

    def kernel(*arguments):
        calls.append(len(arguments[0]))
        return exact(*arguments)

    results = []
    for fused in (None, kernel):
        head = Head(module, 3.0, piece=4, fused=fused)
        module.zero_grad()
        grad, logp, _ = head.backward(hidden, target, c, None)
        results.append([grad, logp, head.score(hidden, target, False)[0], module.weight.grad])
        head.score(hidden, target, True)
    assert calls == [4, 4, 1] * 2
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))


def test_the_head_caps_what_the_class_caps() -> None:
    """Gemma 3's vision-language class ignores the cap in its text configuration; the head equals the class as it was loaded."""
    text = models.CONFIGS["gemma3"]()[1]
    vision = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for model in (transformers.Gemma3ForCausalLM(text), transformers.Gemma3ForConditionalGeneration(config)):
            hidden = 40 * torch.randn(1, 3, text.hidden_size)  # beyond the cap of 20

            def substitute(module, inputs, output, hidden=hidden):
                output.last_hidden_state = hidden
                return output

            hook = model.get_decoder().register_forward_hook(substitute)
            logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0]
            hook.remove()
            assert torch.allclose(find_head(model, 1.0, 8).logits(hidden[0]), logits, atol=1e-5)
            assert (float(logits.abs().max()) > 20) == (model.config is config)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("cut_cross_entropy") is None, reason="needs cut-cross-entropy")
@pytest.mark.parametrize("size", [(576, 49152), (4096, 151936)])
def test_cut_cross_entropy_is_taken_or_said_to_be_left_out(size: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    """Either it passes, and then a whole backward pass through it errs as ours does, or a warning says why it is left out."""
    head = Head(torch.nn.Linear(*size, bias=False, dtype=torch.bfloat16, device="cuda"))
    fused = heads.choose_fused(head)
    assert (fused is None) == any("left out" in record.getMessage() for record in caplog.records)
    if fused is None:
        pytest.skip(f"left out: {caplog.records[-1].getMessage()}")
    hidden = torch.randn(512, size[0], dtype=torch.bfloat16, device="cuda")
    target, c = torch.randint(0, size[1], (512,), device="cuda"), torch.randn(512, device="cuda")
    ours = head.backward(hidden, target, c, None)
    theirs = Head(head.module, fused=fused).backward(hidden, target, c, None)
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        assert float((a - b).float().norm() / a.float().norm()) < 2e-2
