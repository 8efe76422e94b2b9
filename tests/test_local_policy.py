"""The local policy against the untouched model: what it records is what the model says, whatever it keeps and shares."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from longstraw_agents.errors import PolicyError, TokenError  # noqa: E402
from longstraw_agents.policies import SampleRequest, Sampling  # noqa: E402
from longstraw_agents.policies.local import LocalPolicy, LocalPolicyConfig, choose  # noqa: E402

VOCAB, STOP = 97, 2
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
GQA = dict(SMALL, num_key_value_heads=2, head_dim=8)


def build(kind: str):
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**GQA)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**GQA)
    elif kind == "mistral":
        config = transformers.MistralConfig(**GQA, sliding_window=7)
    elif kind == "gemma3":
        config = transformers.Gemma3TextConfig(
            **GQA, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        )
    else:
        config = transformers.Qwen3_5TextConfig(
            **GQA,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(1.0 if parameter.ndim < 2 else 4.0)  # flat distributions would hide errors
    return model


def reference_logp(model, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probability of each token from 1 on, by one plain forward over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    logp = torch.log_softmax(logits.float() / temperature, -1)
    return logp[:-1].gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0].numpy()


async def episodes(policy: LocalPolicy, prompts: list[np.ndarray], turns: int, *, stagger: bool = False, **sampling):
    """One episode per prompt, with observations of different length between turns; gives tokens, mask, behaviour."""

    async def one(number: int, prompt: np.ndarray):
        tokens, behaviour = prompt, np.full(len(prompt), np.nan)
        for turn in range(turns):
            if stagger:
                await asyncio.sleep(0.002 * number)
            got = await policy.sample(
                SampleRequest(f"s{number}", tokens, 5 + number % 3, seed=100 * number + turn, sampling=Sampling(**sampling))
            )
            observation = np.arange(3 + (number * 7 + turn) % 9, dtype=np.int32) + 5
            tokens = np.concatenate([tokens, got.ids, observation])
            behaviour = np.concatenate([behaviour, got.behaviour, np.full(len(observation), np.nan)])
            assert (got.finish == "stop") == (got.ids[-1] == STOP)
            assert STOP not in got.ids[:-1]
        return tokens, behaviour

    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    first, second = (rng.integers(5, VOCAB, n).astype(np.int32) for n in (40, 23))
    return [first, first, second, first, second, first[:31]]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("stagger", [False, True])
def test_recorded_logprobs_are_the_models_own(kind: str, stagger: bool) -> None:
    model = build(kind)
    policy = LocalPolicy(model, [STOP], config=LocalPolicyConfig(step_tokens=32))
    before = model.config._attn_implementation
    for tokens, behaviour in asyncio.run(episodes(policy, prompts(), 3, stagger=stagger)):
        sampled = ~np.isnan(behaviour)
        np.testing.assert_allclose(behaviour[sampled], reference_logp(model, tokens)[sampled[1:]], atol=2e-4)
    assert model.config._attn_implementation == before
    assert policy.counters.rerun == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("stagger", [False, True])
def test_sessions_that_attend_together_sample_what_each_samples_alone(kind: str, stagger: bool) -> None:
    model = build(kind)
    wanted = asyncio.run(episodes(LocalPolicy(model, [STOP]), prompts(), 4, stagger=stagger))
    policy = LocalPolicy(model, [STOP])
    policy._runner.together = True  # as on a GPU
    for (tokens, behaviour), (again, there) in zip(wanted, asyncio.run(episodes(policy, prompts(), 4)), strict=True):
        np.testing.assert_array_equal(tokens, again)
        np.testing.assert_allclose(behaviour, there, atol=1e-4)
    assert policy.counters.rerun == 0


def test_no_token_is_run_that_another_session_has_run() -> None:
    policy = LocalPolicy(build("llama"), [STOP])
    prompt = prompts()[0]
    asyncio.run(episodes(policy, [prompt] * 6, 1))
    # five members take all but the last token, which each runs for its own logits
    assert policy.counters.input == len(prompt) + 5
    assert policy.counters.shared == 5 * (len(prompt) - 1)


def test_dropped_states_are_counted_as_rerun_and_change_nothing() -> None:
    model = build("llama")
    kept = asyncio.run(episodes(LocalPolicy(model, [STOP]), prompts(), 3))
    tight = LocalPolicy(model, [STOP], config=LocalPolicyConfig(max_batch=2, max_sessions=2))
    for (tokens, _), (again, _) in zip(kept, asyncio.run(episodes(tight, prompts(), 3)), strict=True):
        np.testing.assert_array_equal(tokens, again)
    assert tight.counters.rerun > 0


def test_result_does_not_depend_on_the_batch() -> None:
    model = build("qwen3")
    together = asyncio.run(episodes(LocalPolicy(model, [STOP]), prompts(), 2))
    alone = asyncio.run(episodes(LocalPolicy(model, [STOP], config=LocalPolicyConfig(max_batch=1)), prompts(), 2))
    for (tokens, behaviour), (tokens_alone, behaviour_alone) in zip(together, alone, strict=True):
        np.testing.assert_array_equal(tokens, tokens_alone)
        np.testing.assert_allclose(behaviour, behaviour_alone, atol=1e-4)


def test_refresh_drops_states_of_the_old_weights() -> None:
    model = build("llama")
    policy = LocalPolicy(model, [STOP])
    prompt = prompts()[0]

    async def two_versions():
        await policy.sample(SampleRequest("s", prompt, 4, seed=0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        policy.refresh(1)
        return await policy.sample(SampleRequest("s", prompt, 4, seed=0))

    got = asyncio.run(two_versions())
    tokens = np.concatenate([prompt, got.ids])
    assert got.version == 1
    np.testing.assert_allclose(got.behaviour, reference_logp(model, tokens)[-len(got.ids) :], atol=2e-4)


def test_rewritten_history_starts_from_what_is_still_shared() -> None:
    model = build("llama")
    policy = LocalPolicy(model, [STOP])
    prompt = prompts()[0]
    changed = np.concatenate([prompt[:20], prompt[25:]])

    async def both():
        await policy.sample(SampleRequest("s", prompt, 4, seed=0))
        return await policy.sample(SampleRequest("s", changed, 4, seed=1))

    got = asyncio.run(both())
    reference = reference_logp(model, np.concatenate([changed, got.ids]))[-len(got.ids) :]
    np.testing.assert_allclose(got.behaviour, reference, atol=2e-4)
    assert policy.counters.rerun == 0


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.3, 0.6), (0.0, 1.0)])
def test_choice_follows_the_distribution_it_reports(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 1.5, -torch.inf, 0.0]])
    draws = 20_000
    uniforms = (np.arange(draws) + 0.5) / draws
    ids, logp = choose(logits.repeat(draws, 1), [Sampling(temperature, top_p)] * draws, uniforms.tolist())
    share = np.bincount(ids, minlength=6) / draws
    reported = np.zeros(6)
    reported[ids] = np.exp(logp)
    np.testing.assert_allclose(share, reported, atol=2e-4)
    assert reported.sum() == pytest.approx(1.0, abs=1e-5)
    if temperature:
        full = np.exp(logits[0].double().numpy() / temperature)
        full /= full.sum()
        kept = np.argsort(-full)[: int(np.searchsorted(np.cumsum(np.sort(full)[::-1]), top_p - 1e-9)) + 1]
        expected = np.where(np.isin(np.arange(6), kept), full, 0) / full[kept].sum()
        np.testing.assert_allclose(reported, expected, atol=1e-5)
    else:
        assert set(ids) == {2}


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_who_keeps_the_error_of_a_failed_step_keeps_no_state(kind: str) -> None:
    policy = LocalPolicy(build(kind), [STOP])
    run, held = policy._runner.run, []

    def fails(segments):
        run(segments)
        held.extend(weakref.ref(segment.state) for segment in segments)
        raise MemoryError("no memory is left")

    policy._runner.run = fails
    gc.disable()
    try:
        with pytest.raises(PolicyError, match="no memory is left") as kept:
            asyncio.run(policy.sample(SampleRequest("s", prompts()[0], 4, seed=0)))
        assert kept.value.__cause__ is not None
        assert held and not any(state() for state in held)
    finally:
        gc.enable()


def test_weights_that_are_not_finite_fail_the_request_only() -> None:
    model = build("llama")
    policy = LocalPolicy(model, [STOP])
    prompt = prompts()[0]

    async def broken_then_mended():
        kept = model.lm_head.weight.data.clone()
        model.lm_head.weight.data.fill_(float("nan"))
        with pytest.raises(PolicyError, match="not finite"):
            await policy.sample(SampleRequest("s", prompt, 4, seed=0))
        model.lm_head.weight.data.copy_(kept)
        return await policy.sample(SampleRequest("s", prompt, 4, seed=0))

    assert len(asyncio.run(broken_then_mended()).ids)


def test_one_session_is_sampled_once_at_a_time_and_refresh_waits() -> None:
    policy = LocalPolicy(build("llama"), [])
    prompt = prompts()[0]

    async def overlapping():
        first = asyncio.create_task(policy.sample(SampleRequest("s", prompt, 4, seed=0)))
        await asyncio.sleep(0)
        with pytest.raises(PolicyError, match="already being sampled"):
            await policy.sample(SampleRequest("s", prompt, 4, seed=0))
        with pytest.raises(PolicyError, match="await all samples"):
            policy.refresh(1)
        await first
        cancelled = asyncio.create_task(policy.sample(SampleRequest("t", prompt, 4000, seed=0)))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return await policy.sample(SampleRequest("t", prompt, 4, seed=0))

    assert len(asyncio.run(overlapping()).ids)


def test_a_request_needs_tokens() -> None:
    with pytest.raises(TokenError, match="nothing to sample from"):
        SampleRequest("s", np.empty(0, np.int32), 4, seed=0)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_a_session_goes_on_from_what_the_trainer_keeps_of_the_same_weights(kind: str) -> None:
    from longstraw_agents.trainer.recapture import Recapture
    from longstraw_agents.trainer.replay import Engine, ReplayConfig
    from longstraw_agents.trainer.shelf import ShelfConfig

    model = build(kind)
    recapture = Recapture.of(Engine(model, ReplayConfig(chunk=16)), ShelfConfig())
    prompt = prompts()[0]
    list(recapture.refresh(prompt[:-2], 16))
    plain, helped = LocalPolicy(model, [STOP]), LocalPolicy(model, [STOP], kept=recapture.beginning)
    expected, found = (asyncio.run(episodes(policy, [prompt], 2))[0] for policy in (plain, helped))
    assert np.array_equal(expected[0], found[0]) and np.allclose(expected[1], found[1], atol=1e-4, equal_nan=True)
    taken = 0 if kind == "qwen3_5" else len(prompt) - 2  # a recurrent state is no list of keys and values
    assert helped.counters.shared == taken and helped.counters.input == plain.counters.input - taken
    model.get_decoder().layers[0].self_attn.k_proj.weight.data.mul_(1.01) if kind != "qwen3_5" else None
    assert recapture.beginning(prompt)[0] == 0
