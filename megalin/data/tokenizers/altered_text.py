"""Changes that a tokenizer.json makes to a text before it has ids: the ids then count other bytes than the text's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import pre_tokenizers

_CUTTING = ("Split", "Punctuation")  # they keep all bytes unless they remove what they cut at
_LOSSLESS = ("ByteLevel", "Digits", "UnicodeScripts", *_CUTTING)


def altered_text(description: Mapping[str, Any]) -> str:
    """The parts of a byte-level tokenizer.json that add bytes to a text or lose some, for people; else empty."""
    parts = [
        *(f"the normalizer {step.get('type')}" for step in _steps(description.get("normalizer"), "normalizers")),
        *_altering_cuts(description),
        *_greedy_tokens(description),
    ]
    vocabulary = (description.get("model") or {}).get("vocab", {})
    missing = [each for each in pre_tokenizers.ByteLevel.alphabet() if each not in vocabulary]
    return ", ".join([*parts, *([f"{len(missing)} bytes without a token"] if missing else [])])


def _steps(part: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a part that may be a sequence of others."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        for step in part.get(key, []):
            yield from _steps(step, key)
    elif isinstance(part, dict):
        yield part


def _altering_cuts(description: Mapping[str, Any]) -> Iterator[str]:
    for step in _steps(description.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type")
        removes = kind in _CUTTING and str(step.get("behavior")) == "Removed"
        if kind not in _LOSSLESS or removes:
            yield f"the pre-tokenizer {kind}"
        elif step.get("add_prefix_space"):
            yield f"the pre-tokenizer {kind}, which adds a space"


def _greedy_tokens(description: Mapping[str, Any]) -> Iterator[str]:
    for token in description.get("added_tokens", []):
        if not token.get("special") and (token.get("lstrip") or token.get("rstrip")):
            yield f"the token {token.get('content')!r}, which takes the white space around it"
