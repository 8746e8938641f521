"""Published vocabularies in tiktoken's format: the pattern, the special tokens and the end of a document of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

PATTERNS = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "cl100k": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k": r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    "llama3": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
    "qwen": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
}
"""Pre-tokenization patterns: with another one, the same ranks give other ids."""


class RankFamily(NamedTuple):
    """A published vocabulary; its ranks are recognised by their number and by several of them."""

    name: str
    pattern: str
    """Key of PATTERNS."""
    num_ranks: int
    known_ranks: Mapping[bytes, int]
    """Some tokens and their ranks, spread over the vocabulary."""
    special_tokens: Mapping[str, int]
    """Ids of the tokens that the file does not hold."""
    end: str
    """Special token that ends a document."""
    begin: str | None = None
    """Special token that may begin a document."""
    normal_form: Literal["NFC"] | None = None
    """Unicode normal form of a text before it is encoded."""

    def has(self, ranks: Mapping[bytes, int]) -> bool:
        """True for the ranks of this vocabulary."""
        return len(ranks) == self.num_ranks and all(ranks.get(token) == at for token, at in self.known_ranks.items())


def family_of(ranks: Mapping[bytes, int]) -> RankFamily | None:
    """The published vocabulary with these ranks; None for another one."""
    return next((family for family in FAMILIES if family.has(ranks)), None)


def _numbered(first: int, *names: str) -> dict[str, int]:
    return {name: first + place for place, name in enumerate(names)}


def _reserved(count: int, *, start: int = 0, of: str = "") -> list[str]:
    """Names of `count` reserved tokens, numbered from `start`."""
    return [f"<|{of}reserved_special_token_{number}|>" for number in range(start, start + count)]


_LLAMA3 = [
    *("<|begin_of_text|>", "<|end_of_text|>", *_reserved(2), "<|finetune_right_pad_id|>", "<|step_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
    *_reserved(244, start=2),
]
_LLAMA4 = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>", *_reserved(6, of="text_post_train_")),
    *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>", *_reserved(61, start=8, of="text_post_train_")),
    *("<|image_start|>", "<|image_end|>", *_reserved(2, of="vision_"), "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *(*_reserved(4, start=2, of="vision_"), "<|image|>", *_reserved(1, start=6, of="vision_"), "<|patch|>"),
    *(*_reserved(1041, start=7, of="vision_"), *_reserved(8, of="reasoning_")),
    *("<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>", *_reserved(904)),
]
_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]
_FILL_IN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_END, _PROMPT_END = "<|endoftext|>", "<|endofprompt|>"

# Sources: tiktoken's openai_public.py, Meta's llama-models (models/llama3 and llama4, tokenizer.py), QwenLM's
# tokenization_note.md. The known ranks were read in the published files (sha256 of Llama 3: 82e9d319, of Llama 4:
# d0bdbaf5; of the others as in openai_public.py; Qwen's as in its note).
FAMILIES = (
    RankFamily(
        name="r50k",
        pattern="gpt2",
        num_ranks=50256,
        known_ranks={b" the": 262, b"hello": 31373, b" world": 995, b" gazed": 50255},
        special_tokens={_END: 50256},
        end=_END,
    ),
    RankFamily(
        name="p50k",
        pattern="gpt2",
        num_ranks=50280,  # up to 50280, without 50256
        known_ranks={b" the": 262, b"hello": 31373, b" world": 995, b" gazed": 50255, b" " * 25: 50280},
        special_tokens={_END: 50256},
        end=_END,
    ),
    RankFamily(
        name="cl100k",
        pattern="cl100k",
        num_ranks=100256,
        known_ranks={b" the": 279, b"hello": 15339, b" tokenizer": 47058, b" Conveyor": 100255},
        special_tokens={_END: 100257, **_numbered(100258, *_FILL_IN), _PROMPT_END: 100276},
        end=_END,
    ),
    RankFamily(
        name="o200k",
        pattern="o200k",
        num_ranks=199998,
        known_ranks={b" the": 290, b"hello": 24912, b" tokenizer": 99665, b" cocos": 199997},
        special_tokens={_END: 199999, _PROMPT_END: 200018},
        end=_END,
    ),
    RankFamily(
        name="Llama 3",
        pattern="llama3",
        num_ranks=128000,
        known_ranks={b" the": 279, b"hello": 15339, b" tokenizer": 47058, b"\xe9\x94\xa6": 127999},
        special_tokens=_numbered(128000, *_LLAMA3),
        end="<|end_of_text|>",
        begin="<|begin_of_text|>",
    ),
    RankFamily(
        name="Llama 4",
        pattern="o200k",
        num_ranks=200000,
        known_ranks={b" the": 290, b"hello": 25681, b" tokenizer": 94156, b"(ge": 199999},
        special_tokens=_numbered(200000, *_LLAMA4),
        end="<|end_of_text|>",
        begin="<|begin_of_text|>",
    ),
    RankFamily(
        name="Qwen",
        pattern="qwen",
        num_ranks=151643,
        known_ranks={b" the": 279, b"hello": 14990, b"endo": 8691, b'>")': 82598, b" \xe6\xa0": 51461},
        special_tokens=_numbered(151643, *_QWEN),
        end=_END,
        normal_form="NFC",
    ),
)
