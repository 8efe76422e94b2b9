"""The gated delta rule's kernel: which one a model's layers call, and whether it is to be trusted.

Idea: transformers binds flash-linear-attention's kernel to its models when it is installed, and else calls its own definition in
torch. A replay asks more of it than training does: a state in, a state out, and the gradients of both. So before a model runs,
combinations of versions that are known to fail are refused with what to install, and a kernel is held against the definition
once for each device, type and head size: output, final state, and the gradients of q, k, v, decay, beta and the initial state.
A rule that fails is refused, not replaced: the definition is an order of magnitude slower, which is the user's to choose.

Shapes: B rows, T tokens, H heads, K key size, V value size.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from longstraw_agents.errors import ModelError

#: The functions through which transformers' models compute the rule: one name for many tokens, one for a single one.
RULE, SINGLE_RULE = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"

#: Packages that TileLang does not work with from a version on.
TOO_NEW = {"apache-tvm-ffi": "0.1.13", "z3-solver": "4.15.5"}
#: Triton's versions whose code for the rule's backward pass is wrong on Hopper; there TileLang must compile it.
WRONG_ON_HOPPER = (Version("3.4.0"), Version("3.7.1"))
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 5e-3}

Rule = Callable[..., tuple[Tensor, Tensor]]

_PASSED: dict[tuple[Any, ...], str] = {}


def require_usable(decoder: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError unless the delta rule of the decoder's layers, if it has any, is right on this device."""
    for layer in _layers(decoder):
        rule = getattr(sys.modules[type(layer).__module__], RULE)
        definition = defined(rule)
        if definition is None or device.type == "meta":
            continue
        sizes = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        key = (rule, device, dtype, *sizes)
        if key in _PASSED:
            continue
        require_versions(device)
        try:
            error, name = worst_error(rule, definition, device, dtype, *sizes)
        except Exception as failure:  # whatever a compiler or a GPU raises
            raise ModelError(
                f"the delta rule that is installed ({installed()}) does not take {sizes[0]} heads of {sizes[1]} keys and "
                f"{sizes[2]} values in {dtype} on {device} ({type(failure).__name__}: {failure}); try bfloat16, other versions, "
                "or uninstall flash-linear-attention"
            ) from failure
        if not error <= TOLERANCE.get(dtype, 0.0):
            raise ModelError(
                f"the delta rule that is installed ({installed()}) differs from its definition by {error:.1e} in {name} "
                f"({dtype}, {device}); the gradient would be wrong. Install other versions, or uninstall flash-linear-attention"
            )
        _PASSED[key] = installed()


def _layers(decoder: nn.Module) -> Iterator[Any]:
    for module in decoder.modules():
        if (
            hasattr(module, "head_v_dim")
            and hasattr(module, "num_v_heads")
            and hasattr(sys.modules[type(module).__module__], RULE)
        ):
            yield module


def defined(rule: Any) -> Rule | None:
    """The definition in torch that stands behind transformers' function; None where that is what is called."""
    definition = inspect.unwrap(rule)
    if definition is rule:
        return None
    bound = inspect.getclosurevars(rule).nonlocals.get("implementation") if inspect.isfunction(rule) else None
    return None if bound is definition else definition


def require_versions(device: torch.device) -> None:
    """Raise ModelError for combinations that are known to fail."""
    if device.type != "cuda":
        raise ModelError(
            f"{installed()} computes this model's delta rule, and runs on GPUs only, but the model is on {device.type}; "
            "move it to a GPU, or uninstall flash-linear-attention here: transformers then uses its own definition"
        )
    triton, tilelang = _version("triton"), _version("tilelang")
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    first, last = WRONG_ON_HOPPER
    if hopper and triton is not None and first <= triton < last and importlib.util.find_spec("tilelang") is None:
        raise ModelError(
            f"Triton {triton} compiles the delta rule's backward pass wrongly on this GPU (Hopper); "
            f"install tilelang, or Triton {last} or newer"
        )
    for package, limit in TOO_NEW.items():
        found = _version(package)
        if tilelang is not None and found is not None and found >= Version(limit):
            raise ModelError(f"TileLang {tilelang} does not work with {package} {found}; install {package}<{limit}")


def worst_error(
    rule: Rule, definition: Rule, device: torch.device, dtype: torch.dtype, heads: int, size: int, value_size: int
) -> tuple[float, str]:
    """The largest relative difference of `rule` from the definition in float32 on the same random numbers, and what it is of."""
    T = 96  # one whole chunk of the rule and part of a second
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        new = lambda *shape: torch.randn(1, *shape, device=device)
        q, k, v = new(T, heads, size), new(T, heads, size), new(T, heads, value_size)
        g, beta = -torch.rand(1, T, heads, device=device), torch.rand(1, T, heads, device=device)
        state, dout, dstate = new(heads, size, value_size), new(T, heads, value_size), new(heads, size, value_size)
    narrow = [x.to(dtype) for x in (q, k, v)] + [g, beta.to(dtype), state]
    found = _run(rule, narrow, dout.to(dtype), dstate)
    wanted = _run(definition, [x.float() for x in narrow], dout.to(dtype).float(), dstate)
    errors = {name: float((found[name].float() - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
    name = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))  # not a number counts as the largest
    return errors[name], name


def _run(rule: Rule, inputs: list[Tensor], dout: Tensor, dstate: Tensor) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, g, beta, state = leaves
    with torch.enable_grad():
        out, final = rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )  # fmt: skip
        grads = torch.autograd.grad([out, final], leaves, [dout.to(out.dtype), dstate.to(final.dtype)])
    names = ("q", "k", "v", "decay", "beta", "initial state")
    return {"output": out.detach(), "final state": final.detach()} | {
        f"gradient of {n}": x for n, x in zip(names, grads, strict=True)
    }


def chosen() -> list[str]:
    """The kernels of the delta rule that passed in this process."""
    return sorted(set(_PASSED.values()))


def installed() -> str:
    """Name and version of the package that brings the kernel."""
    return f"flash-linear-attention {_version('flash-linear-attention') or _version('fla-core') or 'of unknown version'}"


def _version(package: str) -> Version | None:
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None
