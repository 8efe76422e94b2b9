"""The planner's forecasts against bytes that are counted while the real update runs, and what it concludes from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner

from longstraw_agents.cli import main
from longstraw_agents.commands.plan import parse_bytes
from longstraw_agents.errors import ConfigError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import fit
from longstraw_agents.trainer.live import LiveBytes
from longstraw_agents.trainer.models import LoraSettings, ModelConfig, add_adapter, without_weights
from longstraw_agents.trainer.pages import Placement
from longstraw_agents.trainer.plan import PlanConfig, Rates, forecast
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from tests import models as zoo
from tests.test_replay import trajectory

CONTEXT, RESPONSE, GROUP, CHUNK = 553, 40, 2, 128  # a prompt of four chunks


ADAPTER = LoraSettings(2)
LATENT = LoraSettings(2, targets=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """Writes a configuration of the zoo into a folder that a model can be made of."""

    def write(name: str, **changes: Any) -> str:
        _, config = zoo.CONFIGS[name]()
        for key, value in changes.items():
            setattr(config, key, value)
        config.save_pretrained(tmp_path)
        return str(tmp_path)

    return write


def group() -> list[Any]:
    random = np.random.default_rng(0)
    draw = lambda count: random.integers(3, zoo.VOCABULARY, count).tolist()
    shared = draw(CONTEXT - RESPONSE)
    mask = np.arange(CONTEXT) >= len(shared)
    return [trajectory(str(i), shared + draw(RESPONSE), mask) for i in range(GROUP)]


@pytest.mark.parametrize("gradient", ["exact", "detached"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "deepseek_v3", "glm_moe_dsa"])
def test_the_forecast_is_what_the_real_update_holds(name: str, gradient: str, folder: Callable[..., str]) -> None:
    """Storages of the real update's tensors are counted as they come and go; the forecast has seen only the configuration."""
    where, experts = folder(name), name in ("deepseek_v3", "glm_moe_dsa")
    adapter, dtype = (LATENT, "bfloat16") if experts else (ADAPTER, "float32")
    settings = transformers.AutoConfig.from_pretrained(where)
    model = add_adapter(transformers.AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype)), adapter)
    outputs = gradient == "exact" and name != "glm_moe_dsa"
    config = ReplayConfig(gradient, CHUNK, pack=GROUP * RESPONSE, logit_piece=64, placement=Placement(outputs=outputs))
    run = lambda: Engine(model, config).open(segment(group())).score()
    run()  # kernels are checked at their first use
    live = LiveBytes()
    live.hold([*model.parameters(), *model.buffers()])
    before = live.now
    with live:
        replay = Engine(model, config).open(segment(group()))
        replay.score()
        replay.backward(torch.full((GROUP * RESPONSE,), 0.1))
    pack = GROUP * RESPONSE
    plan = PlanConfig(CONTEXT, 2**40, GROUP, RESPONSE, gradient, pack=pack, logit_piece=64, stand_ins=False)
    found = forecast(without_weights(ModelConfig(where, dtype, adapter=adapter)), plan, CHUNK, outputs)
    held = replay.state.nbytes()
    assert found.gpu["state"] + found.gpu["outputs"] == pytest.approx(held["state"], rel=0.02)
    assert found.gpu["cotangent"] == pytest.approx(held["cotangent"], rel=0.05)
    above = found.peak - sum(found.gpu[kind] for kind in ("weights", "adapter", "optimizer"))
    assert above == pytest.approx(live.peak - before, rel=0.05)


