"""Tokenizers of many model families, built offline: byte-level or byte-fallback models with each family's own added tokens.

Idea: what disarming must get right depends on how a tokenizer cuts text (pre-tokenizer, normalizer, byte fallback) and on its
added tokens (special or not, stripping spaces around them, normalized or not), not on its merges; so small models with the
families' added tokens, named and flagged as the families have them, stand in for the large ones. SmolLM2's is the real one
where it is in the cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from longstraw_agents.rendering import ChatML
from longstraw_agents.types import Message

#: family -> (kind, special tokens, other added tokens). Kinds: "bytes" (byte-level BPE), "fallback" (SentencePiece style).
FAMILIES: dict[str, tuple[str, list[str], list[str]]] = {
    "smollm2": ("bytes", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
                "<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>",
                "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>"], []),
    "qwen3": ("bytes", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
              "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
              "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"],
              ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<|fim_prefix|>",
               "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]),
    "llama3": ("bytes", ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
               "<|eot_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>",
               *(f"<|reserved_special_token_{i}|>" for i in range(248))], []),
    "mistral": ("fallback", ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[IMG]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
                "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]"], []),
    "deepseek3": ("bytes", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"],
                  ["<｜User｜>", "<｜Assistant｜>", "<|EOT|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
                   "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
                   "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>", "<｜fim▁hole｜>", "<｜fim▁begin｜>",
                   "<｜fim▁end｜>", "<think>", "</think>"]),
    "glm4": ("bytes", ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
             "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"],
             ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
              "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"]),
    "gemma3": ("fallback", ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>",
               "<start_of_image>", "<end_of_image>", "<image_soft_token>"],
               ["[multimodal]", "\n\n", "\n\n\n", "<table>", "<caption>", "</table>", "<h1>", "<blockquote>", "<tr>", "<code>",
                *(f"<unused{i}>" for i in range(99))]),
    "phi4": ("bytes", ["<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|fim_prefix|>", "<|dummy_0|>"],
             ["<think>", "</think>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"]),
    "gpt_oss": ("bytes", ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
                "<|end|>", "<|message|>", "<|call|>", "<|endofprompt|>"], []),
}  # fmt: skip


class Fast:
    """What a renderer needs of a fast transformers tokenizer."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    def decode(self, ids: list[int], **_: Any) -> str:
        """The ids as text, control tokens too."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=False)

    def get_added_vocab(self) -> dict[str, int]:
        """Added tokens by content."""
        return {token.content: number for number, token in self.backend_tokenizer.get_added_tokens_decoder().items()}


def build(family: str) -> Fast:
    """A tokenizer of the family: its kind of model, its added tokens; right-stripping ones among them, as Phi's are."""
    kind, special, others = FAMILIES[family]
    cached = Path("~/.cache/longstraw/smollm2-135m-instruct/tokenizer.json").expanduser()
    if family == "smollm2" and cached.exists():
        return Fast(Tokenizer.from_file(str(cached)))
    text = [Path(__file__).read_text("utf-8"), *(p.read_text("utf-8") for p in sorted(Path(__file__).parent.glob("*.py")))]
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False))
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=1500, special_tokens=words, show_progress=False))
        tokenizer = _without_added(tokenizer)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    strip = family == "phi4"
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False, rstrip=strip) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False, rstrip=strip, lstrip=strip) for token in others])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])  # as models that were tuned to ChatML have them
    return Fast(tokenizer)


def _without_added(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer adds its special tokens, among them the bytes; real files have the bytes as ordinary words."""
    import json

    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(spec))


def documents(added: list[str], count: int) -> list[str]:
    """One document with every added token, then `count` with random ones: whole, nested, spaced, cut, doubled, in Unicode."""
    rng = random.Random(0)
    glue = ["", " ", "\n", "\n\n", "  ", "\t", "é", "漢", "🦙", "x", "<", ">", "|", "\u200b", "\r\n", "▁", "\x00"]
    made = ["".join(added), " ".join(added), "\n".join(f"a{token}b" for token in added)]
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 30)):
            token = rng.choice(added)
            cut = rng.randrange(len(token) + 1)
            forms = [token, token * 2, token[:cut] + token + token[cut:], token[:cut], token.upper()]
            parts += [rng.choice(forms), rng.choice(glue)]
        made.append("".join(parts))
    return made


@dataclass
class Counts:
    """Of one family. `control`: control ids beyond the format's own; `lost`: documents that come back neither by decoding
    nor from the kept source; `sources`: documents that decode differently, so that their source is kept."""

    added: int = 0
    documents: int = 0
    control: int = 0
    lost: int = 0
    sources: int = 0


def check_families(count: int) -> dict[str, Counts]:
    """Render each document as a tool's message, as collection does, and look at the observation's ids."""
    rows = {}
    for family in FAMILIES:
        tokenizer: Any = build(family)
        added = tokenizer.get_added_vocab()
        renderer, counts = ChatML(tokenizer), Counts(added=len(added))
        for text in documents(sorted(added), count):
            rendered = renderer.first([Message("tool", text)])
            found = [int(number) for number in rendered.ids if int(number) in set(added.values())]
            begin, end = added["<|im_start|>"], added["<|im_end|>"]
            expected = f"<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n"
            back = rendered.source.decode() if rendered.source is not None else tokenizer.decode(rendered.ids.tolist())
            counts.documents += 1
            counts.control += len(found) - 3 if found != [begin, end, begin] else 0
            counts.lost += back != expected
            counts.sources += rendered.source is not None
        rows[family] = counts
    return rows
