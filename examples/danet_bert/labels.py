"""Labelled lines from collected Python sources; the label says whether a line is code or a comment."""

from __future__ import annotations

import argparse
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

SHORTEST = 40
"""Minimum characters of a line."""
MOST = 10
"""Maximum lines of each label from one source, which gives equally many of both."""


def labelled_lines(source: str) -> dict[str, list[str]]:
    """The comments and lines of code of a source, without indentation; empty if the text is not valid Python."""
    comments: list[str] = []
    passed: set[int] = set()  # lines with a comment, or with a part of a string of several lines
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments.append(token.string.lstrip("# "))
            if token.type == tokenize.COMMENT or token.start[0] < token.end[0]:
                passed.update(range(token.start[0], token.end[0] + 1))
    except (tokenize.TokenError, SyntaxError):
        return {}
    lines = [line.strip() for number, line in enumerate(source.splitlines(), start=1) if number not in passed]
    kept = {
        "code": [line for line in lines if len(line) >= SHORTEST],
        "comment": [text for text in comments if len(text) >= SHORTEST],
    }
    count = min(MOST, *map(len, kept.values()))
    return {label: texts[:count] for label, texts in kept.items()}


def main() -> int:
    """Reads jsonl with "source" and "text", writes jsonl with "text" and "label"."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    lines = []
    for line in arguments.documents.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        if document["source"].endswith(".py"):
            for label, texts in labelled_lines(document["text"]).items():
                lines += [json.dumps({"text": text, "label": label}) + "\n" for text in texts]
                counts[label] += len(texts)
    arguments.output.write_text("".join(lines), encoding="utf-8")
    print(f"{arguments.output}: {', '.join(f'{count} {label}' for label, count in sorted(counts.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
