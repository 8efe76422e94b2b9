"""Losses against numbers worked out by hand, against a padded reference, and against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from made import flat_group, make_group, make_trajectory

from longstraw_agents.errors import ConfigError, GroupError, NonFiniteError, TokenError
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer.loss import CLIP_RANGES, LossBatch, LossConfig, coefficients, make_batch, policy_loss


def config(name: str, **settings) -> LossConfig:
    return LossConfig(name, length_constant=10 if name == "dr_grpo" else None, **settings)


def batch(lengths, advantages, old, *, behaviour=None, reference=None, groups=None, weights=None) -> LossBatch:
    """Trajectory i has `lengths[i]` entries and one advantage; `old` and the rest are flat."""
    groups = [0] * len(lengths) if groups is None else groups
    weights = torch.tensor([1.0] * len(lengths) if weights is None else weights, dtype=torch.float64)
    repeats, of_group = torch.tensor(lengths), torch.tensor(groups)
    old = torch.as_tensor(old, dtype=torch.float64)
    return LossBatch(
        trajectory=torch.arange(len(lengths)).repeat_interleave(repeats),
        group=of_group.repeat_interleave(repeats),
        advantage=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(repeats),
        behaviour=old if behaviour is None else torch.as_tensor(behaviour, dtype=torch.float64),
        old=old,
        reference=None if reference is None else torch.as_tensor(reference, dtype=torch.float64),
        weight=weights.repeat_interleave(repeats),
        group_weight=torch.zeros(max(groups) + 1, dtype=torch.float64).index_add(0, of_group, weights),
        trajectory_ids=tuple(f"t{i}" for i in range(len(lengths))),
        group_ids=tuple(f"g{i}" for i in range(max(groups) + 1)),
    )


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def close(value, wanted) -> bool:
    return np.allclose(np.asarray(value), np.asarray(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_clipped_example(name):
    """Three members, two tokens each, 0.25 against 0.20, A = 1, clip [0.8, 1.2]: -1.2, whatever the loss's default range."""
    found = coefficients(
        LossConfig(name, clip_low=0.2, clip_high=0.2), logs(*[0.25] * 6), batch([2, 2, 2], [1, 1, 1], logs(*[0.2] * 6))
    )
    assert close(found.loss, -1.2) and close(found.logp, np.zeros(6))
    assert found.metrics["clip_fraction"] == found.metrics["clip_high_fraction"] == 1.0
    assert close(found.metrics["ratio_mean"], 1.25)


