"""Our Triton kernel for pages of 8-bit codes: right, how fast, how large, beside codes made values for the fastest other kernel.

    python benchmarks/page_kernel.py --out page_kernel.json           one GPU, under a minute
    python benchmarks/page_kernel.py --sweep --out tiles.json         other cuts of the kernels, to choose `page_kernel.TILES` by
    TRITON_INTERPRET=1 python benchmarks/page_kernel.py --device cpu  the same at tiny sizes, to try this script

A case that fails says so in the table and the others go on. The result is written after every case. Rates count 4 (forward) and
10 (backward) operations for each query, key, head and head size; both sides are called as `attention.PrefixAttention` calls them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_shapes import SHAPES as NAMED
from benchmarks.long_shapes import build, make_group
from longstraw_agents import figures
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import attention, comparison, kernels, page_kernel, paged
from longstraw_agents.trainer.attention import Spec, Visibility, reference_backward, reference_forward
from longstraw_agents.trainer.page_kernel import Tiles, TritonPages
from longstraw_agents.trainer.paged import Page
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.receipt import versions
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.state import AttentionState, Run, StoredPrefix

SHAPES = ((9, 3, 64), (8, 2, 256), (16, 8, 128))
SEE = Visibility(0, 0, False)
#: What `--sweep` tries, queries and keys of a block, warps, stages; by kernel and width.
CUTS = {
    ("_forward", 64): ((128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (256, 64, 16, 3), (256, 64, 8, 3)),
    ("_forward", 128): ((128, 64, 8, 3), (256, 64, 16, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3)),
    ("_forward", 256): ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 32, 4, 3), (128, 64, 8, 1)),
    ("_query_gradient", 64): ((128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 2)),
    ("_query_gradient", 128): ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (64, 64, 8, 3)),
    ("_query_gradient", 256): ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2)),
    ("_page_gradient", 64): ((64, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2)),
    ("_page_gradient", 128): ((64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 3)),
    ("_page_gradient", 256): ((32, 64, 8, 2), (64, 64, 8, 2), (32, 64, 8, 3), (64, 64, 8, 1)),
}


def make(device: torch.device, heads: int, length: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random [1, heads, length, width], position-major as a state's are."""
    return torch.randn(1, length, heads, width, device=device, dtype=dtype).transpose(1, 2)


def median_seconds(device: torch.device, work: Callable[[], Any], repeats: int) -> float:
    """The median of `repeats` calls after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:]))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(device: torch.device, work: Callable[[], Any]) -> float | None:
    """The most memory that a call holds beyond what was there, in MiB."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    synchronize(device)
    return round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1)


