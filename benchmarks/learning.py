"""Does training make agents better, and as well as the tool one would otherwise use? `python -m benchmarks.learning --help`.

    all     start the arms of all experiments as processes, keep their progress in one file, stop them at the deadline
    arm     one of them, in this process
    stretch the model with a stretched rotary embedding, as the long arms use it
    report  that file as tables, plots and figures

Experiments (arms in `learning_arms.py` and `learning_long.py`): exact against detached and conventional gradients; trees with
node credit against flat groups; ours against TRL's trainer; training on trajectories of more than 100,000 tokens against
training on their ends. Every seed draws its own tasks, samples and adapter; held-out tasks are the same for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from longstraw_agents import figures

ROOT = Path(__file__).resolve().parents[1]
#: Kinds of arms, in the order in which they are started.
LONG = ("long", "truncated")
GRADIENTS = ("exact", "detached", "conventional", "exact2", "detached2", "conventional2")
KINDS = (*LONG, *GRADIENTS, "flat", "tree", "ours", "trl")
POLL = 2.0  # seconds
LOG_CHARS = 4000


def names(kinds: tuple[str, ...], seeds: int) -> list[str]:
    """Every arm's name; the long experiment has one seed."""
    return [f"{kind}-{seed}" for kind in KINDS if kind in kinds for seed in range(1 if kind in LONG else seeds)]


def kind_of(name: str) -> str:
    """An arm's kind, from its name."""
    return name.rpartition("-")[0]


class Arms:
    """The processes of all arms: at most `jobs` at once. Each long one has a GPU of its own, from the last one down; of those
    that are left the gradient experiments have the first, the other two the last. Gradient experiments alone spread by seed."""

    def __init__(self, waiting: list[str], jobs: int, gpus: int, work: Path, options: list[str]) -> None:
        self.waiting, self.jobs, self.gpus, self.work, self.options = waiting, jobs, gpus, work, options
        self.kinds = {kind_of(name) for name in waiting}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.codes: dict[str, int] = {}

    def step(self) -> bool:
        """Note which have ended, start what there is room for; whether any is running."""
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                self.codes[name] = self.running.pop(name).returncode
                click.echo(f"{name} ended with code {self.codes[name]}")
        while self.waiting and len(self.running) < self.jobs:
            self._start(self.waiting.pop(0))
        return bool(self.running)

    def _start(self, name: str) -> None:
        gpu, alone = self._gpu(kind_of(name)), self.kinds <= set(GRADIENTS)
        gpu = int(name.rpartition("-")[2]) % self.gpus if alone else gpu
        given = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": str(gpu),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([given] if given else [])]),
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.learning", "arm", name, *self.options, *self._memory(name)]
        with open(self.work / f"{name}.log", "wb") as log:
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)

    def _gpu(self, kind: str) -> int:
        long = [each for each in LONG if each in self.kinds]
        if kind in long:
            return max(0, self.gpus - 1 - long.index(kind))
        return 0 if kind in GRADIENTS else max(0, self.gpus - len(long) - 1)

    def _memory(self, name: str) -> list[str]:
        """The option that keeps two long arms on one GPU from taking each other's memory, and what other arms there need."""
        kind = kind_of(name)
        on = [self._gpu(each) for each in self.kinds]
        if kind not in LONG or on.count(self._gpu(kind)) == 1:
            return []
        sharing = sum(self._gpu(each) == self._gpu(kind) for each in self.kinds if each in LONG)
        return ["--memory", str((0.96 if on.count(self._gpu(kind)) == sharing else 0.6) / sharing)]

    def stop(self) -> None:
        """End what is still running."""
        for name, process in self.running.items():
            process.terminate()
            click.echo(f"{name} was stopped")
        for process in self.running.values():
            process.wait(20)

    def results(self) -> dict[str, Any]:
        """Each arm's progress, its exit code, and the end of its log where it failed or wrote nothing."""
        found: dict[str, Any] = {}
        for log in sorted(self.work.glob("*.log")):
            path, name = log.with_suffix(".json"), log.stem
            found[name] = {"code": self.codes.get(name), "progress": json.loads(path.read_text()) if path.exists() else None}
            if self.codes.get(name) or not path.exists():
                found[name]["log"] = log.read_text(errors="replace")[-LOG_CHARS:]
        return found


@click.group()
def main() -> None:
    """Learning experiments."""


