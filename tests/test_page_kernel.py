"""Pages of 8-bit codes read where they lie: the seam with any kernel, and ours in Triton against the float64 reference.

Triton's interpreter runs kernels on a CPU. It is chosen when a kernel is defined, so ask for it before anything is imported:
`TRITON_INTERPRET=1 pytest tests/test_page_kernel.py`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstraw_agents.errors import ModelError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import attention, comparison, kernels, paged
from longstraw_agents.trainer.attention import Visibility, reference_backward, reference_forward
from longstraw_agents.trainer.paged import Page
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.types import Trajectory
from tests import models as zoo
from tests.test_replay import coefficients, deep_group, trajectory

SEE = Visibility(0, 0, False)


def _why_not() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "set TRITON_INTERPRET=1: without a GPU, kernels run in Triton's interpreter"
    try:
        int(np.zeros(1))  # as the interpreter of Triton 3.6 does
    except TypeError:
        return f"Triton's interpreter needs numpy before 2.4, here is {np.__version__}"
    return None


interpreted = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))


class ReferencePages:
    """What a page kernel is to compute, by the definition."""

    name = "reference-pages"
    launches: list[int]

    def __init__(self) -> None:
        self.launches = []

    def supports(self, q, k, v):
        return True

    def values(self, pages: list[Page], dtype: torch.dtype) -> list[torch.Tensor]:
        k = torch.cat([page.k * page.k_scale for page in pages], 2).to(dtype)
        return [k, torch.cat([page.v * page.v_scale for page in pages], 2).to(dtype)]

    def forward(self, q, pages, scale):
        self.launches.append(len(pages))
        return reference_forward(q, *self.values(pages, q.dtype), SEE, scale)

    def backward(self, dout, q, pages, out, lse, scale):
        for page in pages:
            if page.dk is not None:
                _, dk, dv = reference_backward(dout, q, *self.values([page], q.dtype), out, lse, SEE, scale)
                page.dk.add_(dk)
                page.dv.add_(dv)
        return reference_backward(dout, q, *self.values(pages, q.dtype), out, lse, SEE, scale)[0]


def gradient(model: torch.nn.Module, config: ReplayConfig, group: list[Trajectory] | None = None) -> dict[str, torch.Tensor]:
    tree = segment(group or deep_group(model.config.get_text_config().vocab_size))
    replay = Engine(model, config).open(tree)
    replay.score()
    replay.backward(coefficients(len(tree.entry_node)))
    found = comparison.gradients(model)
    model.zero_grad()
    return found


def without_fast_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose fast kernels do not take the shape: codes are read as they are at any number of queries."""
    monkeypatch.setattr(kernels, "KERNELS", ())
    monkeypatch.setattr(kernels, "_CHOICES", {})


def test_beside_a_fast_kernel_codes_are_read_for_few_queries_and_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama", dtype=torch.float64)
    monkeypatch.setitem(kernels.TOLERANCE, torch.float64, 1e-6)
    monkeypatch.setattr(paged.importlib.util, "find_spec", lambda name: object())
    read = {}
    for few in (0, 40):
        kernel, asked = ReferencePages(), []
        monkeypatch.setattr(attention, "FEW", few)
        monkeypatch.setattr(paged, "_CHOICES", {})
        monkeypatch.setattr(paged, "_load", lambda kernel=kernel: kernel)
        monkeypatch.setattr(kernel, "backward", lambda *a, own=kernel.backward, asked=asked: (asked.append(1), own(*a))[1])
        gradient(model, ReplayConfig(chunk=40, pack=100, placement=Placement(bits=8)))
        read[few] = (len(kernel.launches), len(asked))
    assert read[0] == (0, 0), "nothing is few, so the kernel is not even checked"
    assert read[40][0] > 1 and read[40][1] == 1, "the check alone asks for a gradient"


@pytest.mark.parametrize("mode", ["exact", "detached"])
@pytest.mark.parametrize("placement", [Placement(bits=8), Placement("host", page=19, bits=8)])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "qwen3_5"])
def test_a_state_read_as_codes_gives_the_gradient_of_one_read_as_values(
    name: str, placement: Placement, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build(name, dtype=torch.float64)  # so that no last bit moves a later key to another code
    config = ReplayConfig(mode, chunk=40, pack=100, placement=placement)
    without_fast_kernels(monkeypatch)
    monkeypatch.setitem(kernels.TOLERANCE, torch.float64, 1e-6)  # cotangents of codes are float32
    monkeypatch.setattr(paged, "_CHOICES", {})
    monkeypatch.setattr(paged, "_load", lambda: None)
    monkeypatch.setattr(paged.importlib.util, "find_spec", lambda name: object())
    values = gradient(model, config)
    assert paged.chosen() == []
    kernel = ReferencePages()
    monkeypatch.setattr(paged, "_CHOICES", {})
    monkeypatch.setattr(paged, "_load", lambda: kernel)
    codes = gradient(model, config)
    assert comparison.compare(codes, values).global_relative < 1e-6
    if name == "gemma2":  # a soft cap is nothing for it
        assert not kernel.launches
        return
    assert kernel.name in kernels.chosen()
    # after the check's own: only what a cut parts is two pages of one launch
    assert max(kernel.launches[1:]) == (1 if placement.place == "host" or mode == "exact" else 2)


def test_a_page_kernel_with_a_wrong_gradient_or_an_error_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(ReferencePages):
        def backward(self, dout, q, pages, out, lse, scale):
            dq = super().backward(dout, q, pages, out, lse, scale)
            pages[1].dv.mul_(1.05)
            return dq

    class Failing(ReferencePages):
        def forward(self, q, pages, scale):
            raise RuntimeError("out of shared memory")

    shape = (torch.device("cpu"), torch.float32, 4, 2, 16, 24)
    assert paged.passes_check(ReferencePages(), *shape) and not caplog.records
    assert not paged.passes_check(Wrong(), *shape) and "error" in caplog.records[-1].getMessage()
    assert not paged.passes_check(Failing(), *shape) and "shared memory" in caplog.records[-1].getMessage()


def test_pages_whose_tensors_do_not_belong_together_are_refused() -> None:
    (page,), _ = paged.coded_pages(torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 8), [(0, 9)])
    assert page.k is not None and page.dv is not None
    wrong = (
        {"k_scale": None}, {"v": page.v.float()}, {"dk": page.dk.double()}, {"dk": None}, {"dv": page.dk},
        {"k": page.k.transpose(2, 3).contiguous().transpose(2, 3)}, {"v_scale": page.v_scale[:, :, :5]},
    )  # fmt: skip
    for change in wrong:
        with pytest.raises(ModelError):
            replace(page, **change)