def test_published_sizes(tmp_path: Path) -> None:
    """64 KiB of keys and values a token for Qwen3.6-27B's shape; 576 values of latents a token and layer for GLM-5's."""
    hybrid = transformers.Qwen3_5TextConfig(
        num_hidden_layers=64, hidden_size=5120, intermediate_size=17408, num_attention_heads=24, num_key_value_heads=4,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48, architectures=["Qwen3_5ForCausalLM"],
    )  # fmt: skip
    sparse = transformers.GlmMoeDsaConfig(
        num_hidden_layers=8, n_routed_experts=32, indexer_types=["full", "shared", "shared", "shared"] * 2,
        architectures=["GlmMoeDsaForCausalLM"],
    )  # fmt: skip
    found = []
    for config in (hybrid, sparse):
        config.save_pretrained(tmp_path)
        model = without_weights(ModelConfig(str(tmp_path), "bfloat16"))
        found.append(forecast(model, PlanConfig(300, 2**40, 2, 20, "detached"), 128))
    assert found[0].per_position["keys and values"] == 64 * 1024
    assert 53e9 < found[0].gpu["weights"] < 56e9
    assert found[1].per_position["latents"] == 576 * 2 * 8 and found[1].per_position["index keys"] == 128 * 2 * 2


def test_the_chunk_the_longest_context_and_what_to_change(folder: Callable[..., str]) -> None:
    model = without_weights(ModelConfig(folder("llama", num_hidden_layers=2), "bfloat16"))
    make = lambda memory, **more: fit.plan(model, PlanConfig(100_000, memory, 2, 64, **more))
    roomy = make(10**10)
    tight, poor = make(int(0.8 * roomy.forecast.peak)), make(5 * 10**7)
    assert roomy.fits and tight.fits and roomy.forecast.chunk > tight.forecast.chunk and not roomy.changes
    assert roomy.forecast.outputs and roomy.largest > 100_000
    assert not poor.fits and poor.largest < 100_000
    at = lambda context: forecast(model, PlanConfig(context, 1, 2, 64), min(1024, tight.forecast.chunk)).peak
    assert at(tight.largest) <= 1.01 * tight.budget < at(int(1.1 * tight.largest))
    peaks = {change.what.split(" ")[0]: change.peak for change in poor.changes}
    assert peaks.pop("branches") <= poor.forecast.peak
    assert set(peaks) == {"states", "gradient", "adapting", "2", "4", "8"} and max(peaks.values()) < poor.forecast.peak
    assert peaks["adapting"] < poor.forecast.peak - 10**7  # half of the cotangents


def test_branches_that_are_replayed_one_at_a_time_take_less(folder: Callable[..., str]) -> None:
    model = without_weights(ModelConfig(folder("llama", num_hidden_layers=2), "bfloat16"))
    many, one = (fit.plan(model, PlanConfig(2100, 10**6, group, 1000, "detached", chunk=512)) for group in (4, 1))
    found = next(change for change in many.changes if "trainer.replay.pack = 1000" in change.what)
    assert found.peak < many.forecast.peak - 10**7
    assert not any("trainer.replay.pack" in change.what for change in one.changes)


def test_the_command_says_whether_it_fits(folder: Callable[..., str], tmp_path: Path) -> None:
    where, report = folder("qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2), tmp_path / "plan.json"
    call = ["plan", "--model", where, "--context", "20000", "--group", "2", "--response", "64", "--json", str(report)]
    fits = CliRunner().invoke(main, [*call, "--gpu-memory", "80GiB", "--chunk", "1024"])
    assert fits.exit_code == 0 and "keys and values" in fits.output and "fits: peak" in fits.output, fits.output
    assert json.loads(report.read_text())["fits"] is True
    fails = CliRunner().invoke(main, [*call, "--gpu-memory", "1MB", "--chunk", "1024"])
    assert fails.exit_code == 1 and "DOES NOT FIT" in fails.output and "host memory" in fails.output, fails.output


def test_what_is_refused() -> None:
    assert (parse_bytes("141GB"), parse_bytes("80 GiB"), parse_bytes("1.5")) == (141 * 10**9, 80 * 2**30, 3 * 2**29)
    for text in ("much", "1TBx", "1.2.3GB", ""):
        with pytest.raises(ConfigError, match="141GB"):
            parse_bytes(text)
    with pytest.raises(ConfigError, match="prompt"):
        PlanConfig(100, 1, 2, 99)
    with pytest.raises(ConfigError, match="matrices"):
        Rates.from_dict({"matrices": 1})
    rates = Rates.from_dict({"attention": {"128": [400, 380]}, "memory": 2})
    assert rates.attention == {128: (400.0, 380.0)} and rates.memory == 2.0 and rates.matrix == Rates().matrix
