"""The exact gradient inside somebody else's training loop.

Idea: whoever has an optimizer, a schedule and a loss of their own needs one call. It makes a prefix tree, scores it, asks the
loss for one number per token, and replays and reverses; what it leaves in `.grad` is what back-propagation through full sequences
would have left. It adds to gradients that are there, so several groups accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from longstraw_agents.errors import ConfigError, GroupError, NonFiniteError
from longstraw_agents.segmenter import SegmenterConfig, segment
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.types import Trajectory


def accumulate(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    loss: Callable[[Tensor], Tensor],
    config: ReplayConfig | None = None,
) -> tuple[Tensor, float]:
    """Add d loss / d parameters to the `.grad` of the model's trained parameters.

    loss: from the log-probabilities [N] of all action tokens (nats, float32 or wider; ordered by trajectory, then position) to a
    scalar. Returns those log-probabilities, detached, and the loss's value. Nothing is stepped or zeroed.

    Raises GroupError where no trajectory has an action token, NonFiniteError for a loss that is not finite, ConfigError for one
    that does not depend on the log-probabilities, and ModelError for a model that cannot be replayed exactly.
    """
    tree = segment(trajectories, SegmenterConfig())
    if not len(tree.entry_node):
        raise GroupError(f"none of the {len(trajectories)} trajectories has an action token; there is nothing to train on")
    replay = Engine(model, config or ReplayConfig()).open(tree)
    logp_N = replay.score().logp.detach().requires_grad_()
    value = loss(logp_N)
    if not bool(torch.isfinite(value)):
        raise NonFiniteError(f"the loss is {float(value.detach())}; no gradient was left. Look at what it divides by")
    try:
        (coefficients_N,) = torch.autograd.grad(value, logp_N)
    except RuntimeError as error:
        raise ConfigError("the loss does not depend on the log-probabilities that it was given") from error
    replay.backward(coefficients_N)
    return logp_N.detach(), float(value.detach())