@interpreted
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_kernel_computes_what_the_reference_does_on_pages_that_lie_anywhere(data: st.DataObject) -> None:
    from longstraw_agents.trainer import page_kernel
    from longstraw_agents.trainer.page_kernel import TritonPages

    page_kernel.PIECE = data.draw(st.sampled_from([16, 1024]))  # the smaller one cuts pages
    heads, queries = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 31, 64, 150]))
    size, value_size = data.draw(st.sampled_from([(8, 8), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (24, 40)]))
    coded = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    spans, wanted, end = [], [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        begin = end + data.draw(st.integers(0, 9))
        end = begin + data.draw(st.sampled_from([1, 16, 33, 64, 100, 300]))
        spans.append((begin, end))
        wanted.append(data.draw(st.booleans()))
    make = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    new = lambda length, width: torch.randn(1, heads, length, width, generator=make).to(dtype)
    q, dout, k, v = new(queries, size), new(queries, value_size), new(end, size), new(end, value_size)
    pages, values = paged.coded_pages(k, v, spans)
    if not coded:
        laid = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
        pages = [Page(*(x[:, :, a:b] for x in laid), dk=p.dk, dv=p.dv) for (a, b), p in zip(spans, pages, strict=True)]
        values = [torch.cat([x[:, :, a:b] for a, b in spans], 2).double() for x in (k, v)]
    pages = [page if keep else replace(page, dk=None, dv=None) for page, keep in zip(pages, wanted, strict=True)]
    for page in pages:
        if page.dk is not None and page.dv is not None:  # it adds
            page.dk.fill_(1.0)
            page.dv.fill_(2.0)
    whole = [torch.cat([part, torch.randn(1, heads, 5, part.shape[-1], generator=make).double()], 2) for part in values]
    out, lse = reference_forward(q.double(), *whole, SEE, size**-0.5)  # merged with five more keys
    kernel = TritonPages()
    assert kernel.supports(q, k, v)
    found = list(kernel.forward(q, pages, size**-0.5))
    found.append(kernel.backward(dout, q, pages, out.to(dtype), lse.float(), size**-0.5))
    expected = list(reference_forward(q.double(), *values, SEE, size**-0.5))
    dq, dk, dv = reference_backward(dout.double(), q.double(), *values, out, lse, SEE, size**-0.5)
    expected.append(dq)
    lengths = [b - a for a, b in spans]
    for page, part_k, part_v in zip(pages, dk.split(lengths, 2), dv.split(lengths, 2), strict=True):
        if page.dk is not None and page.dv is not None:
            found += [page.dk - 1.0, page.dv - 2.0]
            expected += [part_k, part_v]
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other).norm() / max(float(other.norm()), 1e-2 * other.numel() ** 0.5)
        assert error <= kernels.TOLERANCE[dtype]


@interpreted
@pytest.mark.parametrize(("mode", "placement"), [("exact", Placement(bits=8)), ("detached", Placement("host", page=24, bits=8))])
def test_an_update_through_the_kernel_gives_the_gradient_of_the_path_through_values(
    placement: Placement, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("llama", dtype=torch.float32)
    root, ends = list(range(3, 50)), ([7, 9, 11] * 4, [8, 5] * 3)
    group = [trajectory(str(i), root + end, np.arange(len(root + end)) > 46) for i, end in enumerate(ends)]
    config = ReplayConfig(mode, chunk=20, pack=100, placement=placement)
    without_fast_kernels(monkeypatch)
    monkeypatch.setattr(paged, "_CHOICES", {})
    codes = gradient(model, config, group)
    assert paged.chosen() == ["longstraw-pages"]
    monkeypatch.setattr(paged, "_CHOICES", {})
    monkeypatch.setattr(paged, "_load", lambda: None)
    # a last bit can move a later key to another code, so float32's rounding is not the bound
    assert comparison.compare(codes, gradient(model, config, group)).global_relative < 1e-4


@interpreted
def test_pages_of_different_kinds_are_not_read_in_one_launch() -> None:
    from longstraw_agents.trainer.page_kernel import TritonPages

    first, second = (paged.coded_pages(*torch.randn(2, 1, heads, 20, 16), [(0, 20)])[0][0] for heads in (2, 2))
    other = Page(*(x.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :10] for x in torch.randn(2, 1, 2, 20, 16)))
    q = torch.randn(1, 2, 4, 16)
    TritonPages().forward(q, [first, second], 0.25)
    with pytest.raises(ModelError, match="one kind"):
        TritonPages().forward(q, [first, other], 0.25)
