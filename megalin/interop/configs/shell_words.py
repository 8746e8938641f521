"""Words of shell scripts: splitting text into words, and expanding variables in them. Nothing is ever run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megalin.errors import ConfigError
from megalin.structured_text import MAX_EXPANDED, StructureError

_OPERATORS = ("&&", "||", ";;", "&>", ">>", "<<<", "<<", ">&", "<&", ";", "|", "&", "(", ")", "<", ">")
_REDIRECTIONS = ("&>", ">>", "<<<", ">&", "<&", "<", ">")
_ENDS = " \t\r\n;|&()<>"
_ESCAPE = re.compile(r'\\[$`"\\]')  # inside double quotes
_SPECIAL = re.compile(r"[\\$]")  # begins an escape or a variable
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*]")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=?])(.*))?", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_MAX_ARITHMETIC = 1000  # characters of $((...))
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Piece(NamedTuple):
    """Part of a word: literal text (`'`), or text with variables, in double quotes (`"`) or without quotes (empty)."""

    text: str
    quote: str


class Token(NamedTuple):
    """Word, operator or line end."""

    line: int
    operator: str  # empty for a word; "\n" for the end of a line
    pieces: tuple[Piece, ...] = ()
    array: tuple[Token, ...] | None = None  # the words of NAME=( ... )

    @property
    def text(self) -> str:
        """The word as written, without quotes; for an operator, the operator."""
        return self.operator or "".join(piece.text for piece in self.pieces)

    @property
    def quoted(self) -> bool:
        """True if any part is in quotes, so that it cannot be a keyword."""
        return any(piece.quote for piece in self.pieces)


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text, self.place, self.line = text, 0, 1
        self.documents: list[str] = []  # delimiters of here-documents that begin on the next line

    def tokens(self, *, closing: str = "") -> Iterator[Token]:
        """The tokens up to `closing`, or up to the end of the text."""
        while True:
            self._skip_blanks()
            if self.place >= len(self.text):
                if closing:
                    raise ConfigError(f"line {self.line}: the script ends before {closing!r}; give the complete script")
                return
            if self.text[self.place] == "\n":
                yield Token(self.line, "\n")
                self._end_line()
                continue
            found = next((name for name in _OPERATORS if self.text.startswith(name, self.place)), None)
            if found is None:
                word = self._word()
                if not (word.text.isdigit() and self.text.startswith(("<", ">"), self.place)):  # 2>&1
                    yield word
                continue
            self.place += len(found)
            if found == closing:
                return
            if found == "<<":
                self._skip_blanks()
                self.documents.append(self._word().text.lstrip("-"))
            elif found in _REDIRECTIONS:
                self._skip_blanks()
                self._word()
            else:
                yield Token(self.line, found)

    def _skip_blanks(self) -> None:
        while self.place < len(self.text):
            if self.text.startswith("\\\n", self.place):
                self.line, self.place = self.line + 1, self.place + 2
            elif self.text[self.place] in " \t\r":
                self.place += 1
            elif self.text[self.place] == "#":
                self.place = self._find("\n")
            else:
                return

    def _find(self, end: str) -> int:
        place = self.text.find(end, self.place)
        return len(self.text) if place < 0 else place

    def _end_line(self) -> None:
        self.line, self.place = self.line + 1, self.place + 1
        for delimiter in self.documents:
            match = re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(self.text, self.place)
            end = match.end() if match else len(self.text)
            self.line += self.text.count("\n", self.place, end)
            self.place = end
        self.documents = []

    def _word(self) -> Token:
        first, pieces, plain = self.line, list[Piece](), ""
        while self.place < len(self.text) and self.text[self.place] not in _ENDS:
            character = self.text[self.place]
            if character in "'\"\\" or self.text.startswith("$'", self.place):
                pieces += [Piece(plain, ""), self._escaped() if character == "\\" else self._quoted()]
                plain = ""
            else:
                plain += self._unit()
        if self.text.startswith("(", self.place) and not pieces and _ARRAY.fullmatch(plain):
            self.place += 1
            array = tuple(token for token in self.tokens(closing=")") if not token.operator)
            return Token(first, "", (Piece(plain, ""),), array)
        pieces.append(Piece(plain, ""))
        return Token(first, "", tuple(piece for piece in pieces if piece.text or piece.quote))

    def _escaped(self) -> Piece:
        """The character after a backslash as literal text; a line end after it disappears."""
        character = self.text[self.place + 1 : self.place + 2]
        self.place += 2
        self.line += character == "\n"
        return Piece("" if character == "\n" else character, "" if character == "\n" else "'")

    def _quoted(self) -> Piece:
        quote = self.text[self.place]
        if quote == "$":  # $'...'
            self.place, quote = self.place + 1, "'"
        self.place += 1
        text = ""
        while not self.text.startswith(quote, self.place):
            if self.place >= len(self.text):
                raise ConfigError(f"line {self.line}: a quote {quote} is never closed; give the complete script")
            if quote == '"' and self.text.startswith("\\\n", self.place):
                self.line, self.place = self.line + 1, self.place + 2
            elif quote == '"' and _ESCAPE.match(self.text, self.place):
                text += self.text[self.place : self.place + 2]
                self.place += 2
            elif quote == '"':
                text += self._unit()
            else:
                text += self.text[self.place]
                self.line += self.text[self.place] == "\n"
                self.place += 1
        self.place += 1
        return Piece(text, quote)

    def _unit(self) -> str:
        """The next character, or all of `${...}`, `$(...)` or a pair of backticks."""
        start = self.place
        if self.text.startswith(("${", "$("), start):
            self.place = _closed(self.text, start + 1)
        elif self.text[start] == "`":
            self.place = start + 1
            self.place = self._find("`") + 1
        else:
            self.place += 1
        unit = self.text[start : self.place]
        self.line += unit.count("\n")
        return unit


def _closed(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    opening = text[start]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if depth == 0:
            return place + 1
    return len(text)


def tokens(script: str) -> list[Token]:
    """Splits a script into words, operators and line ends, without comments and here-documents.

    Raises:
        ConfigError: a quote or bracket that is never closed.
    """
    return list(_Lexer(script).tokens())


def integer(text: str) -> int | None:
    """The number that a text spells in at most 18 digits; None for another text."""
    return int(text) if _INTEGER.fullmatch(text) else None


class Scope:
    """Variables of a script, each as a list of elements; a plain variable has one element."""

    def __init__(self, values: dict[str, list[str]]) -> None:
        self.values = values
        self._expanded = 0

    def charge(self, texts: Sequence[str]) -> None:
        """Counts expanded text. Raises StructureError beyond the limit of a script."""
        self._expanded += sum(map(len, texts)) + len(texts)
        if self._expanded > MAX_EXPANDED:
            raise StructureError(f"variables expand to more than {MAX_EXPANDED:,} characters")

    def expand(self, word: Token, *, unset: bool = True) -> list[str]:
        """Expands a word into fields.

        An unset variable stays as `${NAME}`, or is empty without `unset`. Text that only a shell can evaluate
        (`$(command)`) stays as written.
        """
        fields, begun = [""], False
        for piece in word.pieces:
            if piece.quote == "'" or not piece.text:
                fields[-1] += piece.text
                begun = begun or bool(piece.quote)
                continue
            for chunk in self._chunks(piece.text, unset=unset):
                words = [chunk] if isinstance(chunk, str) else chunk if piece.quote else " ".join(chunk).split()
                for index, text in enumerate(words):
                    fields += [""] if index else []
                    fields[-1] += text
                    begun = True
        return fields if begun else []

    def text(self, word: Token, *, unset: bool = True) -> str:
        """Expands a word into one field, as in an assignment."""
        pieces = tuple(piece._replace(quote=piece.quote or '"') for piece in word.pieces)
        return " ".join(self.expand(word._replace(pieces=pieces), unset=unset))

    def _chunks(self, text: str, *, unset: bool) -> Iterator[str | list[str]]:
        """Yields literal text, and the elements of each variable in it."""
        place = 0
        while place < len(text):
            if _ESCAPE.match(text, place):
                yield text[place + 1 : place + 2]
                place += 2
            elif text.startswith("$((", place):
                end = _closed(text, place + 1)
                yield self._arithmetic(text[place:end])
                place = end
            elif text.startswith("${", place):
                end = _closed(text, place + 1)
                yield self._parameter(text[place + 2 : end - 1], unset=unset)
                place = end
            elif text[place] == "$" and (match := _NAME.match(text, place + 1)):
                yield self._parameter(match[0], unset=unset)
                place = match.end()
            elif text.startswith("$(", place):
                end = _closed(text, place + 1)
                yield text[place:end]
                place = end
            else:
                special = _SPECIAL.search(text, place + 1)
                end = special.start() if special else len(text)
                yield text[place:end]
                place = end

    def _parameter(self, inside: str, *, unset: bool) -> list[str]:
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            return [f"${{{inside}}}"]
        name, index, rule, default = match.groups()
        value = self.values.get(name)
        if value is not None and not (rule and rule[0] == ":" and not any(value)):
            if index is None and name not in "@*":
                value = value[:1] or [""]
            elif index not in (None, "@", "*"):
                place = integer(index)
                value = [""] if place is None else value[place : place + 1] or [""]
            self.charge(value)
            return value
        if rule is None or rule[-1] == "?":
            return [f"${{{name}}}"] if unset else [""]
        self.charge([default])
        words = [field for token in tokens(default) if not token.operator for field in self.expand(token, unset=unset)]
        if rule[-1] == "=":
            self.values[name] = [" ".join(words)]
        return [" ".join(words)]

    def _arithmetic(self, text: str) -> str:
        """Value of `$((...))`; the text as written if one of its variables is not a number."""
        inside = "".join("".join(chunk) for chunk in self._chunks(text[3:-2], unset=True))
        if len(inside) > _MAX_ARITHMETIC:
            return text
        try:
            return str(self._number(ast.parse(inside.replace("/", "//").strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, MemoryError):  # MemoryError: brackets too deep
            return text

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(self.values.get(node.id, ["no number"])[0])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](self._number(node.left), self._number(node.right))
        raise ValueError(ast.dump(node))