@pytest.mark.parametrize(
    "name, loss, c",
    [
        ("grpo", 0.0, [-1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("gspo", 0.0, [-1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("dapo", 0.5, [-1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("dr_grpo", 0.1, [-1 / 20, 1 / 20, 1 / 20, 1 / 20]),
        ("cispo", 0.5 * math.log(0.5), [-1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("supervised", 0.5 * math.log(0.5), [-1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_how_tokens_are_averaged(name, loss, c):
    """A trajectory of one token with A = 1 and one of three with A = -1, at ratio 1."""
    logp = logs(0.5, 0.5, 0.5, 0.5)
    found = coefficients(config(name), logp, batch([1, 3], [1, -1], logp))
    assert close(found.loss, loss) and close(found.logp, c)


def test_groups_of_different_size_weigh_the_same_in_grpo():
    logp = logs(*[0.5] * 4)
    found = coefficients(LossConfig("grpo"), logp, batch([1, 1, 2], [1, -1, 2], logp, groups=[0, 0, 1]))
    assert close(found.logp, [-1 / 4, 1 / 4, -1 / 2, -1 / 2])


@pytest.mark.parametrize(
    "ratio, advantage, name, loss, c, clipped",
    [
        (1.5, 1, "grpo", -1.2, 0.0, 1),
        (1.5, -1, "grpo", 1.5, 1.5, 0),
        (0.5, 1, "grpo", -0.5, -0.5, 0),
        (0.5, -1, "grpo", 0.8, 0.0, 1),
        (1.25, 1, "dapo", -1.25, -1.25, 0),
        (1.5, 1, "dapo", -1.28, 0.0, 1),
        (1.5, 1, "dr_grpo", -0.12, 0.0, 1),
        (1.5, 1, "gspo", -1.0004, 0.0, 1),
        (0.5, -1, "gspo", 0.9997, 0.0, 1),
        (1.5, 1, "cispo", -1.5 * math.log(0.15), -1.5, 0),
        (6.0, 1, "cispo", -5 * math.log(0.6), -5.0, 1),
        (0.5, -1, "cispo", 0.5 * math.log(0.05), 0.5, 0),
    ],
)
def test_one_token(ratio, advantage, name, loss, c, clipped):
    found = coefficients(config(name), logs(0.1 * ratio), batch([1], [advantage], logs(0.1)))
    assert close(found.loss, loss) and close(found.logp, [c])
    assert found.metrics["clip_fraction"] == clipped and close(found.metrics["ratio_max"], ratio)


def test_gspo_takes_the_geometric_mean_of_the_sequence():
    old = logs(0.1, 0.1)
    found = coefficients(LossConfig("gspo", clip_high=0.2), logs(0.11, 0.13), batch([2], [1], old))
    ratio = math.sqrt(1.1 * 1.3)
    assert close(found.loss, -ratio) and close(found.logp, [-ratio / 2, -ratio / 2])
    token_by_token = coefficients(LossConfig("grpo"), logs(0.11, 0.13), batch([2], [1], old))
    assert close(token_by_token.loss, -(1.1 + 1.2) / 2)


def test_kl_to_the_reference():
    logp = logs(0.5)
    found = coefficients(LossConfig(kl_weight=0.1), logp, batch([1], [0], logp, reference=logs(0.25)))
    assert close(found.loss, 0.1 * (0.5 + math.log(2) - 1)) and close(found.logp, [0.1 * 0.5])
    assert close(found.metrics["kl_reference"], 0.5 + math.log(2) - 1)


@pytest.mark.parametrize(
    "behaviour, cap, weight", [(0.2, 2.0, 2.0), (0.1, 2.0, 2.0), (0.8, 2.0, 0.5), (0.1, None, 1.0), (0.1, 3.0, 3.0)]
)
def test_mismatch_weight_is_truncated_and_constant(behaviour, cap, weight):
    """old = 0.4; the weight multiplies loss and derivative, and passes no gradient of its own."""
    found = coefficients(LossConfig(mismatch_cap=cap), logs(0.4), batch([1], [1], logs(0.4), behaviour=logs(behaviour)))
    assert close(found.loss, -weight) and close(found.logp, [-weight])
    assert close(found.metrics["mismatch_max"], abs(math.log(0.4 / behaviour)))
    assert close(found.metrics["mismatch_kl"], 0.4 / behaviour - 1 - math.log(0.4 / behaviour))
    if cap is not None:
        assert found.metrics["mismatch_capped_fraction"] == (0.4 / behaviour > cap)


def test_entropy_bonus_is_a_second_vector():
    logp = logs(0.5, 0.5)
    entropy = torch.tensor([1.0, 3.0], dtype=torch.float64)
    found = coefficients(LossConfig(entropy_weight=0.2), logp, batch([2], [0], logp), entropy)
    assert close(found.loss, -0.2 * 2) and close(found.entropy, [-0.1, -0.1]) and close(found.metrics["entropy"], 2.0)


@pytest.mark.parametrize("name", CLIP_RANGES)
def test_a_trajectory_without_entries_adds_a_finite_zero(name):
    logp = logs(0.5, 0.5)
    with_masked = coefficients(config(name), logp, batch([2, 0], [1, -1], logp))
    alone = coefficients(config(name), logp, batch([2], [1], logp))
    counts_it = name in ("grpo", "gspo", "dr_grpo")
    assert close(with_masked.logp, alone.logp / (2 if counts_it else 1))
    assert with_masked.metrics["masked_trajectories"] == 1


@pytest.mark.parametrize("name", CLIP_RANGES)
def test_nothing_but_masks_is_a_finite_zero(name):
    found = coefficients(config(name), torch.zeros(0), batch([0, 0], [1, -1], []))
    assert found.loss == 0.0 and len(found.logp) == 0 and all(math.isfinite(value) for value in found.metrics.values())


def padded_loss(logp, old, advantage, mask, name):
    """The published form over [trajectories, longest], with one mask above and below."""
    low, high = CLIP_RANGES[name]
    ratio = (logp - old).exp()
    loss = -torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - low, 1 + high) * advantage[:, None]) * mask
    if name == "grpo":
        return (loss.sum(1) / mask.sum(1)).mean()
    return loss.sum() / mask.sum() if name == "dapo" else loss.sum() / (len(mask) * 10)


numbers = st.floats(-1, 1, allow_nan=False)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.sampled_from(["grpo", "dapo", "dr_grpo"]))
def test_flat_entries_equal_the_padded_form(data, lengths, name):
    total = sum(lengths)
    logp = torch.tensor(data.draw(st.lists(numbers, min_size=total, max_size=total)), dtype=torch.float64) - 2
    old = torch.tensor(data.draw(st.lists(numbers, min_size=total, max_size=total)), dtype=torch.float64) - 2
    advantages = data.draw(st.lists(numbers, min_size=len(lengths), max_size=len(lengths)))
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    inside = mask.bool()
    padded = torch.full_like(mask, -7.0).masked_scatter(inside, logp).requires_grad_()
    padded_old = torch.full_like(mask, -9.0).masked_scatter(inside, old)
    wanted = padded_loss(padded, padded_old, torch.tensor(advantages, dtype=torch.float64), mask, name)
    found = coefficients(config(name), logp, batch(lengths, advantages, old))
    assert close(found.loss, wanted.item())
    assert close(found.logp, torch.autograd.grad(wanted, padded)[0][inside])


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(["grpo", "dapo", "dr_grpo", "supervised"]))
def test_coefficients_are_the_derivative(data, name):
    """Central differences of the loss itself."""
    draw = lambda low, high: torch.tensor(data.draw(st.lists(st.floats(low, high), min_size=6, max_size=6)), dtype=torch.float64)
    logp, old, behaviour, reference, entropy = draw(-3, -1), draw(-3, -1), draw(-3, -1), draw(-3, -1), draw(0, 2)
    corners = torch.tensor([0.8, 1.2, 1.28], dtype=torch.float64)[:, None]
    assume(float(((logp - old).exp() - corners).abs().min()) > 1e-5)  # at a corner the two sides differ
    made = batch([2, 1, 3], [1.0, -0.5, 0.25], old, behaviour=behaviour, reference=reference, groups=[0, 0, 1])
    chosen = config(name, kl_weight=0.1, entropy_weight=0.05)
    found = coefficients(chosen, logp, made, entropy)
    for index in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[index] = 1e-6
        by_logp = [float(policy_loss(logp + sign * step, made, chosen, entropy)[0]) for sign in (1, -1)]
        by_entropy = [float(policy_loss(logp, made, chosen, entropy + sign * step)[0]) for sign in (1, -1)]
        assert abs((by_logp[0] - by_logp[1]) / 2e-6 - float(found.logp[index])) < 1e-7
        assert abs((by_entropy[0] - by_entropy[1]) / 2e-6 - float(found.entropy[index])) < 1e-7


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-3, -1), min_size=5, max_size=5), st.floats(-1, 1))
def test_gspo_equals_its_sequence_form(logp, advantage):
    logp, old = torch.tensor(logp, dtype=torch.float64), torch.full((5,), -2.0, dtype=torch.float64)
    free = logp.clone().requires_grad_()
    ratios = torch.stack([(free[:2] - old[:2]).mean().exp(), (free[2:] - old[2:]).mean().exp()])
    signs = torch.tensor([advantage, -advantage], dtype=torch.float64)
    wanted = -torch.minimum(ratios * signs, ratios.clamp(0.8, 1.2) * signs).mean()
    found = coefficients(LossConfig("gspo", clip_low=0.2, clip_high=0.2), logp, batch([2, 3], [advantage, -advantage], old))
    assert close(found.loss, wanted.item()) and close(found.logp, torch.autograd.grad(wanted, free)[0])


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "cispo", "supervised"])
def test_splitting_an_episode_by_its_tokens_changes_no_loss(name):
    logp, old = logs(0.3, 0.2, 0.25, 0.1, 0.4), logs(0.28, 0.25, 0.2, 0.1, 0.3)
    whole = coefficients(config(name), logp, batch([2, 3], [1, -0.5], old))
    split = coefficients(config(name), logp, batch([2, 1, 2], [1, -0.5, -0.5], old, weights=[1, 1 / 3, 2 / 3]))
    assert close(whole.loss, split.loss) and close(whole.logp, split.logp)


def test_batch_of_groups_follows_the_order_of_a_tree():
    shared = [7, 8, 9, 10]
    groups = [
        make_group([make_trajectory([*shared, 11], [0, 0, 1, 1, 1], name="a", behaviour=-0.1),
                    make_trajectory([*shared, 12, 13], [0, 0, 1, 0, 1, 1], name="b", behaviour=-0.2, weight=0.5)], "g0"),
        make_group([make_trajectory([5, 6], name="c", behaviour=-0.3)], "g1"),
    ]  # fmt: skip
    advantages = [[np.full(3, 1.0), np.full(3, -1.0)], [np.full(1, 0.5)]]
    made = make_batch(list(zip(groups, advantages, strict=True)), torch.arange(7, dtype=torch.float64))
    tree = segment([t for group in groups for t in group.trajectories])
    assert made.trajectory.tolist() == tree.entry_trajectory.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert made.group.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert made.advantage.tolist() == [1, 1, 1, -1, -1, -1, 0.5]
    assert np.allclose(made.behaviour, [-0.1] * 3 + [-0.2] * 3 + [-0.3])
    assert made.weight.tolist() == [1, 1, 1, 0.5, 0.5, 0.5, 1] and made.group_weight.tolist() == [1.5, 1]
    assert made.name(6) == "group g1, trajectory c"


def test_batch_refuses_what_does_not_fit():
    group = flat_group([1.0, 0.0])
    with pytest.raises(TokenError, match="5 old"):
        make_batch([(group, [np.ones(2), np.ones(2)])], torch.zeros(5))
    masked = make_group([make_trajectory([1, 2], [0, 0])], "all-masked")
    with pytest.raises(GroupError, match="all-masked"):
        make_batch([(group, [np.ones(2), np.ones(2)]), (masked, [np.ones(0)])], torch.zeros(4))


@pytest.mark.parametrize("which", ["log-probability", "old", "behaviour", "reference", "advantage", "entropy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_name(which, value):
    names = ("log-probability", "old", "behaviour", "reference", "entropy")
    vectors = {name: torch.full((4,), -1.0, dtype=torch.float64) for name in names}
    if which != "advantage":
        vectors[which][2] = value
    made = batch([2, 2], [1, value if which == "advantage" else -1], vectors["old"], behaviour=vectors["behaviour"],
                 reference=vectors["reference"], groups=[0, 1])  # fmt: skip
    with pytest.raises(NonFiniteError, match=f"the {which}.*group g1, trajectory t1"):
        coefficients(LossConfig(kl_weight=0.1), vectors["log-probability"], made, vectors["entropy"])


def test_an_overflowing_ratio_is_refused_by_name():
    with pytest.raises(NonFiniteError, match="group g0, trajectory t1"):
        coefficients(LossConfig(), torch.tensor([-1.0, 800.0]), batch([1, 1], [1, -1], [-1.0, -1.0]))


def test_a_callable_takes_the_place_of_a_name():
    logp = logs(0.5, 0.25)
    made = batch([1, 1], [2, -1], logp)
    found = coefficients(lambda logp, batch, entropy: -(logp * batch.advantage).sum(), logp, made)
    assert close(found.logp, [-2, 1]) and found.metrics == {}
    with pytest.raises(NonFiniteError, match="loss"):
        coefficients(lambda logp, batch, entropy: (logp * math.nan).sum(), logp, made)
    with pytest.raises(ConfigError, match="one number"):
        coefficients(lambda logp, batch, entropy: logp, logp, made)
    with pytest.raises(ConfigError, match="depend"):
        coefficients(lambda logp, batch, entropy: logp.detach().sum(), logp, made)


@pytest.mark.parametrize("name", CLIP_RANGES)
def test_first_step_without_scores(name):
    """Where it is said that scores are not needed, zeros in place of log-probabilities give the same coefficients."""
    chosen = config(name, mismatch_cap=None, entropy_weight=0.1)
    assert not chosen.first_step_needs_scores
    assert config(name).first_step_needs_scores == (name != "supervised")
    logp, entropy = logs(0.5, 0.2, 0.1), torch.ones(3, dtype=torch.float64)
    scored = coefficients(chosen, logp, batch([1, 2], [1, -1], logp), entropy)
    skipped = coefficients(chosen, torch.zeros(3, dtype=torch.float64), batch([1, 2], [1, -1], torch.zeros(3)), entropy)
    assert close(scored.logp, skipped.logp) and close(scored.entropy, skipped.entropy)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "ppo"},
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"kl_weight": math.nan},
        {"entropy_weight": -1.0},
        {"mismatch_cap": 0.0},
        {"name": "dr_grpo"},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        LossConfig(**settings)


def test_missing_vectors_are_refused():
    logp = logs(0.5)
    with pytest.raises(ConfigError, match="reference"):
        coefficients(LossConfig(kl_weight=0.1), logp, batch([1], [1], logp))
    with pytest.raises(ConfigError, match="entropies"):
        coefficients(LossConfig(entropy_weight=0.1), logp, batch([1], [1], logp))
    with pytest.raises(TokenError, match="shape"):
        coefficients(LossConfig(), logs(0.5, 0.5), batch([1], [1], logp))