def shared(command: Any) -> Any:
    """The options of an arm, which `all` hands on."""
    for option in (
        click.option("--scale", type=click.Choice(["full", "small"]), default="full", show_default=True),
        click.option("--model", default="smollm2-135m-instruct", show_default=True, help="That, or a folder of its tokenizer."),
        click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True),
        click.option("--work", type=click.Path(path_type=Path), default=Path("runs/learning"), show_default=True,
                     help="Where runs, logs and progress lie; a folder in memory spares the disk."),
    ):  # fmt: skip
        command = option(command)
    return command


@main.command("all")
@shared
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Which arms.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--jobs", default=23, show_default=True, help="Arms at once.")
@click.option("--gpus", default=1, show_default=True)
@click.option("--deadline", default=520.0, show_default=True, help="Seconds from now at which the last arm has ended.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for learning.json.")
def run_all(
    scale: str, model: str, device: str, work: Path, kinds: str, seeds: int, jobs: int, gpus: int, deadline: float, out: Path
) -> None:
    """Start all arms and keep their progress in OUT/learning.json."""
    ends = time.time() + deadline
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    options = ["--scale", scale, "--model", model, "--device", device, "--work", str(work.resolve())]
    options += ["--until", str(ends - 20.0)]
    arms = Arms(names(tuple(kinds.split(",")), seeds), jobs, gpus, work, options)
    command = f"python -m benchmarks.learning all --kinds {kinds} --scale {scale} --model {model} --seeds {seeds} --gpus {gpus}"
    command += f" --deadline {deadline:g}"
    head = {"measured": figures.provenance(), "command": command, "began": time.time()}
    while arms.step() and time.time() < ends:
        _write(out, head | {"arms": arms.results()})
        time.sleep(POLL)
    arms.stop()
    _write(out, head | {"arms": arms.results()})
    failed = sorted(name for name, result in arms.results().items() if result["code"])
    click.echo(f"{len(arms.codes)} arms ended, {len(failed)} of them failed: {', '.join(failed) or 'none'}")


def _write(out: Path, values: dict[str, Any]) -> None:
    hidden = out / ".learning.json"
    hidden.write_text(json.dumps(values))
    os.replace(hidden, out / "learning.json")


@main.command()
@click.argument("name")
@shared
@click.option("--until", default=None, type=float, help="Unix time at which to end; by default in an hour.")
@click.option("--memory", default=None, type=float, help="Share of the GPU's memory that a long arm may take; all by default.")
def arm(name: str, scale: str, model: str, device: str, work: Path, until: float | None, memory: float | None) -> None:
    """Run the arm NAME, such as exact-0."""
    from benchmarks.learning_arms import Arm, run_arm, run_trl
    from benchmarks.learning_long import run_long

    work.mkdir(parents=True, exist_ok=True)
    found = Arm(name, model, device, scale, work / name, work / f"{name}.json", until or time.time() + 3600, memory)
    if found.kind not in KINDS:
        raise click.BadParameter(f"{name}: an arm is one of {', '.join(KINDS)} and a seed, such as exact-0")
    run = run_long if found.kind in LONG else run_trl if found.kind == "trl" else run_arm
    run(found)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", default="smollm2-135m-instruct", show_default=True, help="That, or a model's folder.")
@click.option("--factor", default=16, show_default=True, help="Times the positions that it was trained on.")
def stretch(folder: Path, model: str, factor: int) -> None:
    """Write the model into FOLDER with its rotary embedding stretched (YaRN), as the long arms use it."""
    from benchmarks.learning_long import extended

    extended(model, folder, factor)
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    click.echo(f"{folder} has {positions:,} positions")


@main.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--without", default="", help="Kinds of arms to leave out, with commas.")
@click.option("--record", is_flag=True, help="Write the figures, and the tables and plots of docs/learning.md.")
def report(results: tuple[Path, ...], without: str, record: bool) -> None:
    """Files of `all` as tables and figures; where two have an arm, the later file's is taken."""
    from benchmarks.learning_report import Report

    files = [json.loads(path.read_text()) for path in results]
    for values in files:
        values["arms"] = {name: arm for name, arm in values["arms"].items() if kind_of(name) not in without.split(",")}
    found = Report(*files)
    click.echo(found.tables())
    if record:
        found.record()


if __name__ == "__main__":
    main()
