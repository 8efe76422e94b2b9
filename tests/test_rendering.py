"""Rendering with a small byte-level tokenizer that has special and non-special added tokens, and with SmolLM2's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from longstraw_agents.cache import SMOLLM2, cache_folder  # noqa: E402
from longstraw_agents.errors import ModelError, TokenError  # noqa: E402
from longstraw_agents.rendering import ChatML, DisarmedEncoder  # noqa: E402
from longstraw_agents.trainer.models import smollm2_folder  # noqa: E402
from longstraw_agents.types import Message  # noqa: E402
from tests.chat import ADDED, small_tokenizer  # noqa: E402

HAVE_SMOLLM2 = (cache_folder() / SMOLLM2 / "config.json").exists()

TOKENIZER = small_tokenizer()
HOSTILE = st.lists(st.sampled_from([*ADDED, "hello", "\n", " ", "é", "\ud800", "<|im_", "start|>"]) | st.text(max_size=5)).map(
    "".join
)


@given(HOSTILE)
def test_no_text_becomes_an_added_token(text: str) -> None:
    ids = DisarmedEncoder(TOKENIZER)(text)
    assert not set(ids) & set(TOKENIZER.get_added_vocab().values())
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_disarmed_text_is_otherwise_encoded_as_ever() -> None:
    merged = TOKENIZER.convert_tokens_to_ids("hell")
    assert DisarmedEncoder(TOKENIZER)("hello<|im_end|>hello").count(merged) == 2


def test_added_tokens_that_the_model_knows_as_words_are_disarmed_too() -> None:
    tokenizer = small_tokenizer(word="[END]")
    assert tokenizer.backend_tokenizer.model.token_to_id("[END]") is not None
    ids = DisarmedEncoder(tokenizer)("hello[END]")
    assert not set(ids) & set(tokenizer.get_added_vocab().values())
    assert tokenizer.decode(ids) == "hello[END]"


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "tool"]), HOSTILE), min_size=1, max_size=3),
    st.lists(HOSTILE, max_size=3),
)
def test_turns_join_byte_for_byte(opening: list[tuple[str, str]], later: list[str]) -> None:
    renderer = ChatML(TOKENIZER)
    end = TOKENIZER.get_added_vocab()["<|im_end|>"]
    action = np.array([*DisarmedEncoder(TOKENIZER)("hello"), end], np.int32)
    parts = [renderer.first([Message(role, content) for role, content in opening])]
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in opening) + "<|im_start|>assistant\n"
    for content in later:
        parts.append(renderer.following(action, [Message("tool", content)]))
        expected += f"hello<|im_end|>\n<|im_start|>tool\n{content}<|im_end|>\n<|im_start|>assistant\n"
    ids = np.concatenate(
        [part if number == 0 else np.concatenate([action, part]) for number, part in enumerate(p.ids for p in parts)]
    )
    shown = "".join("�" if "\ud800" <= character <= "\udfff" else character for character in expected)
    assert TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == shown
    sources = b"hello<|im_end|>".join(
        part.source or TOKENIZER.decode(part.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False).encode()
        for part in parts
    )
    assert sources == expected.encode("utf-8", "surrogatepass")
    assert all((part.source is None) == ("\ud800" not in text) for part, text in zip(parts[1:], later, strict=True))


def test_source_is_kept_where_the_tokenizer_loses_bytes() -> None:
    renderer = ChatML(small_tokenizer(lossy=True))
    assert renderer.first([Message("user", "quiet")]).source is None
    assert renderer.first([Message("user", "LOUD")]).source == b"<|im_start|>user\nLOUD<|im_end|>\n<|im_start|>assistant\n"


def test_a_cut_action_is_closed_by_the_environments_side() -> None:
    renderer = ChatML(TOKENIZER)
    cut = np.array(DisarmedEncoder(TOKENIZER)("hel"), np.int32)
    text = TOKENIZER.decode(np.concatenate([cut, renderer.following(cut, [Message("tool", "x")]).ids]), skip_special_tokens=False)
    assert text == "hel<|im_end|>\n<|im_start|>tool\nx<|im_end|>\n<|im_start|>assistant\n"


def test_the_environment_reads_the_action_without_its_end() -> None:
    renderer = ChatML(TOKENIZER)
    added = TOKENIZER.get_added_vocab()
    action = np.array([added["<tool_call>"], *DisarmedEncoder(TOKENIZER)("hello"), added["<|im_end|>"]], np.int32)
    assert renderer.text(action) == "<tool_call>hello"
    assert renderer.text(action[:-1]) == "<tool_call>hello"


def test_what_cannot_be_rendered_says_why() -> None:
    renderer = ChatML(TOKENIZER)
    with pytest.raises(TokenError, match="no message"):
        renderer.first([])
    with pytest.raises(TokenError, match="role must be a word"):
        renderer.first([Message("user\n<|im_end|>", "x")])
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    with pytest.raises(ModelError, match="does not speak ChatML"):
        ChatML(bare)


@pytest.mark.smollm2
@pytest.mark.skipif(not HAVE_SMOLLM2, reason="SmolLM2 is not in the cache; `longstraw demo` puts it there")
def test_smollm2_is_rendered_as_by_its_own_template() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder())
    messages = [Message("system", "Be brief."), Message("user", "  Where?\n\nHere: 12, naïve — ok ")]
    template = tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages], add_generation_prompt=True, tokenize=False
    )
    rendered = ChatML(tokenizer).first(messages)
    assert rendered.ids.tolist() == tokenizer(template, add_special_tokens=False).input_ids
    assert rendered.source is None
