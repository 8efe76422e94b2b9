"""An adapter folded into its model: a plain model that needs neither PEFT nor this project.

W + (alpha / rank) B A replaces each adapted W (Hu et al. 2021). In bfloat16 the sum is rounded, so the merged model's logits
differ a little from the adapted one's; how much is measured on the spot and returned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from longstraw_agents.errors import AdapterError, ConfigError
from longstraw_agents.trainer.offload import offload_of


def merge(model: Any, tokenizer: Any, folder: Path, probe: int = 64) -> float:
    """Write the merged model and its tokenizer to `folder`, in transformers' format, and return the largest relative difference
    of its logits to the adapted model's, on `probe` token ids: max |merged - adapted| / max |adapted|.

    The adapter is folded into `model` itself; do not train it further. Raises AdapterError for a model without an adapter, and
    ConfigError for a folder that is not empty.
    """
    if not isinstance(model, PeftModel):
        raise AdapterError(f"{type(model).__name__} has no adapter to merge; a model trained whole lies in its step folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give a new folder for the merged model")
    if offload_of(model) is not None:
        model.cpu()  # to where the weights lie
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids_1T = torch.arange(probe, device=model.device)[None] * 7919 % vocabulary
    with torch.no_grad():
        adapted_1TV = model(ids_1T).logits.float()
        merged = model.merge_and_unload()
        merged_1TV = merged(ids_1T).logits.float()
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float((merged_1TV - adapted_1TV).abs().max() / adapted_1TV.abs().max())
