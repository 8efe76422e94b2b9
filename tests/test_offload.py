"""Base weights in host memory: the same bits, never more than two layers' copies, none left behind, and no other reader."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longstraw_agents.cli import main
from longstraw_agents.errors import ConfigError, ModelError
from longstraw_agents.policies import SampleRequest
from longstraw_agents.policies.local import LocalPolicy
from longstraw_agents.segmenter import segment
from longstraw_agents.trainer import comparison, conventional, fit
from longstraw_agents.trainer.live import LiveBytes
from longstraw_agents.trainer.merging import merge
from longstraw_agents.trainer.models import (
    LoraSettings,
    ModelConfig,
    add_adapter,
    load_adapter,
    load_model,
    save_adapter,
    without_weights,
)
from longstraw_agents.trainer.offload import Offload, offload, offload_of
from longstraw_agents.trainer.plan import PlanConfig, forecast
from longstraw_agents.trainer.replay import Engine, ReplayConfig
from longstraw_agents.trainer.stamps import WeightStamps
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.trainer.verification import VerifyConfig, verify
from tests import models as zoo
from tests.chat import small_tokenizer
from tests.made import flat_group
from tests.test_plan import CHUNK, CONTEXT, GROUP, RESPONSE, group
from tests.test_replay import coefficients, deep_group

NAMES = ("llama", "gemma3", "qwen3_5", "qwen3_moe", "deepseek_v3", "glm_moe_dsa")


def adapted(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of the zoo with random adapters on attention's linear layers."""
    model = zoo.build(name, dtype=dtype)
    targets = tuple(path for path in zoo.linear_names(model) if "attn." in path)
    model = add_adapter(model, LoraSettings(2, targets=targets))
    generator = torch.Generator().manual_seed(5)
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            parameter.data.normal_(std=0.3, generator=generator)
    return model.eval()


def update(model: nn.Module, gradient: str = "exact") -> dict[str, Tensor]:
    """Scores and gradient of a tree, by name."""
    tree = segment(deep_group(zoo.VOCABULARY))
    replay = Engine(model, ReplayConfig(gradient, chunk=40, pack=100)).open(tree)
    found = {"scores": replay.score().logp}
    replay.backward(coefficients(len(tree.entry_node)).to(found["scores"].device))
    found |= comparison.gradients(model)
    model.zero_grad()
    return found


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Watch(TorchDispatchMode):
    """Watches what is made of host weights. live: storages by layer that hold a copy of one; most: layers that had some at once.

    readers: operators that read a weight where it lies, which no GPU could.
    """

    def __init__(self, held: Offload) -> None:
        super().__init__()
        layers = range(len(held.layer_bytes))
        self._layer = {weight.untyped_storage()._cdata: layer for layer in layers for weight in held.of_layer(layer)}
        self._storages = [parameter.untyped_storage() for parameter in held.parameters]
        self.live: Counter[int] = Counter()
        self.readers: set[str] = set()
        self.most = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        layers = {self._layer[storage] for storage in given if storage in self._layer}
        name = func._schema.name.removeprefix("aten::")
        if layers and name == "copy_":
            (layer,) = layers
            storage = args[0].untyped_storage()
            self.live[layer] += 1
            self.made += storage.nbytes()
            self.most = max(self.most, len(+self.live))
            weakref.finalize(storage, self.live.subtract, [layer])
        elif layers and not func.is_view and name not in ("empty_like", "detach"):
            self.readers.add(name)
        return result


@pytest.mark.parametrize(("name", "gradient"), [("llama", "detached"), *((name, "exact") for name in NAMES)])
def test_gradient_is_the_same_to_the_bit_with_two_layers_on_the_device_at_most(name: str, gradient: str) -> None:
    model = adapted(name)
    wanted = update(model, gradient)
    held = offload(model, "cpu")
    places = [parameter.data_ptr() for parameter in held.parameters]
    with Watch(held) as seen:
        assert same(update(model, gradient), wanted)
    assert seen.most == 2 and not seen.readers
    assert seen.made == held.copied > 10 * sum(held.layer_bytes)
    assert not +seen.live and [parameter.data_ptr() for parameter in held.parameters] == places
    held.undo()
    with torch.no_grad():
        model(torch.arange(9)[None])
    assert seen.made == held.copied and offload_of(model) is None


