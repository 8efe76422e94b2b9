"""Approximate recapture: exact where all tokens are refreshed, refused by exact code, given up where it is not good enough."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longstraw_agents.errors import ConfigError, StaleStateError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer.approximate import ApproximateReplay, ApproximateState
from longstraw_agents.trainer.bounded import BoundedConfig, measure
from longstraw_agents.trainer.lifting import lifted
from longstraw_agents.trainer.optimizer import OptimizerConfig
from longstraw_agents.trainer.recapture import Recapture
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.shelf import ShelfConfig
from longstraw_agents.trainer.state import Run
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.types import Group
from tests import models as zoo
from tests.made import make_group, make_trajectory
from tests.test_frontier import freeze_below
from tests.test_recapture import CONFIG, ROOT, group, step


def measured_after_a_step(engine: Engine, share: float, choose: str = "drift") -> tuple[float, float, int]:
    """KL, cosine and layer runs of a refresh of `share` after one step of the weights."""
    tree = segment(group())
    approximate = ApproximateState.of(engine, tree.nodes[0].tokens[:-1])
    step(engine.model)
    approximate.refresh(share, choose)
    c = torch.linspace(-1, 1, len(tree.entry_node), dtype=torch.float64)
    found = measure(engine.open(tree), ApproximateReplay(engine, tree, approximate), c)
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    return found.kl, found.cosine, approximate.tokens_run


@pytest.mark.parametrize(
    ("name", "frontier"),
    [
        ("llama", 0), ("llama", 1), ("llama", 3), ("mistral", 1), ("gemma2", 0), ("qwen3_5", 1), ("qwen3_moe", 0),
        ("deepseek_v3", 1),
    ],
)  # fmt: skip
def test_a_refresh_of_all_tokens_is_exact(name: str, frontier: int) -> None:
    model = zoo.build(name, dtype=torch.float64)
    if frontier:
        freeze_below(model, frontier)
    with lifted():
        kl, cosine, _ = measured_after_a_step(Engine(model, CONFIG), 1.0)
    assert abs(kl) < 1e-12 and cosine > 1 - 1e-9


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_what_is_refreshed_brings_the_state_nearer(name: str) -> None:
    found = [measured_after_a_step(Engine(zoo.build(name, dtype=torch.float64), CONFIG), share) for share in (0.0, 0.5, 1.0)]
    kl = [value for value, _, _ in found]
    assert kl[0] > kl[1] > kl[2] and found[0][2] < found[1][2] < found[2][2]
    assert found[0][1] < 1 - 1e-4  # and stale is not good enough


def test_nothing_is_refreshed_where_nothing_changed() -> None:
    engine = Engine(zoo.build("llama"), CONFIG)
    approximate = ApproximateState.of(engine, segment(group()).nodes[0].tokens[:-1])
    approximate.refresh(1.0)
    assert approximate.tokens_run == 0


def test_exact_code_refuses_an_approximate_state() -> None:
    engine = Engine(zoo.build("llama"), CONFIG)
    tree = segment(group())
    inputs = tree.nodes[0].tokens[:-1]
    approximate = ApproximateState.of(engine, inputs)
    with pytest.raises(StaleStateError, match="not exact"):
        engine.decode(np.ones((1, 2)), Run(ROOT - 1, 2, 1, False, True), approximate)  # type: ignore[arg-type]
    fresh = Recapture.of(engine, ShelfConfig()).under(engine.stamps.stamps())
    span = next(fresh.walk("", inputs, 0, CONFIG.chunk))
    with pytest.raises(StaleStateError, match="not exact"):
        fresh.capture(span, inputs[:48], approximate)  # type: ignore[arg-type]
    replay = engine.open(tree)
    replay.state = approximate  # type: ignore[assignment]
    with pytest.raises((StaleStateError, AttributeError)):
        replay.score()


def groups() -> list[Group]:
    root = np.random.default_rng(1).integers(3, zoo.VOCABULARY, 120).tolist()
    paths = [root + [i + 5, 7 * i + 4, 9, 11 + i] for i in range(3)]
    members = [
        make_trajectory(path, [at >= 120 for at in range(len(path))], name=str(i), reward=float(i))
        for i, path in enumerate(paths)
    ]
    return [make_group(members)]


def updates(bounded: BoundedConfig | None, count: int = 6) -> tuple[list[dict], list[str], dict[str, torch.Tensor]]:
    model = zoo.build("llama", dtype=torch.float64)
    config = TrainerConfig(
        replay=ReplayConfig(chunk=32), bounded=bounded, optimizer=OptimizerConfig(learning_rate=1e-3), recapture=ShelfConfig()
    )
    trainer = Trainer(model, config)
    receipts = [trainer.update(groups()) for _ in range(count)]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return [receipt.bounded for receipt in receipts], [receipt.gradient for receipt in receipts], weights


def test_a_bound_that_is_never_met_leaves_training_exact() -> None:
    bounded, gradients, weights = updates(BoundedConfig(share=0.1, kl=0.0, cosine=1.0, audit=2))
    _, _, exact = updates(None)
    assert all(torch.equal(value, exact[name]) for name, value in weights.items())
    assert set(gradients) == {"exact"} and sum(receipt["approximate_trees"] for receipt in bounded) == 0
    audits = [len(receipt["audits"]) for receipt in bounded]
    assert audits == [0, 1, 0, 1, 0, 1]


def test_within_the_bound_steps_between_audits_are_approximate_and_say_so() -> None:
    bounded, gradients, _ = updates(BoundedConfig(share=0.5, kl=1.0, cosine=-1.0, audit=3))
    assert gradients == ["exact", "exact", "bounded", "bounded", "exact", "bounded"]
    assert bounded[1]["audits"][0]["kl"] > 0 and bounded[1]["audits"][0]["cosine"] < 1


def test_settings_out_of_range_are_refused() -> None:
    for settings in ({"share": 1.5}, {"kl": -1.0}, {"cosine": 2.0}, {"audit": 0}, {"choose": "luck"}, {"bytes": -1}):
        with pytest.raises(ConfigError):
            BoundedConfig(**settings)  # type: ignore[arg-type]
