"""Prove that a model's gradient is exact: compare it with conventional training, parameter class by parameter class."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from longstraw_agents.launch import launch
from longstraw_agents.terminal import json_option, write_json


@click.command()
@click.option("--model", "name", required=True, help="A folder, a hub name, or smollm2-135m-instruct.")
@click.option("--length", default=256, show_default=True, help="Tokens that all trajectories share.")
@click.option("--branch", default=48, show_default=True, help="Tokens of the longest branch.")
@click.option("--group", default=4, show_default=True, help="Trajectories.")
@click.option("--chunk", default=None, type=int, help="Inputs of one run [default: about a third of the length].")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float64", "float32", "bfloat16"]))
@click.option("--device", default="cpu", show_default=True)
@click.option("--full", is_flag=True, help="Verify training of all parameters instead of a LoRA adapter on all linear layers.")
@click.option("--seed", default=0, show_default=True)
@click.option("--unproven", is_flag=True, help="Try a model type that is not on the list of known ones.")
@click.option("--cp", default=1, show_default=True, type=click.IntRange(min=1), help="Processes that share the replay, for E3.")
@click.option("--weights", default=None, type=click.Choice(["nf4", "host"]), help="Base weights in 4 bits, or in host memory.")
@click.option("--kv-bits", "bits", default=None, type=click.Choice(["8"]), help="Also measure keys and values kept in 8 bits.")
@click.option("--record", is_flag=True, help="Write what was measured on smollm2-135m-instruct to docs/figures.json.")
@json_option
def verify(
    name: str, length: int, branch: int, group: int, chunk: int | None, dtype: str, device: str, full: bool, seed: int,
    unproven: bool, cp: int, weights: str | None, bits: str | None, record: bool, json_path: Path | None,
) -> None:  # fmt: skip
    """Exit status 0 if the evidence holds, 1 if it does not."""
    if cp > 1 and "RANK" not in os.environ:
        return launch([sys.executable, "-m", "longstraw_agents.cli", *sys.argv[1:]], cp)
    from longstraw_agents.cache import SMOLLM2
    from longstraw_agents.trainer import architectures, evidence
    from longstraw_agents.trainer.models import LoraSettings, ModelConfig, load_model
    from longstraw_agents.trainer.ranks import Layout, among
    from longstraw_agents.trainer.verification import VerifyConfig, take_part
    from longstraw_agents.trainer.verification import verify as run

    config = VerifyConfig(length, branch, group, chunk, seed, None if bits is None else int(bits))
    with among(Layout(cp=cp), device) as ranks:
        model, _ = load_model(ModelConfig(name, dtype, device, None if full else LoraSettings(), seed, weights))
        if not full:
            _randomize(model, seed)
        if unproven:
            architectures.accept(architectures.unwrap(model))
        if ranks.number > 0:
            return take_part(model, config, ranks)
        result = run(model, config, name, lambda text: click.echo(f"... {text}", err=True), ranks)
    path = evidence.store(model, result)
    write_json(json_path, result.to_dict())
    _show(result)
    click.echo(f"stored as {path}")
    if record and name == SMOLLM2 and weights is None and dtype == "float32":
        _record(result)
    if not result.holds:
        sys.exit(1)


def _record(result: Any) -> None:
    from longstraw_agents import figures

    about = {key: result.setting[key] for key in ("length", "group", "chunk", "versions")}
    figures.record("exact.verify_smollm2_seconds", result.seconds, "s", trials=1, extra=about)
    figures.record("exact.float32_global.smollm2_135m", result.checks["E4"].value, "relative error", extra=about)
    figures.record("exact.detached_relative_error.smollm2_135m", result.checks["control"].value, "relative error", extra=about)


def _randomize(model: Any, seed: int) -> None:
    """A new adapter's B is zero, and with it every gradient of A: draw it, so that the comparison sees A."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            values = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.data.copy_(values.to(parameter))


def _show(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console, setting = Console(), result.setting
    console.print(
        f"{result.model}: {setting['model_type']}, {setting['layers']} layers, {setting['dtype']} on {setting['device']}; "
        f"{setting['group']} trajectories on {setting['length']} shared tokens in chunks of {setting['chunk']}; "
        f"{result.seconds:.1f} s", highlight=False,
    )  # fmt: skip
    own = any("conventional" in row for row in result.classes)
    table = Table("parameter class", "error", *(["conventional's own"] if own else []), "without reverse", "worst tensor")
    for row in result.classes:
        cells = [row["class"], f"{row['error']:.1e}", *([f"{row['conventional']:.1e}"] if own else []), f"{row['detached']:.1e}"]
        table.add_row(*cells, f"{row['worst']:.1e} {row['worst_name']}")
    console.print(table)
    for label, check in result.checks.items():
        verdict = {True: "holds", False: "FAILS", None: "not applicable"}[check.holds]
        console.print(f"{label:<8} {verdict:<15} {check.value:.2e} (bound {check.bound:g}): {check.what}", highlight=False)
    if result.rounded is not None:
        console.print(
            "keys and values in 8 bits: gradient's relative error {global_relative:.1e}, cosine {cosine:.6f}, "
            "largest difference of a log-probability {logp:.1e} nats".format(**result.rounded), highlight=False,
        )  # fmt: skip
    flips = {kind: count for kind, count in result.flips.items() if count}
    if flips:
        console.print(f"decisions that a recomputation would have made otherwise: {flips}", highlight=False)
