"""The figures that this project claims: one table of bounds, one file of measurements.

Idea: a claim counts only when a check wrote it. Benchmarks and fault trials call `record`; nobody edits docs/figures.json by
hand. A figure that misses its bound stays as it was measured, and one that was never measured counts as falling short.

Vocabulary
    figure   a dotted name; where BOUNDS says `name.*` there is one figure per item, as in exact.float32_global.llama
    bound    "<= 0.5", ">= 60", "= 0", "> 0", or "reported" for a figure without one
    holds    whether the value meets the bound; always true for "reported"

`python -m longstraw_agents.figures` prints them all.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import fnmatch
import json
import math
import operator
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longstraw_agents.errors import ConfigError, NonFiniteError

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "figures.json"

COMPARISONS = {"<=": operator.le, ">=": operator.ge, "=": operator.eq, ">": operator.gt, "<": operator.lt}

BOUNDS: dict[str, str] = {
    "main.demo_gain_points": ">= 60",
    "main.demo_shuffled_reward_gain_points": "<= 10",
    "main.demo_random_tools_success_over_chance_points": "<= 5",
    "main.demo_seconds": "<= 900",
    "main.peak_memory_ratio_g8_over_g2": "<= 1.05",
    "main.root_inputs_run_ratio_g8_over_g2": "= 1",
    "main.update_speedup_exact_cpu": ">= 2.5",
    "main.cli_help_seconds": "<= 0.5",
    "exact.float64_lifted.*": "<= 1e-10",
    "exact.float64_untouched_over_own_split.*": "<= 1.25",
    "exact.float64_untouched.*": "<= 1e-6",
    "exact.float32_global.*": "<= 1e-4",
    "exact.bfloat16_over_conventional.*": "<= 1.25",
    "exact.detached_relative_error.*": "reported",
    "exact.detached_cosine.*": "reported",
    "exact.trace20_loss_difference": "<= 1e-6",
    "exact.verify_smollm2_seconds": "<= 120",
    "store.append_ratio.sqlite": "<= 1.2",
    "store.append_ratio.postgresql": "<= 1.2",
    "store.shared_bytes_ratio": "<= 1.03",
    "store.bytes_per_token": "<= 1.6",
    "store.tree_seconds": "<= 0.5",
    "store.tree_peak_mb": "<= 200",
    "store.range_read_ms": "<= 20",
    "store.jsonl_bytes_over_ours": "reported",
    "store.parquet_bytes_over_ours": "reported",
    "store.faults.sqlite_kill": "= 0",
    "store.faults.postgresql_kill": "= 0",
    "store.faults.postgresql_restart": "= 0",
    "store.faults.power_cut": "= 0",
    "store.faults.migration_kill": "= 0",
    "store.faults.disk_full": "= 0",
    "store.faults.writers_sqlite": "= 0",
    "store.faults.writers_postgresql": "= 0",
    "store.faults.bit_flips_missed": "= 0",
    "envs.hostile_faults": "= 0",
    "envs.sandbox_escapes": "= 0",
    "envs.parser_faults": "= 0",
    "envs.control_ids_in_observations": "= 0",
    "envs.parser_p99_ms": "<= 1",
    "collect.vllm_rate_fraction": ">= 0.9",
    "collect.history_tokens_rerun": "= 0",
    "collect.kill_faults": "= 0",
    "collect.vllm_float32_logprob_difference": "<= 1e-3",
    "gpu.bfloat16_over_conventional": "<= 1.25",
    "gpu.update_speedup_detached": ">= 50",
    "gpu.update_speedup_exact": ">= 13",
    "gpu.update_speedup_detached_same_kernel": ">= 36",
    "gpu.update_speedup_exact_same_kernel": ">= 8.5",
    "gpu.peak_growth_g2_g8_percent": "<= 0.2",
    "gpu.peak_growth_g2_g32_percent": "<= 0.3",
    "gpu.plan_error_percent": "<= 5",
    "gpu.capture_fraction_of_kernel_rate": ">= 0.85",
    "gpu.positions_exact.smollm2_135m": ">= 1048576",
    "gpu.positions_exact.hybrid_2b": ">= 2097152",
    "gpu.positions_exact.sparse_8_layers": ">= 131072",
    "gpu.positions_detached.hybrid_27b": ">= 1048576",
    "gpu.positions_detached.hybrid_2b": ">= 4460000",
    "gpu.positions_detached.hybrid_9b": ">= 2097152",
    "gpu.positions_detached.sparse_8_layers": ">= 1048576",
    "gpu.trl_step_ratio": "reported",
    "recapture.frontier_difference.*": "= 0",
    "recapture.frontier_cost_over_ideal": "<= 1.1",
    "recapture.extension_cost_over_ideal": "<= 1.05",
    "recapture.stale_reads_served": "= 0",
    "recapture.bounded_kl": "reported",
    "recapture.bounded_cosine": "reported",
    "recapture.bounded_over_random": "reported",
    "parallel.float64_lifted.cp2": "<= 1e-10",
    "parallel.float64_lifted.cp4": "<= 1e-10",
    "parallel.float64_lifted.dp2": "<= 1e-10",
    "parallel.float64_lifted.ep2": "<= 1e-10",
    "parallel.float64_lifted.mixed": "<= 1e-10",
    "parallel.selections_differing": "= 0",
    "parallel.traffic_longest_over_shortest": "= 1",
    "parallel.rank_digest_mismatches": "= 0",
    "parallel.applied_twice_or_lost": "= 0",
    "parallel.state_bytes_ratio_cp4": "<= 1.05",
    "parallel.gpu.float32_parity": "<= 1e-4",
    "parallel.gpu.capture_fraction_of_linear": ">= 0.85",
    "learn.trl_difference_points": "reported",
    "learn.exact_minus_detached_points": "reported",
    "learn.tree_minus_flat_points": "reported",
    "learn.long_gain_points": "> 0",
    "learn.long_gain_over_truncated_points": "reported",
    "operate.view_page_ms": "<= 1000",
    "operate.training_kill_faults": "= 0",
    "operate.nonfinite_updates_applied": "= 0",
    "operate.docs_blocks_failing": "= 0",
    "operate.ci_seconds": "<= 1800",
}


def bound_of(figure: str) -> str:
    """The bound of a figure by its exact name or its `name.*` pattern; `ConfigError` where none is claimed."""
    if figure in BOUNDS and "*" not in figure:
        return BOUNDS[figure]
    for pattern, bound in BOUNDS.items():
        if pattern.endswith(".*") and fnmatch.fnmatchcase(figure, pattern) and not figure.endswith((".", "*")):
            return bound
    close = difflib.get_close_matches(figure, BOUNDS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else "add it to BOUNDS in longstraw_agents/figures.py first"
    raise ConfigError(f"no figure {figure!r} is claimed; {hint}")


def meets(value: float, bound: str) -> bool:
    """Whether `value` meets a bound such as "<= 0.5"; "reported" is always met."""
    if bound == "reported":
        return True
    comparison, limit = bound.split()
    return bool(COMPARISONS[comparison](value, float(limit)))


def record(
    figure: str,
    value: float,
    unit: str | None = None,
    command: str | None = None,
    trials: int | Sequence[float] | None = None,
    extra: Mapping[str, Any] | None = None,
    path: Path | None = None,
    measured: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write one measurement into docs/figures.json, replacing an older one, and return the entry.

    `command` is what reproduces it (default: this process's command line); `trials` their number, or the single values;
    `extra` is kept beside them under its own key (an interval, versions, shapes); `measured` is
    the `provenance` of a result file that the benchmark wrote elsewhere. Several processes may record at once.

    Raises `ConfigError` for a figure that is not claimed and `NonFiniteError` for NaN or infinity.
    """
    bound = bound_of(figure)
    origin = measured or provenance()
    if not math.isfinite(value):
        raise NonFiniteError(f"figure {figure} is {value}; a measurement must be finite: look at the check that made it")
    value = int(value) if isinstance(value, int) or float(value).is_integer() else float(f"{value:.6g}")
    entry: dict[str, Any] = {
        "figure": figure,
        "value": value,
        "unit": unit,
        "bound": bound,
        "holds": meets(value, bound),
        "command": command or _command_line(),
        "machine": origin["machine"],
        "commit": origin["commit"],
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "trials": list(trials) if isinstance(trials, Sequence) else trials,
    }
    if extra:
        entry["extra"] = dict(extra)
    path = path or FILE
    with locked(path):
        entries = {old["figure"]: old for old in read(path)} | {figure: entry}
        _write(path, [entries[name] for name in sorted(entries)])
    return entry


