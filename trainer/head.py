"""Log-probabilities of only the tokens that carry loss, in pieces: the logits of a long span never exist whole.

Idea: the head needs one hidden state per loss token, and the loss's derivative c_t (and e_t for entropies) is known before the
replay. So each piece of tokens runs its head forward and backward at once and leaves only the gradient of its hidden states;
nothing of size [tokens x vocabulary] outlives a piece.

Shapes: M loss tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longstraw_agents.errors import ModelError


@dataclass(frozen=True)
class Head:
    """A model's output head: module [.., C] -> [.., V], soft cap of the logits, sampling temperature, tokens per piece."""

    module: nn.Module
    softcap: float | None = None
    temperature: float = 1.0
    piece: int = 1024

    def logits(self, hidden_MC: Tensor) -> Tensor:
        """Logits [M, V] in float32 or wider, after soft cap and temperature."""
        logits = self.module(hidden_MC)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature if self.temperature != 1.0 else logits

    def logp(self, hidden_MC: Tensor, target_M: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [M] of the targets (natural log) and, if asked, entropies [M] in nats."""
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
    return Head(module, getattr(config, "final_logit_softcapping", None), temperature, piece)
