"""Expert parallelism: each process of "ep" holds some of the experts, whole.

Idea: everything but the experts is shared out by tokens over all processes (see `context`). In a layer with experts the
processes of one "ep" group give each other their tokens, each runs those that were routed to its experts, and the outputs are
summed at the tokens' owners in float32 or wider. Routing is computed by the token's owner, so it is what one process would do.
Weights, gradients and optimizer states of experts exist once per "ep" group; checkpoints hold all of them, in order.

Shapes: N tokens of one process, P processes of the group, k experts per token, C hidden size, X experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_agents.errors import ConfigError, ModelError
from longstraw_agents.trainer.ranks import Ranks
from longstraw_agents.trainer.stack import wide

#: Parameters of a layer's experts, stacked along their first dimension.
_STACKED = ("gate_up_proj", "down_proj")


def share_experts(model: nn.Module, ranks: Ranks) -> frozenset[str]:
    """Keep only this process's experts, in place; returns the names of the parameters that are now a part of the whole.

    Raises ConfigError where the experts do not divide, ModelError where there are none or they carry adapters.
    """
    count = ranks.size("ep")
    if count == 1:
        return frozenset()
    if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
        raise ModelError("adapters on experts can't be shared out: leave the experts out of target_parameters, or set ep to 1")
    names = set()
    for path, module in model.named_modules():
        if not all(isinstance(getattr(module, name, None), nn.Parameter) for name in _STACKED):
            continue
        experts = len(module.gate_up_proj)
        if experts % count:
            raise ConfigError(f"{path} has {experts} experts, which ep={count} does not divide")
        first = ranks.rank("ep") * (experts // count)
        for name in _STACKED:
            whole = getattr(module, name)
            mine = whole.data[first : first + experts // count].clone()
            setattr(module, name, nn.Parameter(mine, requires_grad=whole.requires_grad))
            names.add(f"{path}.{name}")
        module.num_experts = experts // count
        module.forward = _of_group(module.forward, module, ranks, first)
    if not names:
        raise ModelError(f"{type(model).__name__} has no experts to share out; set ep to 1")
    return frozenset(names)


def whole(name: str, tensor: Tensor, ranks: Ranks, sharded: frozenset[str]) -> Tensor:
    """All experts of a parameter, or of a tensor that goes with one; what is not shared out is given back as it is."""
    return ranks.gather(tensor, "ep", "experts").flatten(0, 1) if name in sharded else tensor


def own_part(name: str, tensor: Tensor, ranks: Ranks, sharded: frozenset[str]) -> Tensor:
    """This process's experts of a whole parameter; the inverse of `whole`."""
    return tensor.chunk(ranks.size("ep"))[ranks.rank("ep")] if name in sharded else tensor


def _of_group(forward: Callable[..., Tensor], module: nn.Module, ranks: Ranks, first: int) -> Callable[..., Tensor]:
    """The experts' forward over the tokens of the whole group, with weight zero where another process has the expert.

    Such a slot's index is one past the last, which transformers' kernels skip; its "eager" loop has no such index and runs
    the slot through the first expert.
    """
    eager = getattr(getattr(module, "config", None), "_experts_implementation", "eager") == "eager"

    def shared(hidden_NC: Tensor, index_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
        hidden, weight = _GatherTokens.apply(ranks, hidden_NC, weight_Nk)  # type: ignore[no-untyped-call]
        index = ranks.gather(index_Nk, "ep", "expert tokens").flatten(0, 1) - first
        count = len(module.gate_up_proj)  # type: ignore[arg-type]
        here = (index >= 0) & (index < count)
        out = forward(hidden, index.masked_fill(~here, 0 if eager else count), weight * here)
        return _SumToOwners.apply(ranks, out, hidden, module.gate_up_proj)  # type: ignore[no-untyped-call,no-any-return]

    return shared


class _GatherTokens(torch.autograd.Function):
    """Rows of each tensor from all processes of the group: [N, ...] -> [P * N, ...]."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All processes' tokens."""
        ctx.ranks = ranks
        return tuple(ranks.gather(x, "ep", "expert tokens").flatten(0, 1) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """To each token's owner the sum of its gradients."""
        return None, *(_to_owners(ctx.ranks, grad) for grad in grads)


class _SumToOwners(torch.autograd.Function):
    """Outputs summed over the group at each token's owner: [P * N, C] -> [N, C].

    The other arguments only tie the result to the graph: a process whose experts got no token takes part in the backward
    pass all the same.
    """

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, out: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        """To each token's owner the sum of its outputs."""
        ctx.ranks = ranks
        ctx.set_materialize_grads(True)
        return _to_owners(ranks, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        """All processes' gradients."""
        return None, ctx.ranks.gather(grad, "ep", "expert tokens").flatten(0, 1), None, None


def _to_owners(ranks: Ranks, x: Tensor) -> Tensor:
    parts = x.to(wide(x.dtype)).reshape(ranks.size("ep"), -1, *x.shape[1:])
    return ranks.scatter_sum(parts, "ep", "expert tokens").to(x.dtype)
