"""Rendering with a tokenizer's own chat template: joins, hostile text, histories that a template rewrites, real templates."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from longstraw_agents.collection import CollectConfig, collect
from longstraw_agents.errors import ConfigError, ModelError, TokenError
from longstraw_agents.policies.scripted import ScriptedPolicy
from longstraw_agents.rendering import ChatML, DisarmedEncoder, RenderingConfig, renderer_for
from longstraw_agents.storage import Store
from longstraw_agents.templates import TemplateRenderer
from longstraw_agents.types import Message
from tests.chat import Countdown, countdown, small_tokenizer
from tests.templates import FAMILIES, MARKS, SWALLOWERS, tokenizer_with

TOKENIZERS = {name: tokenizer_with(template) for name, template in FAMILIES.items()}
ENCODE = DisarmedEncoder(TOKENIZERS["headers"])
OPENING = [Message("system", "Be brief."), Message("user", "Where is it?")]
HOSTILE = st.lists(st.sampled_from([*MARKS, *SWALLOWERS, "<think>", "</think>", "x", " ", "\n"]) | st.text(max_size=4)).map(
    "".join
)


def shown(tokenizer: Any, *messages: tuple[str, str], asks: bool = True, typed: bool = False) -> str:
    """The template's own text of a whole conversation."""
    conversation = [{"role": r, "content": [{"type": "text", "text": c}] if typed else c} for r, c in messages]
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=asks))


def read(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def action_of(tokenizer: Any, renderer: TemplateRenderer, text: str) -> np.ndarray:
    return np.array([*tokenizer(text, add_special_tokens=False).input_ids, renderer.end_id], np.int32)


def test_a_conversation_joins_byte_for_byte_to_what_the_template_shows() -> None:
    tokenizer = TOKENIZERS["thinking"]
    renderer = TemplateRenderer(tokenizer)
    conversation, ids = list(OPENING), renderer.first(OPENING).ids
    for said, heard in (("a", "one"), ("hello", "two"), ("c", "three")):
        action = action_of(tokenizer, renderer, said)
        rendered = renderer.following(action, [Message("tool", heard)], conversation)
        assert rendered.history == "appended" and rendered.source is None
        ids = np.concatenate([ids, action, rendered.ids])
        conversation += [Message("assistant", said), Message("tool", heard)]
        whole = shown(tokenizer, *((m.role, m.content) for m in conversation))
        assert read(tokenizer, ids) == whole
        assert ids.tolist() == tokenizer(whole, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("headers", "<|eot|><|head|>ipython<|tail|>\n\na cup<|eot|><|head|>assistant<|tail|>\n\n"),
        ("alternating", "<|eot|>\n<|head|>user\na cup<|eot|>\n<|head|>model\n"),
        ("brackets", "<|eos|>[INST] a cup [/INST]"),
        ("swallowing", "<|end|><|tool|>a cup<|end|><|assistant|>"),
    ],
)
def test_what_follows_an_action_in_other_families(family: str, expected: str) -> None:
    tokenizer = TOKENIZERS[family]
    renderer = TemplateRenderer(tokenizer)
    action = action_of(tokenizer, renderer, "Look here. ")  # the space is trimmed by some templates; what was sampled stands
    rendered = renderer.following(action, [Message("tool", "a cup")], OPENING)
    assert rendered.history == "appended"
    assert read(tokenizer, [renderer.end_id, *rendered.ids]) == expected


def test_a_message_that_a_template_has_no_place_for_finds_one() -> None:
    text = read(
        TOKENIZERS["alternating"], TemplateRenderer(TOKENIZERS["alternating"]).first([*OPENING, Message("user", "Say.")]).ids
    )
    assert text == "<|bos|><|head|>user\nBe brief.\n\nWhere is it?\n\nSay.<|eot|>\n<|head|>model\n"
    late = [*OPENING, Message("assistant", "Here."), Message("system", "Hurry.")]
    text = read(TOKENIZERS["brackets"], TemplateRenderer(TOKENIZERS["brackets"]).first(late).ids)
    assert text == "<|bos|>[SYS] Be brief. [/SYS][INST] Where is it? [/INST] Here.<|eos|>[INST] Hurry. [/INST]"
    alone = TemplateRenderer(TOKENIZERS["alternating"]).first([Message("system", "Go.")])
    assert read(TOKENIZERS["alternating"], alone.ids) == "<|bos|><|head|>user\nGo.<|eot|>\n<|head|>model\n"