def test_each_layer_is_copied_once_a_pass_and_not_below_the_first_that_trains() -> None:
    model = adapted("llama")
    for path, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in path and ".layers.0." not in path)
    held, runs = offload(model, "cpu"), Counter[bool]()
    tree = segment(deep_group(zoo.VOCABULARY))
    engine = Engine(model, ReplayConfig(chunk=40, pack=100))
    decode = engine.decode

    def counted(ids: Any, run: Any, *rest: Any) -> Tensor:
        runs[run.gradient] += 1
        return decode(ids, run, *rest)

    engine.decode = counted  # type: ignore[method-assign]
    replay = engine.open(tree)
    replay.score()
    replay.backward(coefficients(len(tree.entry_node)))
    layers = zoo.LAYERS * runs.total() + (zoo.LAYERS - 2) * runs[True]  # in a backward pass neither the last again nor the first
    assert held.copied == layers * held.layer_bytes[0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_conventional_training_has_the_same_gradient_too(name: str, checkpointing: bool) -> None:
    model, group = adapted(name), deep_group(zoo.VOCABULARY)

    def gradient() -> dict[str, Tensor]:
        conventional.backward(model, group, lambda values: values.mean(), in_series=True, checkpointing=checkpointing)
        found = comparison.gradients(model)
        model.zero_grad()
        return found

    wanted = gradient()
    held = offload(model, "cpu")
    with Watch(held) as seen:
        assert same(gradient(), wanted)
    assert seen.most == 2 and not seen.readers and not +seen.live


def test_nothing_is_left_of_a_pass_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("llama")
    wanted = update(model)
    held = offload(model, "cpu")
    layer = model.get_base_model().model.layers[2]
    with Watch(held) as seen, monkeypatch.context() as broken:
        broken.setattr(layer.mlp, "forward", lambda *args: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            update(model)
    assert seen.most == 2 and not +seen.live
    assert same(update(model), wanted)


CHANGES: dict[str, Callable[[Any], object]] = {
    "merged": lambda model: model.merge_adapter(),
    "loaded": lambda model: model.load_state_dict({name: 1.1 * tensor for name, tensor in model.state_dict().items()}),
    "wider": lambda model: model.double(),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_to_weights_after_a_forward_pass_or_a_failed_backward_pass_is_kept(change: str, fails: bool) -> None:
    plain, held, ids = adapted("qwen3_5"), adapted("qwen3_5"), torch.arange(40)[None]
    offload(held, "cpu")

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("enough")

    logits = held(ids).logits  # with a graph
    if fails:
        trained = [parameter for parameter in held.parameters() if parameter.requires_grad]
        hook = trained[len(trained) // 2].register_hook(fail)
        with pytest.raises(RuntimeError, match="enough"):
            logits.sum().backward()
        hook.remove()
    for model in (plain, held):
        CHANGES[change](model)
    with torch.no_grad():
        assert torch.equal(held(ids).logits, plain(ids).logits)


def test_a_copy_of_the_model_reads_its_own_weights_and_stamps_are_of_the_true_ones() -> None:
    model = adapted("llama")
    stamps = lambda of: WeightStamps(of.get_base_model().get_decoder(), of.config).layers()
    before, wanted = stamps(model), update(model)
    held = offload(model, "cpu")
    assert stamps(model) == before
    other = copy.deepcopy(model)
    held.parameters[0].data.mul_(2)
    assert stamps(model) != before == stamps(other)
    assert same(update(other), wanted) and not same(update(model), wanted)
    assert offload_of(other) is not held and offload_of(other).copied > 0


# -- through the front door -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A Llama of three layers with a tokenizer."""
    _, config = zoo.CONFIGS["llama"]()
    config.vocab_size, config.num_hidden_layers, config.initializer_range = 300, 3, 0.1
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def both(folder: str, **settings: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The model as it is and with weights in host memory, and its tokenizer; adapters are random and the same."""
    models = []
    for weights in (None, "host"):
        model, tokenizer = load_model(ModelConfig(folder, weights=weights, **settings))
        for index, (path, parameter) in enumerate(model.named_parameters()):
            if "lora_B" in path:
                parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(index))
        models.append(model)
    return *models, tokenizer


def test_updates_receipts_adapters_and_merged_models_are_the_same(folder: str, tmp_path: Path) -> None:
    plain, hosted, tokenizer = both(folder)
    receipts = [Trainer(model, TrainerConfig()).update([flat_group([0.0, 1.0])]) for model in (plain, hosted)]
    assert receipts[1].setting["weights"] == "host" and "weights" not in receipts[0].setting
    assert receipts[1].setting["weight_bytes_copied"] == offload_of(hosted).copied > 0
    trained = [{n: p for n, p in model.named_parameters() if p.requires_grad} for model in (plain, hosted)]
    assert same(*trained)
    save_adapter(hosted, tmp_path / "adapter")
    fresh, _ = load_model(ModelConfig(folder, weights="host", seed=9))
    load_adapter(fresh, tmp_path / "adapter")
    assert same({n: p for n, p in fresh.named_parameters() if p.requires_grad}, trained[1])
    for name, model in (("plain", plain), ("hosted", fresh)):
        assert merge(model, tokenizer, tmp_path / name) < 1e-5
    merged = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("plain", "hosted")]
    assert same(*(dict(model.named_parameters()) for model in merged))


def test_sampling_gives_the_same_tokens(folder: str) -> None:
    plain, hosted, _ = both(folder)

    async def sample(policy: LocalPolicy) -> list[np.ndarray]:
        prompt = np.arange(5, 25, dtype=np.int32)
        requests = [SampleRequest(str(seed), prompt[: 20 - seed], 8, seed=seed) for seed in range(3)]
        return [got.ids for got in await asyncio.gather(*map(policy.sample, requests))]

    policies = [LocalPolicy(model, [2]) for model in (plain, hosted)]
    wanted, got = (asyncio.run(sample(policy)) for policy in policies)
    assert all(np.array_equal(a, b) for a, b in zip(wanted, got, strict=True))
    for policy in policies:
        policy.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verification_holds(folder: str, dtype: str) -> None:
    _, hosted, _ = both(folder, dtype=dtype)
    assert verify(hosted, VerifyConfig(length=60, branch=20)).holds


def test_the_commands_take_it(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSTRAW_CACHE", str(tmp_path))
    verified = CliRunner().invoke(main, ["verify", "--model", folder, "--length", "60", "--branch", "16", "--weights", "host"])
    assert verified.exit_code == 0, verified.output
    call = ["plan", "--model", folder, "--context", "5000", "--group", "2", "--response", "64", "--chunk", "1024"]
    report = tmp_path / "plan.json"
    planned = CliRunner().invoke(main, [*call, "--gpu-memory", "1", "--weights", "host", "--json", str(report)])
    assert planned.exit_code == 0 and "copied GiB" in planned.output, planned.output
    found = json.loads(report.read_text())["forecast"]
    assert found["host"]["weights"] > 0 and found["phases"]["reverse"]["copied"] > found["phases"]["score"]["copied"] > 0


def test_the_forecast_is_what_the_real_update_holds(tmp_path: Path) -> None:
    _, settings = zoo.CONFIGS["qwen3_5"]()
    settings.save_pretrained(tmp_path)
    model = add_adapter(transformers.AutoModelForCausalLM.from_config(settings), LoraSettings(2))
    pack = GROUP * RESPONSE
    held, replay = offload(model, "cpu"), ReplayConfig(chunk=CHUNK, pack=pack, logit_piece=64)
    tree = segment(group())
    Engine(model, replay).open(tree).score()  # kernels are checked at their first use
    live = LiveBytes()
    live.hold([*model.parameters(), *model.buffers()])
    live.move(held.parameters)
    before = live.now
    with live:
        work = Engine(model, replay).open(tree)
        work.score()
        work.backward(torch.full((pack,), 0.1))
    config = PlanConfig(CONTEXT, 2**40, GROUP, RESPONSE, pack=pack, logit_piece=64, stand_ins=False, weights="host")
    bare = without_weights(ModelConfig(str(tmp_path), adapter=LoraSettings(2)))
    found, resident = (forecast(bare, planned, CHUNK) for planned in (config, dataclasses.replace(config, weights=None)))
    above = found.peak - sum(found.gpu[kind] for kind in ("weights", "adapter", "optimizer"))
    assert above == pytest.approx(live.peak - before, rel=0.05)
    assert resident.gpu["weights"] - found.gpu["weights"] == sum(held.layer_bytes) <= found.host["weights"]
    assert found.gpu["copies"] == max(a + b for a, b in zip(held.layer_bytes, held.layer_bytes[1:], strict=False))
    assert found.phases["capture"].copied == pytest.approx(sum(held.layer_bytes) * (CONTEXT - 1 - RESPONSE) / CHUNK, rel=0.01)
    assert found.phases["capture"].seconds >= found.phases["capture"].copied / 0.05e12


def test_the_plan_proposes_it_where_weights_do_not_fit(tmp_path: Path) -> None:
    _, settings = zoo.CONFIGS["llama"]()
    settings.num_hidden_layers, settings.hidden_size, settings.intermediate_size = 6, 256, 2048
    settings.save_pretrained(tmp_path)
    bare = without_weights(ModelConfig(str(tmp_path), "bfloat16"))
    config = PlanConfig(600, 10**6, 2, 40, "detached", 8, "host", chunk=64)
    peaks = {change.what: change.peak for change in fit.plan(bare, config).changes}
    (proposed,) = (peak for what, peak in peaks.items() if "model.weights" in what)
    whole = forecast(bare, config, 64)
    layer = 2 * (3 * 256 * 2048 + 2 * 256 * 32 + 2 * 256 * 16)
    assert whole.peak - proposed == pytest.approx(4 * layer, rel=0.05)  # two of six stay
    assert offload_of(bare) is None


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="give the model an adapter"):
        ModelConfig(weights="host", adapter=None)
    with pytest.raises(ConfigError, match="host"):
        PlanConfig(100, 1, weights="nf4")
    with pytest.raises(ModelError, match="has no adapter"):
        offload(zoo.build("llama"), "cpu")
    with pytest.raises(ModelError, match="adapter on experts"):
        offload(zoo.build("qwen3_moe", training="lora"), "cpu")
    model = adapted("llama")
    base = model.get_base_model().model.layers[1].mlp.up_proj.weight
    base.requires_grad_(True)
    with pytest.raises(ModelError, match="up_proj.weight trains"):
        offload(model, "cpu")
    base.requires_grad_(False)
    offload(model, "cpu")
    with pytest.raises(ModelError, match="already"):
        offload(model, "cpu")
    base.requires_grad_(True)
    with pytest.raises(ModelError, match="base weight of layer 1 requires grad"):
        update(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_on_a_gpu_the_gradient_is_the_same_and_the_weights_are_not_there(name: str) -> None:
    model = adapted(name).cuda()
    wanted = update(model)
    before = torch.cuda.memory_allocated()
    held = offload(model, "cuda")
    assert before - torch.cuda.memory_allocated() >= sum(held.layer_bytes) and all(p.is_pinned() for p in held.parameters)
    found = update(model)
    assert torch.allclose(found.pop("scores"), wanted.pop("scores"), atol=1e-4)
    assert comparison.compare(found, wanted).worst < 1e-4  # some kernels add in no fixed order
    assert all(parameter.device.type == "cpu" for parameter in held.parameters)
