"""Say before launch whether an update fits: bytes by kind and place, operations and time, and what to change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from longstraw_agents.errors import ConfigError
from longstraw_agents.terminal import json_option, write_json

_UNITS = {"": 2**30, "gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "b": 1}


@click.command()
@click.option("--model", "name", required=True, help="A folder with config.json (weights are not read), or a hub name.")
@click.option("--context", required=True, type=int, help="Tokens of a trajectory, its response included.")
@click.option("--group", default=8, show_default=True, help="Trajectories that share the prompt.")
@click.option("--response", default=512, show_default=True, help="Tokens of each trajectory's own.")
@click.option("--gpu-memory", required=True, help="Of one GPU: 141GB, 80GiB; a bare number is GiB.")
@click.option("--gpus", default=1, show_default=True, help="GPUs that share the context.")
@click.option("--gradient", default="exact", show_default=True, type=click.Choice(["exact", "detached"]))
@click.option("--place", default="device", show_default=True, type=click.Choice(["device", "host"]), help="Where states lie.")
@click.option("--weights", default=None, type=click.Choice(["host"]), help="Base weights in host memory, not on the GPU.")
@click.option("--chunk", default=None, type=int, help="Inputs of one run [default: the largest that fits].")
@click.option("--rank", default=8, show_default=True, help="Rank of the LoRA adapter on all linear layers.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]))
@click.option("--rates", "rates_path", type=click.Path(exists=True, path_type=Path), help="A GPU's rates [default: an H200's].")
@json_option
def plan(
    name: str, context: int, group: int, response: int, gpu_memory: str, gpus: int, gradient: str, place: str,
    weights: str | None, chunk: int | None, rank: int, dtype: str, rates_path: Path | None, json_path: Path | None,
) -> None:  # fmt: skip
    """Exit status 0 if the update fits, 1 if it does not."""
    memory = parse_bytes(gpu_memory)
    from longstraw_agents.commands import quiet_libraries
    from longstraw_agents.trainer.fit import plan as make
    from longstraw_agents.trainer.models import LoraSettings, ModelConfig, without_weights
    from longstraw_agents.trainer.plan import PlanConfig, Rates

    quiet_libraries()
    config = PlanConfig(context, memory, group, response, gradient, gpus, place, chunk, weights=weights)
    rates = Rates() if rates_path is None else Rates.from_dict(json.loads(rates_path.read_text()))
    model = without_weights(ModelConfig(name, dtype, adapter=LoraSettings(rank)))
    found = make(model, config, rates, lambda text: click.echo(f"... {text}", err=True))
    write_json(json_path, found.to_dict())
    _show(found)
    if not found.fits:
        raise SystemExit(1)


def parse_bytes(text: str) -> int:
    """Bytes of "141GB", "80 GiB" or "80" (GiB). Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or match[1].count(".") > 1:
        raise ConfigError(f"memory is {text!r}; write it as 141GB, 80GiB, or a number of GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.2f}"


def _show(found: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console, forecast = Console(), found.forecast
    table = Table("GiB", "on the GPU", "in host memory")
    for kind in forecast.gpu | forecast.host:
        on, off = forecast.gpu.get(kind), forecast.host.get(kind)
        table.add_row(kind, gib(on) if on is not None else "", gib(off) if off is not None else "")
    table.add_row("peak", gib(forecast.peak), gib(sum(forecast.host.values())))
    console.print(table)
    adds = [f"{size / 1024:,.2f} KiB of {what}" for what, size in forecast.per_position.items()]
    adds += [f"{forecast.per_chunk / 2**20:,.1f} MiB of recurrent states a chunk"] if forecast.per_chunk else []
    console.print(f"A position adds {', '.join(adds)}.", highlight=False)
    hosted = ["copied GiB"] if found.config.weights == "host" else []
    phases = Table("phase", "peak GiB", "attention TFLOP", "other TFLOP", *hosted, "seconds")
    for phase, of in forecast.phases.items():
        copied = [gib(of.copied)] if hosted else []
        work = [f"{of.attention / 1e12:,.1f}", f"{of.matrix / 1e12:,.1f}"]
        phases.add_row(phase, gib(of.peak), *work, *copied, f"{of.seconds:,.1f}")
    console.print(phases)
    kept = ", attention outputs kept" if forecast.outputs else ""
    verdict = "fits" if found.fits else "DOES NOT FIT"
    console.print(
        f"{verdict}: peak {gib(forecast.peak)} of {gib(found.budget)} GiB that an update can have; chunk {forecast.chunk}, "
        f"pack {found.config.pack}, logit piece {found.config.logit_piece}{kept}; "
        f"about {sum(p.seconds for p in forecast.phases.values()):,.0f} s. The longest context that fits: {found.largest:,}.",
        highlight=False,
    )  # fmt: skip
    for change in found.changes:
        console.print(f"{'would fit' if change.fits else 'not enough'}: {change.what}: {gib(change.peak)} GiB", highlight=False)
