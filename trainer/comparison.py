"""Comparison of two gradients of one model, parameter by parameter.

Vocabulary
    relative error   |ours - reference| / |reference| in the Frobenius norm; the denominator is at least `FLOOR` of the whole
                     reference gradient's norm, so a tensor whose gradient is all but zero can't make noise look like a mistake
    class            what a parameter is, whatever its layer: "self_attn.q_proj.lora_A"
    cosine           of the two whole gradients as vectors

All norms are taken in float64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longstraw_agents.errors import ModelError

FLOOR = 1e-8


@dataclass(frozen=True)
class ClassDifference:
    """The worst tensor of one parameter class, and the class's own global relative error."""

    relative_error: float
    worst: float
    worst_name: str


@dataclass(frozen=True)
class Difference:
    """How far a gradient is from a reference. `worst` is the largest relative error of a tensor, `worst_name` names it."""

    global_relative: float
    cosine: float
    worst: float
    worst_name: str
    classes: Mapping[str, ClassDifference]


def parameter_class(name: str) -> str:
    """The class of a parameter: its name without wrappers, layer indices and adapter names."""
    name = re.sub(r"(^|\.)(base_model|model|language_model|base_layer|default|weight|module)(?=\.|$)", "", name)
    name = re.sub(r"(^|\.)layers\.\d+\.", r"\1", name)
    return re.sub(r"\.\d+(?=\.|$)", "", name).strip(".") or "weight"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of all trained parameters by name; zeros where the backward pass reached none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def compare(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Difference:
    """Compare `ours` with `reference`, two gradients by parameter name.

    Raises ModelError when they are not gradients of the same parameters, or the reference is zero or not finite.
    """
    if ours.keys() != reference.keys():
        missing = sorted(set(ours) ^ set(reference))
        raise ModelError(f"the two gradients are of different parameters: {missing[:5]}; compare gradients of one model")
    squared = {name: float(value.double().square().sum()) for name, value in reference.items()}
    total = sum(squared.values()) ** 0.5
    if not 0.0 < total < float("inf"):
        raise ModelError(f"the reference gradient's norm is {total}; choose data whose loss depends on the parameters")
    errors: dict[str, float] = {}
    grouped: dict[str, list[str]] = {}
    product = own = off = 0.0
    for name, value in reference.items():
        mine, theirs = ours[name].double(), value.double()
        distance = float((mine - theirs).square().sum())
        off += distance
        own += float(mine.square().sum())
        product += float((mine * theirs).sum())
        error = distance**0.5 / max(squared[name] ** 0.5, FLOOR * total)
        errors[name] = error if error == error else float("inf")
        grouped.setdefault(parameter_class(name), []).append(name)
    classes = {}
    for label, names in grouped.items():
        worst = max(names, key=errors.__getitem__)
        norm = max(sum(squared[name] for name in names) ** 0.5, FLOOR * total)
        distance = sum((errors[name] * max(squared[name] ** 0.5, FLOOR * total)) ** 2 for name in names) ** 0.5
        classes[label] = ClassDifference(distance / norm, errors[worst], worst)
    worst_name = max(errors, key=errors.__getitem__)
    cosine = product / (total * own**0.5) if own > 0 else 0.0
    relative = off**0.5 / total
    return Difference(relative if relative == relative else float("inf"), cosine, errors[worst_name], worst_name, classes)