def provenance() -> dict[str, str]:
    """The machine and the commit that a measurement made here and now stands for; benchmarks keep it in their result files."""
    return {"machine": _machine(), "commit": _commit()}


def read(path: Path | None = None) -> list[dict[str, Any]]:
    """All recorded entries, sorted by figure; an empty list where none was ever recorded."""
    path = path or FILE
    if not path.exists():
        return []
    entries: list[dict[str, Any]] = json.loads(path.read_text())
    return sorted(entries, key=lambda entry: entry["figure"])


def never_measured(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names and patterns of BOUNDS that no entry answers."""
    names = [entry["figure"] for entry in entries]
    return [pattern for pattern in BOUNDS if not fnmatch.filter(names, pattern)]


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """All figures as text: those that hold, those that fall short, those never measured."""
    lines = []
    for title, chosen in (
        ("hold", [entry for entry in entries if entry["holds"]]),
        ("fall short", [entry for entry in entries if not entry["holds"]]),
    ):
        lines.append(f"{len(chosen)} figures {title}")
        for entry in chosen:
            value = f"{entry['value']:g} {entry['unit'] or ''}".strip()
            lines.append(f"  {entry['figure']:<56} {value:<24} {entry['bound']:<12} {entry['commit']}  {entry['command']}")
    missing = never_measured(entries)
    lines.append(f"{len(missing)} figures were never measured")
    lines += [f"  {name:<56} {'':<24} {BOUNDS[name]}" for name in missing]
    return "\n".join(lines)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock for the file; the lock lies in the temporary folder, so the checkout stays clean."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} does not exist; record figures in a checkout of the repository, not in an install")
    name = str(path.resolve()).replace(os.sep, "_")
    with open(Path(tempfile.gettempdir()) / f"longstraw{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, entries: list[dict[str, Any]]) -> None:
    """Replace the file in one step: a reader sees the old list or the new one, never half."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".figures-")
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps(entries, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)


def _command_line() -> str:
    script = Path(sys.argv[0])
    name = str(script.resolve().relative_to(ROOT)) if script.resolve().is_relative_to(ROOT) else script.name
    return " ".join(["python", name, *sys.argv[1:]] if name.endswith(".py") else [name, *sys.argv[1:]])


def _machine() -> str:
    """Cores, memory and, where torch is loaded already, the GPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        text += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return text


#: What checks write themselves does not make a checkout differ from its commit.
_WRITTEN = [f":!docs/{name}" for name in ("figures.json", "exactness.json", "exactness.md")]


def _commit() -> str:
    """The commit of the checkout with "+" when tracked files differ; LONGSTRAW_COMMIT for a tree that came without its git."""
    if os.environ.get("LONGSTRAW_COMMIT"):
        return os.environ["LONGSTRAW_COMMIT"]
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True, stderr=subprocess.DEVNULL).strip()
        status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN]
        changed = subprocess.check_output(status, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


if __name__ == "__main__":
    print(table(read()))