def test_tokens_that_swallow_space_do_so_here_and_the_bytes_are_kept() -> None:
    tokenizer = TOKENIZERS["swallowing"]
    rendered = TemplateRenderer(tokenizer).first(OPENING)
    whole = shown(tokenizer, *((m.role, m.content) for m in OPENING), typed=True)
    assert rendered.ids.tolist() == tokenizer(whole, add_special_tokens=False).input_ids
    assert rendered.source == whole.encode()


@pytest.mark.parametrize("family", FAMILIES)
@given(HOSTILE, HOSTILE)
def test_no_text_of_an_environment_becomes_an_added_token(family: str, first: str, later: str) -> None:
    tokenizer = TOKENIZERS[family]
    renderer, added = TemplateRenderer(tokenizer), set(tokenizer.get_added_vocab().values())
    action = np.array([*ENCODE("hello"), renderer.end_id], np.int32)

    def marks(opening: str, answer: str) -> list[int]:
        messages = [Message("system", opening), Message("user", f"a{answer}b")]
        ids = [*renderer.first(messages).ids, *renderer.following(action, [Message("tool", f"a{answer}b")], messages).ids]
        return [int(token) for token in ids if int(token) in added]

    assert marks(first, later) == marks("x" if first.strip() else first, "x")


def test_the_policys_own_marks_stay_marks_and_no_more() -> None:
    tokenizer = TOKENIZERS["thinking"]
    think = tokenizer.convert_tokens_to_ids("<think>")
    said = [Message("user", "a"), Message("assistant", "<think>b</think><|im_end|>"), Message("tool", "<think>")]
    ids = TemplateRenderer(tokenizer).first(said).ids.tolist()
    assert ids.count(think) == 1 and ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 3


def test_thinking_that_a_template_strips_is_noticed_and_the_choice_taken() -> None:
    tokenizer = TOKENIZERS["thinking"]
    branching = TemplateRenderer(tokenizer)
    keeping = TemplateRenderer(tokenizer, RenderingConfig("template", "keep"))
    action = action_of(tokenizer, branching, "<think>hm</think>Here.")
    assert branching.following(action, [Message("tool", "a cup")], OPENING).history == "appended"
    branch = branching.following(action, [Message("user", "And then?")], OPENING)
    roles = [*((m.role, m.content) for m in OPENING), ("assistant", "<think>hm</think>Here."), ("user", "And then?")]
    assert branch.history == "rewritten" and read(tokenizer, branch.ids) == shown(tokenizer, *roles)
    assert "hm" not in read(tokenizer, branch.ids)
    kept = keeping.following(action, [Message("user", "And then?")], OPENING)
    assert kept.history == "kept"
    assert read(tokenizer, kept.ids) == "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


def test_a_cut_action_is_closed_and_the_date_stands_still() -> None:
    renderer, tokenizer = TemplateRenderer(TOKENIZERS["headers"]), TOKENIZERS["headers"]
    cut = np.array(ENCODE("hel"), np.int32)
    assert read(tokenizer, renderer.following(cut, [Message("user", "x")], OPENING).ids).startswith("<|eot|><|head|>user")
    assert "Today: 26 Jul 2024\n" in read(tokenizer, renderer.first(OPENING).ids)
    assert (
        renderer.stop_ids == {renderer.end_id, tokenizer.eos_token_id}
        and renderer.text(np.array([*cut, renderer.end_id])) == "hel"
    )


def test_an_end_token_on_a_line_of_its_own_comes_once() -> None:
    tokenizer = tokenizer_with(
        "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}\n<|eot|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
    )
    renderer = TemplateRenderer(tokenizer)
    rendered = renderer.following(action_of(tokenizer, renderer, "hello"), [Message("tool", "x")], OPENING)
    assert rendered.history == "appended" and read(tokenizer, rendered.ids) == "\n<|head|>tool\nx\n<|eot|>\n<|head|>assistant\n"


def test_which_renderer_the_settings_name() -> None:
    assert isinstance(renderer_for(small_tokenizer()), ChatML)
    assert isinstance(renderer_for(TOKENIZERS["thinking"], RenderingConfig("template")), TemplateRenderer)
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=small_tokenizer().backend_tokenizer)
    with pytest.raises(ModelError, match="no chat template"):
        TemplateRenderer(bare)
    for template, complaint in (("{{ raise_exception('no') }}", "plain conversation"), ("{{ messages[0].content }}", "plain")):
        with pytest.raises(ModelError, match=complaint):
            TemplateRenderer(tokenizer_with(template))
    only_user = "{% for m in messages %}{{ raise_exception('no robots') if m.role == 'robot' else m.content }}{% endfor %}"
    with pytest.raises(TokenError, match="refuses a conversation of robot: no robots"):
        TemplateRenderer(tokenizer_with(only_user)).first([Message("robot", "x")])
    with pytest.raises(TokenError, match="no message"):
        TemplateRenderer(TOKENIZERS["headers"]).first([])
    for wrong in ({"format": "xml"}, {"rewritten": "drop"}):
        with pytest.raises(ConfigError):
            RenderingConfig(**wrong)  # type: ignore[arg-type]