def errors(device: torch.device, shape: tuple[int, int, int], coded: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Relative errors against float64 of 5 pages with gaps, the last one ragged, merged with plain keys."""
    heads, key_heads, size = shape
    lengths = (1024, 512, 1000, 64, 333) if device.type == "cuda" else (64, 37)
    queries = (512 if device.type == "cuda" else 40) * heads // key_heads
    starts = np.cumsum((0, *lengths)) + 7 * np.arange(len(lengths) + 1)
    spans = [(int(start), int(start) + length) for start, length in zip(starts, lengths, strict=False)]
    k, v = (make(device, key_heads, int(starts[-1]), size, dtype) for _ in range(2))
    q, dout = (make(device, key_heads, queries, size, dtype).contiguous() for _ in range(2))
    pages, values = paged.coded_pages(k, v, spans)
    if not coded:
        pages = [Page(k[:, :, a:b], v[:, :, a:b], dk=p.dk, dv=p.dv) for (a, b), p in zip(spans, pages, strict=True)]
        values = [torch.cat([x[:, :, a:b] for a, b in spans], 2).double() for x in (k, v)]
    scale, kernel = size**-0.5, TritonPages()
    others = [torch.cat([part, torch.randn_like(part[:, :, :100])], 2) for part in values]
    out, lse = reference_forward(q.double(), *others, SEE, scale)
    found = [*kernel.forward(q, pages, scale), kernel.backward(dout, q, pages, out.to(dtype), lse.float(), scale)]
    found += [torch.cat([getattr(page, name) for page in pages], 2) for name in ("dk", "dv")]
    wanted = [*reference_forward(q.double(), *values, SEE, scale)]
    wanted += reference_backward(dout.double(), q.double(), *values, out, lse, SEE, scale)
    names = ("out", "lse", "dq", "dk", "dv")
    each = {n: float((a.double() - b).norm() / b.norm()) for n, a, b in zip(names, found, wanted, strict=True)}
    return each | {"right": max(each.values()) <= kernels.TOLERANCE[dtype]}


class Chunk:
    """A chunk of queries after a prefix in 8 bits on the device, and both ways to attend to it."""

    def __init__(self, device: torch.device, shape: tuple[int, int, int], queries: int, keys: int) -> None:
        heads, key_heads, size = shape
        self.q, self.dout = (make(device, heads, queries, size) for _ in range(2))
        self.k, self.v = (make(device, key_heads, queries, size) for _ in range(2))
        self.scale = size**-0.5
        state = AttentionState(keys)
        state.put(Placement(bits=8, page=65536 if device.type == "cuda" else 128))
        state.begin(Run(0, keys, 1, True, False))
        state.update(make(device, key_heads, keys, size), make(device, key_heads, keys, size))
        self.prefix = StoredPrefix(state, Run(keys, queries, 1, False, True))
        self.ours = TritonPages()
        self.out, self.lse = self.forward_codes()

    @cached_property
    def spec(self) -> Spec:
        """With the fastest kernel for values; choosing it compiles it."""
        return Spec(self.scale, None, None, kernels.choose(self.q, self.k, self.v))

    def forward_codes(self) -> tuple[Tensor, Tensor]:
        """Ours: codes as they lie."""
        (pages,) = self.prefix.pages(False) or ()
        out, lse = self.ours.forward(attention._fold(self.q, self.k), pages, self.scale)
        return attention._unfold(out, self.q), attention._unfold(lse, self.q)

    def backward_codes(self, gradient: bool = True) -> Tensor:
        """Ours: dQ, and (`gradient`) dK and dV into the cotangent."""
        (pages,) = self.prefix.pages(gradient) or ()
        dout, q, out, lse = (attention._fold(x, self.k) for x in (self.dout, self.q, self.out, self.lse))
        return attention._unfold(self.ours.backward(dout, q, pages, out, lse, self.scale), self.q)

    def forward_values(self) -> tuple[Tensor, Tensor]:
        """The other way: each page of codes becomes values, the fastest kernel reads it, parts are merged."""
        out, lse = None, None
        for start, k, v in self.prefix.blocks(0):
            part, part_lse = attention.part_forward(self.q, k, v, Visibility(self.prefix.length, start, False), self.spec)
            merged = (part.float(), part_lse) if out is None else attention.merge(out, lse, part, part_lse)
            out, lse = merged
        assert out is not None and lse is not None
        return out.to(self.q.dtype), lse

    def backward_values(self) -> Tensor:
        """The other way: dQ summed over pages in float32, dK and dV added to the cotangent page by page."""
        dq = torch.zeros_like(self.q, dtype=torch.float32)
        for start, k, v in self.prefix.blocks(0):
            see = Visibility(self.prefix.length, start, False)
            part, dk, dv = attention.part_backward(self.dout, self.q, k, v, self.out, self.lse, see, self.spec)
            dq += part
            self.prefix.add(start, dk, dv)
        return dq.to(self.q.dtype)


def rates(
    device: torch.device, shape: tuple[int, int, int], queries: int, keys: int, repeats: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """TFLOP/s and peak memory of both ways, forward and backward, and how far their results lie apart."""
    flops = 4.0 * shape[0] * shape[2] * queries * keys
    chunk = Chunk(device, shape, queries, keys)
    other = chunk.spec.kernel.name if chunk.spec.kernel is not None else "reference"
    pairs = {"forward": (chunk.forward_codes, chunk.forward_values), "backward": (chunk.backward_codes, chunk.backward_values)}
    for phase, (ours, theirs) in pairs.items():
        codes, values = ours(), theirs()  # compiled now, and the cotangent made
        if phase == "forward":
            codes, values = codes[0], values[0]
        apart = float((codes.float() - values.float()).norm() / values.float().norm())
        del codes, values
        count = flops if phase == "forward" else 2.5 * flops
        for name, kernel, work in (("codes", chunk.ours.name, ours), ("values", other, theirs)):
            peak, seconds = peak_mib(device, work), median_seconds(device, work, repeats)
            rate = round(count / seconds / 1e12, 1)
            row = {"kernel": kernel, "tflops": rate, "seconds": round(seconds, 6), "peak_mib": peak, "apart": apart}
            yield f"{phase} {name}", row


def update(device: torch.device) -> dict[str, Any]:
    """The gradient of a whole tree of SmolLM2-135M's shape (random weights, LoRA) with the state read as codes, as values, and
    with an exact state."""
    on_gpu = device.type == "cuda"
    scale, length, chunk = ("full", 8192, 2048) if on_gpu else ("tiny", 60, 32)
    model = build("smollm2_135m", torch.bfloat16 if on_gpu else torch.float32, scale)
    tree = segment(make_group(length, 64 if on_gpu else 5, 2, NAMED["smollm2_135m"].make(scale).vocab_size).trajectories)
    c = torch.full((len(tree.entry_node),), 1 / len(tree.entry_node), device=device)
    gradients, load = {}, paged._load
    for name, bits in (("codes", 8), ("values", 8), ("exact", None)):
        paged._CHOICES.clear()
        paged._load = (lambda: None) if name == "values" else load
        config = ReplayConfig(chunk=chunk, pack=256, placement=Placement(bits=bits))
        Engine(model, config).open(tree).backward(c)
        gradients[name] = comparison.gradients(model)
        model.zero_grad()
        if name == "codes":
            chosen = kernels.chosen()
    paged._load = load
    pairs = (("codes", "values"), ("codes", "exact"), ("values", "exact"))
    apart = {f"{a} from {b}": comparison.compare(gradients[a], gradients[b]).global_relative for a, b in pairs}
    return {"kernels": chosen} | apart


def sweep(
    device: torch.device, shape: tuple[int, int, int], queries: int, keys: int, repeats: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Milliseconds of each kernel by its cut; dK and dV's alone is what a whole backward takes beyond dQ's."""
    chunk = Chunk(device, shape, queries, keys)
    works = {
        "_forward": chunk.forward_codes, "_query_gradient": lambda: chunk.backward_codes(False),
        "_page_gradient": chunk.backward_codes,
    }  # fmt: skip
    alone = 0.0
    for name, work in works.items():
        key = (name, max(64, shape[2]))
        best: tuple[float, Any] = (float("inf"), None)
        for cut in CUTS[key]:
            page_kernel._FITTING[*key, torch.bfloat16] = Tiles(*cut)
            try:
                seconds = median_seconds(device, work, repeats) - (alone if name == "_page_gradient" else 0.0)
            except Exception as error:  # this cut does not do; the next one may
                yield f"{name} {cut}", {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
            fitted = asdict(page_kernel._FITTING[*key, torch.bfloat16])
            yield f"{name} {cut}", {"milliseconds": round(1e3 * seconds, 3), "ran_as": list(fitted.values())}
            best = min(best, (seconds, Tiles(*fitted.values())), key=lambda pair: pair[0])
        if best[1] is not None:
            page_kernel._FITTING[*key, torch.bfloat16] = best[1]
        alone = best[0] if name == "_query_gradient" else alone


def cases(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, work): work gives one row, or rows one by one."""
    repeats, queries, keys = (5, (8192, 512, 128), 131072) if device.type == "cuda" else (1, (24,), 300)
    name = lambda shape: "/".join(map(str, shape))
    if options.sweep:
        for shape in SHAPES:
            yield f"cut {name(shape)}", lambda shape=shape: sweep(device, shape, queries[0], keys, repeats)
        return
    for shape in SHAPES:
        for coded in (True, False):
            kind = "codes" if coded else "plain"
            yield f"error {name(shape)} bfloat16 {kind}", lambda s=shape, c=coded: errors(device, s, c, torch.bfloat16)
    yield "update", lambda: update(device)
    yield "error 9/3/64 float32 codes", lambda: errors(device, SHAPES[0], True, torch.float32)
    yield "error 8/2/80 float16 codes", lambda: errors(device, (8, 2, 80), True, torch.float16)
    for shape in SHAPES:
        for count in queries:
            yield f"rate {name(shape)} {count}", lambda s=shape, count=count: rates(device, s, count, keys, repeats)


def main() -> None:
    """Run all cases, print a line for each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu under TRITON_INTERPRET=1")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    parser.add_argument("--sweep", action="store_true", help="time other cuts of the kernels instead")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    rows: dict[str, Any] = {}
    result = {"provenance": figures.provenance(), "versions": versions(("torch", "triton", "transformers")), "rows": rows}
    result["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (interpreted)"
    started = time.perf_counter()

    def keep(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        shown = {key: f"{value:.2e}" if isinstance(value, float) and value < 0.01 else value for key, value in row.items()}
        print(f"[{time.perf_counter() - started:5.1f} s] {name:42}", "  ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    for name, work in cases(options, device):
        try:
            found = work()
            for part, row in [("", found)] if isinstance(found, dict) else found:
                keep(f"{name} {part}".strip(), row)
        except Exception as error:  # a case that fails is a result too
            keep(name, {"error": f"{type(error).__name__}: {error}"[:500]})
    tiles = {f"{key[0]} {key[1]} {key[2]}": list(asdict(cut).values()) for key, cut in page_kernel._FITTING.items()}
    keep("tiles", tiles)


if __name__ == "__main__":
    main()
