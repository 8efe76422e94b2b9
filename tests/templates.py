"""Chat templates in the manner of known families, in our own words: what each does that a renderer must cope with."""

from __future__ import annotations

import transformers
from tokenizers import AddedToken

from tests.chat import small_tokenizer

#: Header tokens, trimmed contents, a date, a begin token (as Llama 3.x).
HEADERS = (
    "{{ bos_token }}<|head|>system<|tail|>\n\nToday: {{ strftime_now('%d %b %Y') }}\n"
    "{% set rest = messages %}{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set rest = messages[1:] %}"
    "{% endif %}<|eot|>"
    "{% for m in rest %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|tail|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|tail|>\n\n{% endif %}"
)

#: No system role, strictly alternating (as Gemma).
ALTERNATING = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|head|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>model\n{% endif %}"
)

#: Tools speak as the user, and thinking is shown only after the last question (as Qwen3).
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% set said = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in said %}"
    "{% set said = said.split('</think>')[1] | trim %}{% endif %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ said }}\n</tool_response>{% else %}{{ said }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Instructions in brackets, the system's words before the first one's; the end of text ends an answer (as Mistral).
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('a tool answer needs a call id') }}"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% elif loop.first %}[SYS] {{ m.content }} [/SYS]{% else %}{{ raise_exception('system comes first') }}{% endif %}"
    "{% endfor %}"
)

#: Tokens that swallow the white space behind them (as Phi-3), contents as typed parts (as models that see images).
SWALLOWING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

FAMILIES = dict(
    headers=HEADERS, alternating=ALTERNATING, thinking=THINKING, brackets=BRACKETS, swallowing=SWALLOWING,
)  # fmt: skip

MARKS = ["<|head|>", "<|tail|>", "<|eot|>", "<|bos|>", "<|eos|>", "[INST]", "[/INST]", "[SYS]", "[/SYS]"]
SWALLOWERS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]


def tokenizer_with(template: str) -> transformers.PreTrainedTokenizerFast:
    """The small tokenizer with the marks of all families and a template."""
    tokenizer = small_tokenizer()
    marks = [AddedToken(mark, special=True, normalized=False) for mark in MARKS]
    marks += [AddedToken(mark, special=True, normalized=False, rstrip=True) for mark in SWALLOWERS]
    tokenizer.add_tokens([*marks, AddedToken("</think>", special=False, normalized=False)])
    tokenizer.bos_token, tokenizer.eos_token = "<|bos|>", "<|eos|>"
    tokenizer.chat_template = template
    return tokenizer
