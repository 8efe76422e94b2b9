"""`longstraw verify`: it passes for what is exact, fails for what is not, and its results are stored and cited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from longstraw_agents.cli import main
from longstraw_agents.errors import AdapterError, ModelError
from longstraw_agents.trainer import architectures, evidence
from longstraw_agents.trainer.attention import PrefixAttention
from longstraw_agents.trainer.models import LoraSettings, ModelConfig, add_adapter, load_adapter, load_model, save_adapter
from longstraw_agents.trainer.routing import RoutingState
from longstraw_agents.trainer.state import RecurrentState
from longstraw_agents.trainer.update import Trainer, TrainerConfig
from longstraw_agents.trainer.verification import VerifyConfig, verify
from tests import models
from tests.chat import small_tokenizer
from tests.made import flat_group

SMALL = VerifyConfig(length=70, branch=20)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSTRAW_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["mistral", "qwen3_5", "glm_moe_dsa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exact_models_pass_and_the_control_fails_as_it_must(name: str, dtype: torch.dtype) -> None:
    result = verify(models.build(name, training="lora", dtype=dtype), SMALL)
    decided = {"decisions: routing", "decisions: selection"} if name == "glm_moe_dsa" else set()
    assert result.checks.keys() == {"E1", "E2", "E4", "control"} | decided
    assert all(check.holds is True for check in result.checks.values())
    assert result.holds and all(row["detached"] > row["error"] for row in result.classes if row["detached"] > 1e-3)


def test_sixteen_bit_types_are_held_against_conventional_trainings_own_error() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = models.CONFIGS["llama"]()[1]
        config.initializer_range = 0.1  # a smooth model: rounding does not drown the missing reverse pass
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    result = verify(model, SMALL)
    assert result.checks["E4"].bound == 1.25 and result.checks["E4"].holds
    assert all(row["conventional"] > 0 for row in result.classes)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm_moe_dsa"])
def test_in_sixteen_bits_decisions_are_imposed_and_what_differs_is_said(name: str) -> None:
    result = verify(models.build(name, training="lora", dtype=torch.bfloat16, smooth=True), SMALL)
    shares = {key: check for key, check in result.checks.items() if key.startswith("decisions")}
    assert shares and all(0 < check.value <= check.bound and check.holds for check in shares.values())
    assert result.checks["E4"].holds and result.checks["control"].holds


def test_routing_that_is_wrong_fails_though_the_reference_s_is_imposed(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = RoutingState.decide
    wrong = lambda self, run, picks, experts: (decide(self, run, picks, experts) + 1) % experts
    monkeypatch.setattr(RoutingState, "decide", wrong)
    result = verify(models.build("qwen3_moe"), SMALL)
    assert result.checks["decisions: routing"].holds is False and not result.holds


def test_a_wrong_gradient_fails_and_its_worst_tensor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = PrefixAttention.backward

    def wrong(ctx, dout):
        dq, dk, dv, *rest = backward(ctx, dout)
        return dq, dk, dv * 1.01, *rest

    monkeypatch.setattr(PrefixAttention, "backward", staticmethod(wrong))
    result = verify(models.build("llama"), SMALL)
    assert not result.holds and result.checks["E4"].holds is False and result.checks["E2"].holds
    assert "v_proj" in result.classes[0]["worst_name"]


def test_a_lost_cotangent_of_a_recurrent_state_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = RecurrentState.seeds
    monkeypatch.setattr(RecurrentState, "seeds", lambda self: seeds(self)[:1])
    assert verify(models.build("qwen3_5"), SMALL).checks["E4"].holds is False


def test_the_control_is_not_applicable_above_the_last_state() -> None:
    model = models.build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("lm_head", "model.norm", "model.layers.3.mlp")))
    result = verify(model, SMALL)
    assert result.checks["control"].holds is None and result.holds


def test_results_are_stored_and_receipts_cite_them() -> None:
    model = models.build("llama")
    trainer, group = Trainer(model, TrainerConfig()), flat_group([0.0, 1.0])
    assert "longstraw verify" in trainer.update([group]).evidence["E4"]
    result = verify(model, SMALL)
    evidence.store(model, result)
    cited = trainer.update([group]).evidence["E4"]
    assert cited["holds"] is True and cited["length"] == 70 and cited["value"] == pytest.approx(result.checks["E4"].value)
    other = models.build("llama", training="lora")
    assert "longstraw verify" in evidence.cite(other)["E4"]  # other parameters train


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    models.build("llama").save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def test_command_tells_by_its_exit_status(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["verify", "--model", str(saved), "--length", "60", "--branch", "16", "--json", str(tmp_path / "out.json")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["holds"] is True and {row["class"] for row in report["classes"]} >= {"self_attn.q_proj.lora_A"}
    assert list((tmp_path / "verifications").glob("*.json"))
    backward = PrefixAttention.backward
    monkeypatch.setattr(PrefixAttention, "backward", staticmethod(lambda ctx, dout: tuple(backward(ctx, 2 * dout))))
    failed = CliRunner().invoke(main, arguments)
    assert failed.exit_code == 1 and "FAILS" in failed.output


def test_unknown_model_types_are_refused_until_they_are_to_be_proved(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "MODEL_TYPES", {k: v for k, v in architectures.MODEL_TYPES.items() if k != "llama"})
    arguments = ["verify", "--model", str(saved), "--length", "40", "--branch", "12"]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 1 and "'llama' is not known" in refused.output
    assert CliRunner().invoke(main, [*arguments, "--unproven"]).exit_code == 0


@pytest.mark.parametrize(
    ("kind", "text", "loaded"),
    [
        ("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3_5ForCausalLM"),
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
        ("Gemma3ForConditionalGeneration", "gemma3", "Gemma3ForConditionalGeneration"),
        ("Mistral3ForConditionalGeneration", "mistral", "Mistral3ForConditionalGeneration"),
    ],
)
def test_text_models_inside_vision_language_checkpoints(kind: str, text: str, loaded: str, tmp_path: Path) -> None:
    """A tiny checkpoint of the class that the hub publishes loads as it is, with its weights, and verifies; and so does the
    whole model, if somebody hands that over."""
    vision = dict(depth=1, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, num_attention_heads=2)
    vision |= dict(image_size=28, patch_size=14)
    config_class = getattr(transformers, kind.replace("ForConditionalGeneration", "Config"))
    text_config = models.CONFIGS[text]()[1].to_dict() | {"vocab_size": 300, "initializer_range": 0.1}
    config = config_class(text_config=text_config, vision_config=vision, image_token_id=5, image_token_index=5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        published = getattr(transformers, kind)(config).eval()
    published.save_pretrained(tmp_path / "vl")
    small_tokenizer().save_pretrained(tmp_path / "vl")
    model, _ = load_model(ModelConfig(str(tmp_path / "vl")))
    assert type(model.get_base_model()).__name__ == loaded
    ids = torch.arange(10, 90)[None]
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, published(input_ids=ids).logits, atol=1e-5)
    adapted = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert adapted and not [name for name in adapted if "vision" in name or "visual" in name or "projector" in name]
    assert verify(model, SMALL).holds
    for name, parameter in published.named_parameters():
        parameter.requires_grad_("visual" not in name and "vision" not in name and "projector" not in name)
    assert verify(published, SMALL).holds


def test_adapters_on_experts_are_exact_and_can_be_saved(tmp_path: Path) -> None:
    settings = LoraSettings(rank=2, experts=True)
    model = add_adapter(models.build("qwen3_moe"), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    result = verify(model, SMALL)
    assert result.holds and [row for row in result.classes if "experts" in row["class"] and row["error"] < 1e-4]
    fresh = add_adapter(models.build("qwen3_moe"), settings, seed=1)
    load_adapter(fresh, save_adapter(model, tmp_path / "adapter"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    with pytest.raises(AdapterError, match="no experts"):
        add_adapter(models.build("llama"), settings)


@pytest.mark.smollm2
def test_the_real_smollm2_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGSTRAW_CACHE")  # converted weights are kept in the user's own
    model, _ = load_model(ModelConfig())
    result = verify(model, VerifyConfig(length=96, branch=16, group=2))
    assert result.checks["E2"].holds and result.checks["E4"].holds and result.checks["control"].holds


def test_models_that_can_not_be_exact_are_refused_before_anything_runs() -> None:
    model = models.build("llama")
    model.config.attention_dropout = 0.5
    with pytest.raises(ModelError, match="attention_dropout"):
        verify(model, SMALL)
