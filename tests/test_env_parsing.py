"""Calls and answers in the text of an action: every format, and everything that is wrong with them."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longstraw_agents.envs import ParserConfig, parse_action
from longstraw_agents.envs.parsing import FORMATS, MAX_DEPTH
from longstraw_agents.errors import ConfigError

EVERY = ParserConfig(formats=tuple(FORMATS))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(min_size=1), VALUES, max_size=4)
NAMES = st.from_regex(r"\A[a-z][a-z0-9_]{0,12}\Z")


def nested(depth):
    return '{"name": "f", "arguments": {"x": ' + "[" * depth + "0" + "]" * depth + "}}"


PAIR = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"


def only(action, *formats):
    (call,) = parse_action(action, ParserConfig(formats=formats or ("tags",))).calls
    return call


@given(NAMES, ARGUMENTS)
def test_json_in_tags_comes_back(name, arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    if "</tool_call>" not in body and "<think>" not in body and "</think>" not in body:
        call = only(f"I will look.\n<tool_call>\n{body}\n</tool_call>")
        assert (call.name, call.arguments, call.error) == (name, arguments, None)


@pytest.mark.parametrize(
    "format_name, action",
    [
        ("tags", '<tool_call>{"name": "f", "parameters": {"x": 1, "y": "b"}}</tool_call>'),
        ("tags", '<tool_call>{"function": {"name": "f", "arguments": "{\\"x\\": 1, \\"y\\": \\"b\\"}"}}</tool_call>'),
        ("tags", "<tool_call><function=f><parameter=x>\n1\n</parameter><parameter=y>b</parameter></function></tool_call>"),
        ("tags", f"<tool_call>f\n{PAIR.format('x', 1)}{PAIR.format('y', 'b')}</tool_call>"),
        ("tags", '<tool_call>{"name": "f", "arguments": {"x": 1, "y": "b"}}'),  # the stop token took the closing tag
        ("fenced", 'So:\n```json\n{"name": "f", "arguments": {"x": 1, "y": "b"}}\n```'),
        ("fenced", '```tool_call\n{"name": "f", "arguments": {"x": 1, "y": "b"}}\n```'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1, "y": "b"}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1, "y": "b"}'),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"x": 1, "y": "b"}}<|eom_id|>'),
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1, "y": "b"}<｜tool▁call▁end｜>'),
        ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1, "y": "b"}\n```<｜tool▁call▁end｜>'),
        ("json", '  {"name": "f", "arguments": {"x": 1, "y": "b"}}  '),
        ("python", 'f(x=1, y="b")'),
        ("python", "[f(x=1, y='b')]"),
    ],
)  # fmt: skip
def test_each_format_is_read(format_name, action):
    call = only(action, format_name)
    assert (call.name, call.arguments, call.error) == ("f", {"x": 1, "y": "b"}, None)
    assert parse_action(action, EVERY).calls[0].arguments == {"x": 1, "y": "b"}


def test_positional_values_of_the_python_format():
    call = only('stock("fish", 2, True)', "python")
    assert (call.name, call.positional) == ("stock", ("fish", 2, True))


@pytest.mark.parametrize(
    "body, says",
    [
        ("", "empty"), ("{", "not valid JSON"), ("not json", "not valid JSON"), ("{'name': 'f'}", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": 1}} and more', "text after"), ('{"arguments": {}}', 'no "name"'), ("[]", "empty"),
        ("3", "must be a JSON object"), ('{"name": 3}', 'no "name"'), ('{"name": "f", "arguments": [1]}', "must be a JSON"),
        ('{"name": "f", "arguments": {"x": 1e99999}}', "too large"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN"), (nested(900), "nested"),
        ('{"name": "f", "arguments": {"x": %s}}' % ("9" * 5000), "not valid JSON"),
        ("[" * 100_000, "nested too deep"), ('{"name": "f", "arguments": "{"}', "not valid JSON"),
        ('{"name": "f", "arguments": {"x": "%s"}}' % ("x" * 300_000), "at most"),
        ("<function=>", "no function name"), ("<function=f><parameter=x>1", "never closed"),
        ("f<arg_key>x</arg_key>", "do not pair up"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_explained(body, says):
    call = parse_action(f"<tool_call>{body}</tool_call>").calls[0]
    assert call.error and says in call.error and "Write " in call.error and len(call.error) < 600


def test_the_name_of_a_broken_call_is_kept():
    assert only('<tool_call>{"name": "search", "arguments": {"q": </tool_call>').name == "search"


def test_depth_is_bounded_exactly():
    assert only(f"<tool_call>{nested(MAX_DEPTH - 2)}</tool_call>").error is None
    assert "nested" in only(f"<tool_call>{nested(MAX_DEPTH - 1)}</tool_call>").error


def test_several_calls_keep_their_order_and_number():
    action = "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>' for i in range(12))
    calls = parse_action(action).calls
    assert [call.name for call in calls[:8]] == [f"f{i}" for i in range(8)]
    assert len(calls) == 9 and "12 calls" in calls[8].error


def test_thoughts_are_not_actions():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for thought in (f"<think>{call}<answer>1</answer></think>", f"{call}</think>", f"<think>{call}"):
        parsed = parse_action(thought)
        assert parsed.calls == () and parsed.answer is None
    assert len(parse_action(f"<think>so</think>{call}<think>{call}").calls) == 1


def test_answers():
    assert parse_action("<answer> 42 </answer>").answer == "42"
    assert parse_action("<answer>1</answer> no: <answer>2</answer>").answer == "2"
    assert parse_action("<answer>42").answer == "42"
    assert parse_action("42").answer is None
    text = ParserConfig(formats=("python",), answer="text")
    assert parse_action(" it is 42\n", text).answer == "it is 42"
    assert parse_action('f("x")', text).answer is None


def test_a_fence_that_shows_data_is_no_call():
    assert parse_action('```json\n{"total": 3}\n```', ParserConfig(formats=("fenced",))).calls == ()


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigError, match="tags, fenced"):
        ParserConfig(formats=("tag",))


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<answer>", "</answer>", "```", "```json\n", "[TOOL_CALLS]", "[ARGS]",
     "<|python_tag|>", "<|eom_id|>", "<function=f>", "<parameter=x>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>",
     "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", '{"name": "f", "arguments": {', "}}", '"', "\\", "\\u",
     "[", "{", "9" * 50, "1e999", "NaN", "null", "\ud800", "\x00", "f(", ")", "='", ",", "\n", "function"]
)  # fmt: skip


@settings(max_examples=500)
@given(st.lists(PIECES | st.text(max_size=8), max_size=40).map("".join))
@example("[" * 5000)
@example("<tool_call>" * 1000)
def test_nothing_raises(action):
    parsed = parse_action(action, EVERY)
    for call in parsed.calls:
        assert call.error is None or call.error
        json.dumps(call.arguments)
