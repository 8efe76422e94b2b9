"""Log-probabilities of only the tokens that carry loss, in pieces: the logits of a long span never exist whole.

Idea: the head needs one hidden state per loss token, and the loss's derivative c_t (and e_t for entropies) is known before the
replay. So each piece of tokens runs its head forward and backward at once and leaves only the gradient of its hidden states;
nothing of size [tokens x vocabulary] outlives a piece.

On a GPU, cut-cross-entropy (Wijmans et al. 2024, arXiv:2411.09009) holds no logits at all. Where it is installed it is checked
once for each kind of head, with its filter of small gradients off, and taken if it errs as our own pieces do, not more.

Shapes: M loss tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_agents.errors import ModelError

_LOG = logging.getLogger(__name__)

#: (hidden_MC, weight_VC, target_M, soft cap) -> log-probabilities [M], differentiable, without logits.
Fused = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


@dataclass(frozen=True)
class Head:
    """A model's output head: module [.., C] -> [.., V], soft cap of the logits, sampling temperature, tokens per piece.

    fused: a kernel that gives log-probabilities without logits; entropies are still ours.
    """

    module: nn.Module
    softcap: float | None = None
    temperature: float = 1.0
    piece: int = 1024
    fused: Fused | None = None

    @property
    def name(self) -> str:
        """What gives log-probabilities, for receipts."""
        return "pieces" if self.fused is None else "cut-cross-entropy"

    def logits(self, hidden_MC: Tensor) -> Tensor:
        """Logits [M, V] in float32 or wider, after soft cap and temperature."""
        logits = self.module(hidden_MC)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature if self.temperature != 1.0 else logits

    def logp(self, hidden_MC: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [M] of the targets (natural log) and, if asked, entropies [M] in nats."""
        if self.fused is not None and not entropy:
            return self.fused(hidden_MC, self.module.weight, target_M, self.softcap), None  # type: ignore[arg-type]
        logits = self.logits(hidden_MC)
        total = logits.logsumexp(-1)
        logp = logits.gather(-1, target_M[:, None])[:, 0] - total
        if not entropy:
            return logp, None
        mean = (torch.softmax(logits, -1) * logits).sum(-1)
        return logp, total - mean

    def score(self, hidden_MC: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """`logp` over pieces, without autograd."""
        with torch.no_grad():
            parts = [self.logp(h, t, entropy) for h, t in zip(*self._split(hidden_MC, target_M), strict=True)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) if entropy else None  # type: ignore[arg-type, misc]

    def backward(
        self, hidden_MC: Tensor, target_M: Tensor, c_M: Tensor, e_M: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Back-propagate sum(c * logp + e * entropy) piece by piece.

        Adds to the head's parameters' gradients. Returns the gradient of hidden_MC, logp [M] and entropies [M] (or None).
        """
        grads, logps, entropies = [], [], []
        bounds = [x.split(self.piece) for x in (c_M, c_M if e_M is None else e_M)]
        for h, t, c, e in zip(*self._split(hidden_MC, target_M), *bounds, strict=True):
            leaf = h.detach().requires_grad_(True)
            with torch.enable_grad():
                logp, entropy = self.logp(leaf, t, e_M is not None)
                total = (c * logp).sum() if entropy is None else (c * logp + e * entropy).sum()
            total.backward()  # type: ignore[no-untyped-call]
            assert leaf.grad is not None
            grads.append(leaf.grad)
            logps.append(logp.detach())
            entropies.append(logp.detach() if entropy is None else entropy.detach())
        return torch.cat(grads), torch.cat(logps), torch.cat(entropies) if e_M is not None else None

    def _split(self, hidden_MC: Tensor, target_M: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return hidden_MC.split(self.piece), target_M.split(self.piece)


def find_head(model: nn.Module, temperature: float, piece: int) -> Head:
    """The head of a transformers causal language model (unwrapped from PEFT).

    Raises ModelError where the model scales its logits in a way that is not known here.
    """
    config = model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling", "output_multiplier_scale", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"{type(model).__name__} scales its logits by {name}={getattr(config, name)}: not supported")
    module = model.get_output_embeddings()
    if module is None:
        raise ModelError(f"{type(model).__name__} has no output head; load it as a causal language model")
    head = Head(module, _softcap(model, config), temperature, piece)
    return replace(head, fused=choose_fused(head))


def _softcap(model: nn.Module, config: Any) -> float | None:
    """The cap that the model's class applies to its logits. Gemma 3's vision-language class ignores the one that its text
    configuration names, so what counts is whether the class's forward reads it."""
    names = inspect.unwrap(type(model).forward).__code__.co_names
    return getattr(config, "final_logit_softcapping", None) if "final_logit_softcapping" in names else None


def cut_cross_entropy(hidden_MC: Tensor, weight_VC: Tensor, target_M: Tensor, softcap: float | None) -> Tensor:
    """The library's kernel as a `Fused`."""
    from cut_cross_entropy import linear_cross_entropy

    hidden_MC = hidden_MC.contiguous()
    return -linear_cross_entropy(hidden_MC, weight_VC, target_M, softcap=softcap, reduction="none", filter_eps=None)


_CHOICES: dict[Any, bool] = {}


def choose_fused(head: Head) -> Fused | None:
    """The library's kernel where it is installed, takes this head, and passed its check; decided once for each kind of head."""
    weight = getattr(head.module, "weight", None)
    plain = type(head.module) is nn.Linear and head.module.bias is None and head.temperature == 1.0
    if not plain or not isinstance(weight, Tensor) or weight.device.type != "cuda" or weight.dtype.itemsize != 2:
        return None
    if importlib.util.find_spec("cut_cross_entropy") is None:
        return None
    key = (weight.device, weight.dtype, weight.shape, head.softcap)
    if key not in _CHOICES:
        _CHOICES[key] = passes_check(head, cut_cross_entropy)
    return cut_cross_entropy if _CHOICES[key] else None


def passes_check(head: Head, fused: Fused, tokens: int = 256, ratio: float = 1.25) -> bool:
    """Compare a kernel with our own pieces, both against float32, on random hidden states and coefficients: log-probabilities,
    the hidden states' gradient and the weight's. Each error may be `ratio` times our own, or the type's rounding of one
    number. A kernel that fails, or raises, is left out with a warning.
    """
    weight = head.module.weight.detach()[:32768]  # type: ignore[index, union-attr]
    V, C = weight.shape
    with torch.random.fork_rng(devices=[weight.device] if weight.device.type == "cuda" else []):
        torch.manual_seed(0)
        hidden = torch.randn(tokens, C, device=weight.device).to(weight.dtype)
        target, c = torch.randint(0, V, (tokens,), device=weight.device), torch.randn(tokens, device=weight.device)

    def run(kernel: Fused | None, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        if kernel is None:
            part = nn.Linear(C, V, bias=False, device="meta")
            part.weight = nn.Parameter(leaves[1])
            leaves[1] = part.weight
            logp, _ = Head(part, head.softcap).logp(leaves[0], target, entropy=False)
        else:
            logp = kernel(leaves[0], leaves[1], target, head.softcap)
        return [logp.detach(), *torch.autograd.grad((c * logp).sum(), leaves)]

    wanted, own = run(None, torch.float32), run(None, weight.dtype)
    try:
        found = run(fused, weight.dtype)
    except Exception as error:  # whatever a foreign kernel raises, it is not usable here
        _LOG.warning("the fused head is left out: %s: %s", type(error).__name__, error)
        return False
    least = torch.finfo(weight.dtype).eps
    for name, mine, theirs, true in zip(("logp", "hidden", "weight"), own, found, wanted, strict=True):
        errors = [float((x.float() - true).norm() / true.norm()) for x in (mine, theirs)]
        if not errors[1] <= max(ratio * errors[0], least):
            _LOG.warning("the fused head is left out: error %.1e in %s, our own pieces' is %.1e", errors[1], name, errors[0])
            return False
    return True
