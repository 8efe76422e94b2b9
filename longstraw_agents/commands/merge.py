"""Write a run's trained model as a plain one, its adapter merged, with a model card."""

from __future__ import annotations

from pathlib import Path

import click

from longstraw_agents.commands import open_loop, run_options
from longstraw_agents.terminal import json_option, write_json


@click.command()
@run_options
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@json_option
def merge(configuration: Path, settings: tuple[str, ...], out: Path, json_path: Path | None) -> None:
    """Merge the newest adapter of CONFIG.toml into its model and write it to OUT, with tokenizer and model card."""
    with open_loop(configuration, settings) as loop:
        from longstraw_agents.model_card import model_card
        from longstraw_agents.trainer.merging import merge as merge_model

        run = next(row for row in loop.store.runs() if row.run_id == loop.run_id)
        difference = merge_model(loop.model, loop.tokenizer, out)
        card = model_card(out.name, run.config, loop.store.steps(loop.run_id), loop.store.evaluations(loop.run_id))
        (out / "README.md").write_text(card, encoding="utf-8")
        loop.terminal.say(f"step {loop.done} merged into {out}; its logits differ by {difference:.1e} of their largest")
        write_json(json_path, {"folder": str(out), "step": loop.done, "relative_logit_difference": difference})
