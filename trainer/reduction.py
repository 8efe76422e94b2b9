"""Gradients of several processes become one, and weights stay one.

Idea: gradients of weights are sums over tokens and trees, so the whole gradient is the sum over all processes, taken once,
before the step, in float32 or wider. A replicated weight is summed over all of them, an expert's over those that hold the same
experts. Every process then makes the same step on the same bits; digests of the weights are compared after each step, and the
run stops if they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from longstraw_agents.errors import RankError
from longstraw_agents.trainer.ranks import Ranks
from longstraw_agents.trainer.stamps import tensor_digest

_BUCKET = 64 * 2**20  # elements summed in one exchange


def sum_gradients(named: Sequence[tuple[str, nn.Parameter]], ranks: Ranks, sharded: frozenset[str] = frozenset()) -> None:
    """Replace the `.grad` of trained parameters by its sum over processes; None stays None where no process has one.

    sharded: names of parameters of which each process of "ep" holds another part.
    """
    if ranks.world == 1:
        return
    for group, chosen in (
        ("world", [p for name, p in named if name not in sharded]),
        ("replicas", [p for name, p in named if name in sharded]),
    ):
        if not chosen or ranks.size(group) == 1:
            continue
        has = torch.tensor([p.grad is not None for p in chosen], dtype=torch.int32, device=ranks.device)
        anywhere = ranks.sum(has, group, "gradients").tolist()
        for bucket in _buckets([p for p, count in zip(chosen, anywhere, strict=True) if count]):
            kind = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).to(kind).reshape(-1) for p in bucket])
            parts = ranks.sum(flat, group, "gradients").split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                p.grad = part.reshape(p.shape).to(p.dtype)


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        if not buckets or size + p.numel() > _BUCKET or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.numel()
    return buckets


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of squares over all tensors (float32 or wider), as one number on their device; 0 for none."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    return torch.stack([n.to(norms[0]) for n in norms]).square().sum() if norms else torch.zeros(())


def require_same(
    named: Sequence[tuple[str, nn.Parameter]], ranks: Ranks, version: int, sharded: frozenset[str] = frozenset()
) -> str:
    """Compare the trained weights of all processes bit by bit, through digests; returns the digest of the replicated ones.

    Raises RankError, naming the processes that differ from the first.
    """
    digests = {
        group: hashlib.blake2b(b"".join(tensor_digest(p.data) for p in chosen), digest_size=16).hexdigest()
        for group, chosen in (
            ("world", [p for name, p in named if name not in sharded]),
            ("replicas", [p for name, p in named if name in sharded]),
        )
    }
    for group, digest in digests.items():
        found = ranks.gather_objects([digest, ranks.number], group)
        wrong = [number for other, number in found if other != found[0][0]]
        if wrong:
            raise RankError(
                f"after step {version} the weights of process {', '.join(map(str, wrong))} differ from those of process "
                f"{found[0][1]}; nothing was saved: resume from the last checkpoint, and check the machine's memory"
            )
    return digests["world"]
