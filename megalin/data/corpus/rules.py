"""Independent cleaning rules for text, and detection of the Markdown and LaTeX that they preserve."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

from megalin.config import suggest
from megalin.errors import ConfigError
from megalin.optional import require

Rule = Callable[[str], str]
# Every repetition in an expression is bounded or cannot fail late, so that every text takes linear time.

_SPACES = dict.fromkeys([0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " ")
_BREAKS = {0x85: "\n", 0x2028: "\n", 0x2029: "\n"}
# Controls except tab and line feed; zero width except the joiners, which emoji and Indic scripts need; soft hyphen;
# direction marks; byte order mark. Variation selectors stay.
_NOTHING = dict.fromkeys(
    [
        *range(9), *range(11, 32), *range(127, 133), *range(134, 160), 0xAD, 0x200B, 0x200E, 0x200F,
        *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFD),
    ]
)  # fmt: skip
_LIGATURES = {code: unicodedata.normalize("NFKC", chr(code)) for code in range(0xFB00, 0xFB07)}
_WIDE = {0xFF00 + k: chr(0x20 + k) for k in range(1, 95) if chr(0x20 + k).isalnum()}
_SPECIAL = {**_SPACES, **_BREAKS, **_NOTHING, **_LIGATURES, **_WIDE}
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]+")

_TAG_NAMES = (
    "a|abbr|address|article|aside|b|big|blockquote|body|br|button|caption|center|cite|code|col|colgroup|dd|del|details|"
    "div|dl|dt|em|embed|fieldset|figcaption|figure|font|footer|form|h[1-6]|head|header|hr|html|i|iframe|img|input|ins|"
    "kbd|label|legend|li|link|main|meta|nav|noscript|object|ol|optgroup|option|p|param|picture|pre|q|s|samp|section|"
    "select|small|source|span|strike|strong|sub|summary|sup|svg|table|tbody|td|textarea|tfoot|th|thead|time|title|tr|"
    "tt|u|ul|var|video"
)
_TAG = re.compile(rf"<(/?)({_TAG_NAMES})(?:\s[^<>]{{0,4000}})?/?>", re.IGNORECASE)
_ENDS_A_LINE = re.compile(r"br|p|div|li|tr|d[dt]|h[1-6r]|pre|blockquote|section|article|table|title", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z]{2,31}\d{0,2});")
_HIDDEN = (
    (re.compile("<!--"), re.compile("-->")),
    *((re.compile(f"<{n}[\\s>]", re.I), re.compile(f"</{n}>", re.I)) for n in ("script", "style")),
)
_URL = re.compile(r"(?:https?://|ftp://|www\.)[^\s<>\"'\[\]{}|\\^`\u3000-\u303f\uff00-\uffef]+", re.IGNORECASE)

_REPLACEMENT = re.compile(r"[^\s\ufffd]{0,200}\ufffd\S{0,200}")
_CODE_STRING = re.compile(r"[A-Za-z0-9+/=_-]{100,}")
_LEAST_LINE = 20  # characters; shorter lines are kept, whatever they consist of
_LEAST_READABLE = 0.4  # fraction of letters, digits and spaces

_PROSE = ".,;!?\u2026\u3001\u3002\uff01\uff0c\uff1b\uff1f"  # the last seven are the ellipsis and Chinese marks
_PROSE_MARKS = re.compile(rf"([{_PROSE}])\1+")
_OTHER_MARKS = re.compile(rf"([^\w\s{_PROSE}])\1{{3,}}")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_DIGITS = {code: str(unicodedata.digit(chr(code))) for code in range(128, 0x20000) if chr(code).isdecimal()}
_BLANKS = re.compile(r"(?<![ \t])[ \t]++$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")


def fix_text(text: str) -> str:
    """Repairs text that was decoded with the wrong encoding (ftfy). Raises ConfigError where the library is missing."""
    return str(require("ftfy", "the rule fix-text").fix_text(text, unescape_html=False, uncurl_quotes=False))


def special_characters(text: str) -> str:
    """Removes control, invisible and private-use characters; unifies spaces, line ends, ligatures, Latin letters."""
    return _PRIVATE.sub("", text.replace("\r\n", "\n").replace("\r", "\n").translate(_SPECIAL))


def html_tags(text: str) -> str:
    """Removes comments, scripts, styles and tags of HTML; resolves character references."""
    if "<" in text:
        for start, end in _HIDDEN:
            text = _without_between(text, start, end)
        text = _TAG.sub(lambda tag: "\n" if _ENDS_A_LINE.fullmatch(tag[2]) else "", text)
    return _ENTITY.sub(lambda entity: html.unescape(entity[0]), text) if "&" in text else text


def _without_between(text: str, start: re.Pattern[str], end: re.Pattern[str]) -> str:
    """Removes the text from each match of `start` to the next `end`; without an `end` it stays."""
    kept, position = [], 0
    while (found := start.search(text, position)) and (stop := end.search(text, found.end())):
        kept.append(text[position : found.start()])
        position = stop.end()
    return "".join([*kept, text[position:]])


def urls(text: str) -> str:
    """Removes web addresses; a punctuation mark after one stays."""
    return _URL.sub(lambda url: url[0][len(url[0].rstrip(".,;:!?)")) :], text)


def garbled(text: str) -> str:
    """Removes words with U+FFFD, encoded strings of 100 characters and more, and lines with few letters."""
    text = _CODE_STRING.sub("", _REPLACEMENT.sub("", text))
    return "\n".join(line for line in text.split("\n") if len(line) < _LEAST_LINE or _is_readable(line))


def _is_readable(line: str) -> bool:
    enough = _LEAST_READABLE * len(line)
    return sum(map(str.isalnum, line)) >= enough or sum(map(_is_text, line)) >= enough


def _is_text(character: str) -> bool:
    return character.isalnum() or character.isspace() or unicodedata.category(character).startswith("M")


def repeated_punctuation(text: str) -> str:
    """Keeps one of several equal marks: of two and more for sentence punctuation, of four and more for others."""
    return _OTHER_MARKS.sub(r"\1", _PROSE_MARKS.sub(r"\1", text))


def numbers(text: str) -> str:
    """Writes digits of all scripts as 0 to 9, without commas between thousands."""
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text.translate(_DIGITS))


def blanks(text: str) -> str:
    """Removes spaces at the end of a line; keeps one empty line at most, none at the start and the end."""
    return _BLANK_LINES.sub("\n\n", _BLANKS.sub("", text)).strip()


# By name, in the order in which they are applied.
RULES: dict[str, Rule] = {
    "fix-text": fix_text,
    "special-characters": special_characters,
    "html": html_tags,
    "urls": urls,
    "garbled": garbled,
    "repeated-punctuation": repeated_punctuation,
    "numbers": numbers,
    "blanks": blanks,
}
_EVERYWHERE = ("fix-text", "special-characters", "blanks")  # safe inside code and formulas too
_BY_LINES = ("garbled",)  # judges whole lines, so marked spans inside of a line are not exempt

_FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
_BEGIN = re.compile(r"\\begin\{([A-Za-z]{1,30}\*?)\}")
_MARKED_LINE = re.compile(r"\s{0,3}(?:#{1,6}\s|([-*_=])(?:\s?\1){2,}\s*$|[:\s-]*+\|[|:\s-]*+$)")
_MARKED_SPAN = re.compile(
    r"(`[^`\n]{1,500}`|\$\$[^$]{1,2000}\$\$|\$[^$\n]{1,500}\$|\\\((?:[^\n\\]|\\[^()\n]){1,500}?\\\)|\\\[[^\[\]]{1,2000}\\\]"
    r"|!?\[[^\[\]\n]{0,500}\]\([^()\s]{1,500}\)|\\[A-Za-z]{1,40}(?:\[[^\[\]\n]{0,200}\])?(?:\{[^{}\n]{0,500}\}){0,4})"
)


def apply_rule(name: str, text: str, *, preserve_markup: bool) -> str:
    """Applies a rule of `RULES`; with `preserve_markup` code, formulas and links stay unchanged."""
    rule = RULES[name]
    if not preserve_markup or name in _EVERYWHERE:
        return rule(text)
    pieces = _blocks(text) if name in _BY_LINES else _pieces(text)
    return "".join(piece if marked else rule(piece) for marked, piece in pieces)


def _pieces(text: str) -> Iterator[tuple[bool, str]]:
    """Splits the text into (True, Markdown or LaTeX to preserve) and (False, prose)."""
    for marked, block in _blocks(text):
        if marked:
            yield True, block
        else:
            for number, piece in enumerate(_MARKED_SPAN.split(block)):
                if piece:
                    yield number % 2 == 1, piece


def _blocks(text: str) -> Iterator[tuple[bool, str]]:
    """Splits the text by lines: (True, fenced code, LaTeX environments, headings, rules, tables) or (False, others)."""
    lines = text.splitlines(keepends=True)
    prose: list[str] = []
    number = 0
    last: dict[str, int] = {}  # last line with each end of a block, so that no search is in vain
    for place, line in enumerate(lines):
        for end in _ends(line):
            last[end] = place
    while number < len(lines):
        stop = _block_end(lines, number, last)
        if stop is None:
            prose.append(lines[number])
            number += 1
            continue
        yield False, "".join(prose)
        yield True, "".join(lines[number:stop])
        prose, number = [], stop
    yield False, "".join(prose)


def _ends(line: str) -> Iterator[str]:
    if fence := _FENCE.match(line):
        yield fence[1][:3]
    yield from re.findall(r"\\end\{[A-Za-z]{1,30}\*?\}", line)


def _block_end(lines: list[str], number: int, last: dict[str, int]) -> int | None:
    """Line after the block that starts at `number`, or None where none starts."""
    line = lines[number]
    fence, begin = _FENCE.match(line), _BEGIN.search(line)
    if fence or begin:
        end = fence[1][:3] if fence else rf"\end{{{begin[1]}}}" if begin else ""
        first = number + 1 if fence else number
        if last.get(end, -1) >= first:
            return next(place for place in range(first, len(lines)) if end in _ends(lines[place])) + 1
    return number + 1 if _MARKED_LINE.match(line) else None


class Languages:
    """Filter of texts by language (py3langid)."""

    def __init__(self, codes: list[str]) -> None:
        """Takes language codes such as en or zh. Raises ConfigError for an unknown one, or a missing library."""
        self.codes = frozenset(codes)
        self._library: Any = require("py3langid", "--languages")
        known = [str(code) for code, _ in self._library.rank("")]
        for code in codes:
            if code not in known:
                raise ConfigError(f"--languages {code}: not a language of py3langid; {suggest(code, known)}")

    def keeps(self, text: str) -> bool:
        """True where the most likely language of the first 4,000 characters is in `codes`."""
        return str(self._library.classify(text[:4000])[0]) in self.codes
