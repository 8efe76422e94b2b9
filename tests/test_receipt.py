"""What a receipt records of single tokens is what conventional training sees there."""

from __future__ import annotations

import models as zoo
import numpy as np
import pytest
import torch
from made import make_group, make_trajectory

from longstraw_agents.trainer.conventional import log_probabilities, loss_positions
from longstraw_agents.trainer.credit import packed, per_token, unpacked
from longstraw_agents.trainer.loss import LossConfig
from longstraw_agents.trainer.update import Trainer, TrainerConfig


@pytest.mark.parametrize("cap", [2.0, None], ids=["scored", "not scored"])
def test_log_ratios_and_credit_of_each_token(cap: float | None) -> None:
    model = zoo.build("llama", dtype=torch.float64)
    root = np.random.default_rng(1).integers(3, zoo.VOCABULARY, 40).tolist()
    members = [
        make_trajectory([*root, i + 5, 9, 11], [False] * 40 + [True] * 3, name=f"t{i}", reward=float(i % 2), behaviour=-2.5)
        for i in range(3)
    ]
    with torch.no_grad():
        expected = {t.trajectory_id: log_probabilities(model, t.tokens, loss_positions(t)).numpy() + 2.5 for t in members}
    receipt = Trainer(model, TrainerConfig(loss=LossConfig(mismatch_cap=cap))).update([make_group(members)]).to_dict()
    assert list(receipt["log_ratio"]) == list(receipt["credit"]) == list(expected)
    for name, values in expected.items():
        assert np.allclose(unpacked(receipt["log_ratio"][name]), values, rtol=2e-3)
        assert np.flatnonzero(~np.isnan(per_token(receipt["credit"][name], 43))).tolist() == [40, 41, 42]


def test_packed_numbers_come_back_to_three_digits() -> None:
    values = np.array([0.0, -1.5, 0.333333, 11.75, 1e-4])
    assert np.allclose(unpacked(packed(values)), values, rtol=1e-3) and unpacked(packed([])).shape == (0,)
