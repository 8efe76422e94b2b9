"""The delta rule's kernel: wrong ones and known bad combinations of versions are refused before anything runs."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from packaging.version import Version

from longstraw_agents.errors import ModelError
from longstraw_agents.trainer import delta_rule
from longstraw_agents.trainer.replay import Engine
from tests.models import build

CPU = torch.device("cpu")


def bound(model: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model's rule as transformers binds an installed kernel, here the definition with `change` done to its results."""
    module = sys.modules[type(next(m for m in model.modules() if hasattr(m, "head_v_dim"))).__module__]
    definition = delta_rule.inspect.unwrap(getattr(module, delta_rule.RULE))

    def implementation(*args: Any, **options: Any) -> Any:
        return change(definition, *args, **options)

    @functools.wraps(definition)
    def wrapped(*args: Any, **options: Any) -> Any:
        return implementation(*args, **options)

    monkeypatch.setattr(module, delta_rule.RULE, wrapped)
    monkeypatch.setattr(delta_rule, "_PASSED", {})
    return wrapped


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is 3 % too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """1.03 of it."""
        return 1.03 * grad


def scaled(which: str) -> Any:
    """The definition with one gradient, or one result, off by 3 %."""

    def change(definition: Any, q: Any, k: Any, v: Any, *, g: Any, beta: Any, initial_state: Any, **options: Any) -> Any:
        given = {"q": q, "k": k, "v": v, "decay": g, "beta": beta, "initial state": initial_state}
        name = which.removeprefix("gradient of ")
        if name in given and given[name] is not None:
            given[name] = Scaled.apply(given[name])
        q, k, v, g, beta, state = given.values()
        out, final = definition(q, k, v, g=g, beta=beta, initial_state=state, **options)
        return out + 0.03 * out.detach() * (which == "output"), final + 0.03 * final.detach() * (which == "final state")

    return change


@pytest.mark.parametrize(
    "which",
    ["output", "final state", *(f"gradient of {name}" for name in ("q", "k", "v", "decay", "beta", "initial state"))],
)
def test_a_kernel_with_one_wrong_result_is_refused_by_its_name(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_5", dtype=torch.float32)
    bound(model, scaled(which), monkeypatch)
    monkeypatch.setattr(delta_rule, "require_versions", lambda device: None)
    with pytest.raises(ModelError, match=f"in {which}"):
        Engine(model)


def test_a_kernel_that_agrees_is_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_5", dtype=torch.float32)
    bound(model, scaled("nothing"), monkeypatch)
    monkeypatch.setattr(delta_rule, "require_versions", lambda device: None)
    Engine(model)
    assert delta_rule.chosen() == [delta_rule.installed()]


def test_results_that_are_not_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_5", dtype=torch.float32)
    bound(model, lambda definition, *a, **o: tuple(x * float("nan") for x in definition(*a, **o)), monkeypatch)
    monkeypatch.setattr(delta_rule, "require_versions", lambda device: None)
    with pytest.raises(ModelError, match="differs from its definition by nan"):
        Engine(model)


def test_a_kernel_that_raises_is_refused_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_5", dtype=torch.float32)

    def refuses(*args: Any, **options: Any) -> Any:
        raise AssertionError("float32 is not supported")

    bound(model, refuses, monkeypatch)
    monkeypatch.setattr(delta_rule, "require_versions", lambda device: None)
    with pytest.raises(ModelError, match=r"torch.float32 on cpu \(AssertionError: float32 is not supported\); try bfloat16"):
        Engine(model)


def test_an_installed_kernel_without_a_gpu_is_refused_and_the_definition_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_5", dtype=torch.float32)
    Engine(model)
    bound(model, scaled("nothing"), monkeypatch)
    with pytest.raises(ModelError, match="runs on GPUs only"):
        Engine(model)


@pytest.mark.parametrize(
    ("versions", "capability", "refused"),
    [
        ({"triton": "3.6.0"}, (9, 0), "install tilelang"),
        ({"triton": "3.7.1"}, (9, 0), None),
        ({"triton": "3.6.0"}, (8, 0), None),
        ({"triton": "3.6.0", "tilelang": "0.1.15", "apache-tvm-ffi": "0.1.12", "z3-solver": "4.15.4"}, (9, 0), None),
        ({"triton": "3.6.0", "tilelang": "0.1.15", "apache-tvm-ffi": "0.1.13"}, (9, 0), "apache-tvm-ffi<0.1.13"),
        ({"triton": "3.6.0", "tilelang": "0.1.15", "z3-solver": "4.16.0"}, (9, 0), "z3-solver<4.15.5"),
    ],
)
def test_known_bad_combinations_are_refused(
    versions: dict[str, str], capability: tuple[int, int], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_rule, "_version", lambda package: Version(versions[package]) if package in versions else None)
    monkeypatch.setattr(delta_rule.importlib.util, "find_spec", lambda name: object() if name in versions else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if refused is None:
        delta_rule.require_versions(torch.device("cuda"))
        return
    with pytest.raises(ModelError, match=refused):
        delta_rule.require_versions(torch.device("cuda"))
