"""Any text of an environment, encoded with the real tokenizer, goes through the store unchanged."""

from __future__ import annotations

import numpy as np
import pytest
from store_made import begin

from longstraw_agents.rendering import ChatML
from longstraw_agents.storage import Store
from longstraw_agents.types import Message, StopReason, ToolCall, Turn

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import AutoTokenizer

    from longstraw_agents.trainer.models import smollm2_folder

    return AutoTokenizer.from_pretrained(smollm2_folder())


def texts(tokenizer) -> dict[str, str]:
    added = tokenizer.get_added_vocab()
    return {
        "NUL": "a\0b\0\0",
        "lone surrogates": "x\ud800y\udfff \udc00\ud800",
        "a line of 1 MB": "the quick brown fox " * 52_429,
        "every added token": " ".join(added) + "".join(added),
        "all of it": "\0\ud83d" + "".join(added) + "\ufffd\u0301e\u2028\r\n" + "\U0001f600",
    }


@pytest.mark.parametrize("kind", ["NUL", "lone surrogates", "a line of 1 MB", "every added token", "all of it"])
def test_text_comes_out_unchanged(store: Store, tokenizer, kind: str) -> None:
    """The ids decode to the text, or its source bytes are kept; either way exactly the text, and the ids that were encoded."""
    text = texts(tokenizer)[kind]
    rendered = ChatML(tokenizer).first([Message("user", text)])
    _, group = begin(store)
    trajectory = store.add_trajectory(group, 0)
    call = ToolCall("say", {"text": text}, result=text)
    sampled = np.array([1, 2], np.int32)
    turn = Turn(rendered.ids, sampled, np.zeros(2, np.float32), 0, tool_calls=[call], observation_source=rendered.source)
    store.append_turn(trajectory, 0, turn)
    store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})
    back = store.turns(trajectory)[0]
    assert np.array_equal(back.observation, rendered.ids) and back.tool_calls[0] == call
    if back.observation_source is None:
        said = tokenizer.decode(back.observation.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    else:
        said = back.observation_source.decode("utf-8", "surrogatepass")
    assert said == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert (back.observation_source is not None) == (kind in ("lone surrogates", "all of it")), "kept only where it is needed"
    control = {tokenizer.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>")}
    assert np.isin(back.observation, sorted(tokenizer.get_added_vocab().values())).sum() == 3 == np.isin(
        back.observation, sorted(control)
    ).sum(), "no added token but the three of the format"