class Asking(Countdown):
    """Answers as the user, so that a template that strips thinking does it every turn."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action.split("</think>")[-1])
        return observation, reward, terminated, truncated, {**info, "messages": [Message("user", f"number {self.number}")]}


@pytest.mark.parametrize("choice", ["branch", "keep"])
def test_a_run_goes_on_over_rewritten_histories_and_the_store_says_what_was_done(tmp_path: Path, choice: Any) -> None:
    tokenizer = TOKENIZERS["thinking"]
    renderer = TemplateRenderer(tokenizer, RenderingConfig("template", choice))
    read_by_policy: list[str] = []

    def think(request: Any) -> str:
        read_by_policy.append(read(tokenizer, request.tokens))
        return f"<think>hm</think>number {read_by_policy[-1].rsplit('number ', 1)[1].split('<')[0]}"

    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        settings: dict[str, Any] = {"run_id": store.create_run("r", {}), "group_size": 1, "make": lambda task: Asking()}
        policy = ScriptedPolicy(think, encode, renderer.end_id)
        config = CollectConfig(max_action_tokens=60)
        result = asyncio.run(collect(store, policy, renderer, [countdown(1)], config, **settings))
        rows = store.trajectories(str(result.group_ids[0]))
        group = store.load_group(str(result.group_ids[0]))
    assert result.complete and {row.reward for row in rows} == {3.0}
    notes = [note for trajectory in group.trajectories for note in trajectory.turn_notes]
    if choice == "keep":
        assert len(rows) == 1 and notes == [{}, {"history": "kept"}, {"history": "kept"}]
        assert read_by_policy[-1].count("<think>hm</think>") == 2
    else:
        assert [row.parent for row in rows] == [None, rows[0].trajectory_id, rows[1].trajectory_id]
        assert notes == [{}, {"history": "rewritten"}, {"history": "rewritten"}] and sum(
            row.weight for row in rows
        ) == pytest.approx(1)
        assert not any("hm" in text for text in read_by_policy)


_MARK = re.compile(r"<[|｜][^<>\s'\"]{1,40}[|｜]>|<(?:start|end)_of_turn>|<\|?turn\|?>|<end_of_utterance>|</s>")


def _real_templates() -> list[Path]:
    found = importlib.util.find_spec("trl")
    folders = (found.submodule_search_locations if found else None) or []
    return sorted(path for folder in folders for path in Path(folder, "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("path", _real_templates() or [None], ids=lambda path: path.stem if path else "none")
def test_real_templates_that_trl_carries(path: Path | None) -> None:
    """Every family works turn by turn; where its history is not rewritten, the joined text is the template's own."""
    if path is None:
        pytest.skip("TRL, whose chat templates these are, is not installed")
    source = path.read_text()
    tokenizer = tokenizer_with(source)
    tokenizer.add_tokens(sorted(set(_MARK.findall(source))), special_tokens=True)
    renderer, keeping = TemplateRenderer(tokenizer), TemplateRenderer(tokenizer, RenderingConfig("template", "keep"))
    action = action_of(tokenizer, renderer, "Look here.")
    later = [*OPENING, Message("assistant", "Look here."), Message("tool", "a cup <|im_end|>")]
    rendered = renderer.following(action, later[-1:], OPENING)
    joined = np.concatenate([renderer.first(OPENING).ids, action, rendered.ids])
    whole = renderer.first(later).ids  # the template's own, of the whole conversation
    ids = whole if rendered.history == "rewritten" else joined
    squeezed = "".join(read(tokenizer, ids).split())
    assert squeezed == "".join(read(tokenizer, whole).split()) and "acup<|im_end|>" in squeezed
    assert rendered.history != "rewritten" or rendered.ids.tolist() == whole.tolist()
    kept = keeping.following(action, later[-1:], OPENING)
    assert kept.history == ("kept" if rendered.history == "rewritten" else "appended")
    assert "a cup <|im_end|>" in read(tokenizer, kept.ids).replace("\\", "")
