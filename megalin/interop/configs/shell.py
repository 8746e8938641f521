"""Reader of shell scripts that start a training: their commands with variables filled in. Nothing is ever run."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megalin.errors import ConfigError
from megalin.interop.configs.shell_words import Scope, Token, integer, tokens
from megalin.structured_text import StructureError, structure_errors

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARATIONS = ("export", "local", "declare", "typeset", "readonly")
_LOOPS = ("for", "while", "until", "select")
_MAX_SCRIPT = 1 << 20  # characters
_NUMBERS = {"-eq": "__eq__", "-ne": "__ne__", "-gt": "__gt__", "-lt": "__lt__", "-ge": "__ge__", "-le": "__le__"}


class Script(NamedTuple):
    """Commands of a script.

    Attributes:
        commands: the words of each command that would run, in order.
        notes: (line, text) for each skipped part, which only a shell can evaluate.
    """

    commands: list[list[str]]
    notes: list[tuple[int, str]]


def read_script(text: str, variables: Mapping[str, str]) -> Script:
    """Reads bash: assignments, arrays, `if` and `case` over texts and numbers; loops and here-documents are skipped.

    An unset variable stays in the words as `${NAME}`. The environment is not read. PWD is `.`.

    Args:
        variables: environment variables by name, and the script's arguments by number.

    Raises:
        ConfigError: a quote or bracket that is never closed, or a script that is too long, nested too deeply, or whose
            variables expand too far.
    """
    reader = _Reader(Scope({name: [value] for name, value in {"PWD": ".", **variables}.items()}))
    try:
        if len(text) > _MAX_SCRIPT:
            raise StructureError(f"more than {_MAX_SCRIPT:,} characters")
        with structure_errors():
            for statement in _statements(tokens(text)):
                reader.execute(statement)
    except StructureError as error:
        raise ConfigError(f"the script cannot be read: {error}; give the training command alone") from None
    return Script(reader.commands, list(reader.notes))


def _statements(script: Sequence[Token]) -> Iterator[list[Token]]:
    """Splits tokens at line ends, `;` and `;;`; `;;` is also a statement of its own."""
    statement: list[Token] = []
    for token in script:
        if token.operator in ("\n", ";", ";;"):
            yield statement
            statement = []
            if token.operator == ";;":
                yield [token]
        else:
            statement.append(token)
    yield statement


class _Frame:
    """State of an open `if`, `case` or loop: `active` is whether its branch is taken (None: undecidable)."""

    def __init__(self, kind: str, line: int, *, outer: bool, active: bool | None = None) -> None:
        self.kind, self.line, self.outer, self.active = kind, line, outer, active
        self.done: bool | None = active  # whether a branch was taken
        self.subject: str | None = None
        self.expects_pattern = False

    def branch(self, holds: bool | None) -> None:
        """Starts a branch, which is taken if its condition holds and no earlier branch was taken."""
        self.active = None if self.done is None else (not self.done and holds)
        self.done = True if self.active else None if self.active is None else self.done


class _Reader:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.frames: list[_Frame] = []
        self.commands: list[list[str]] = []
        self.notes: dict[tuple[int, str], None] = {}  # in order

    def execute(self, statement: list[Token]) -> None:
        while statement:
            word = "" if statement[0].quoted else statement[0].text
            frame = self.frames[-1] if self.frames else None
            if frame and frame.kind == "case" and frame.expects_pattern and word not in ("esac", ";;"):
                statement = self._pattern(frame, statement)
            elif word in ("then", "do", "{", "}", "(", ")"):
                statement = statement[1:]
            elif word == "function" or [token.operator for token in statement[1:3]] == ["(", ")"]:
                statement = statement[2 if word == "function" else 3 :]
            elif word == "case":
                statement = self._case(statement)
            else:
                self._keyword(word, frame, statement)
                return

    def _keyword(self, word: str, frame: _Frame | None, statement: list[Token]) -> None:
        if word == "if" or word in _LOOPS:
            self.frames.append(_Frame(word, statement[0].line, outer=self._active()))
            if word == "if":
                self.frames[-1].done = False
                holds = self._list(statement[1:], condition=True) if self.frames[-1].outer else False
                self.frames[-1].branch(holds)
        elif word in ("fi", "esac", "done") and frame:
            self.frames.pop()
        elif word in ("elif", "else") and frame:
            decided = frame.outer and frame.done is False
            holds = self._list(statement[1:], condition=True) if word == "elif" and decided else True
            frame.branch(holds)
        elif word == ";;" and frame:
            frame.expects_pattern, frame.active = True, False
        elif self._active():
            self._list(statement, condition=False)
        else:
            self._note_skipped(statement)

    def _active(self) -> bool:
        return all(frame.outer and frame.active for frame in self.frames[-1:])

    def _note_skipped(self, statement: Sequence[Token]) -> None:
        """Notes a skipped statement with assignments or flags, if its condition is undecidable."""
        undecided = next((frame for frame in self.frames if frame.active is None), None)
        relevant = any(_ASSIGNMENT.match(token.text) or token.text.startswith("--") for token in statement)
        if undecided and relevant:
            kind = "a loop" if undecided.kind in _LOOPS else "a condition that only a shell can evaluate"
            self.notes[undecided.line, f"{kind}: its body is skipped"] = None

    def _case(self, statement: list[Token]) -> list[Token]:
        frame = _Frame("case", statement[0].line, outer=self._active(), active=False)
        frame.subject = self.scope.text(statement[1], unset=False) if len(statement) > 1 else ""
        frame.expects_pattern = True
        self.frames.append(frame)
        return statement[3:]  # case WORD in

    def _pattern(self, frame: _Frame, statement: list[Token]) -> list[Token]:
        end = next((index for index, token in enumerate(statement) if token.operator == ")"), len(statement))
        patterns = [self.scope.text(token) for token in statement[:end] if not token.operator]
        frame.expects_pattern = False
        frame.branch(any(fnmatch.fnmatchcase(frame.subject or "", pattern) for pattern in patterns))
        return statement[end + 1 :]

    def _list(self, statement: Sequence[Token], *, condition: bool) -> bool | None:
        """Evaluates commands connected by && and ||; returns the last result."""
        command: list[Token] = []
        result: bool | None = True
        connector, brackets = "", 0  # the connector before the command, and open [[
        for token in [*statement, Token(0, "&")]:
            brackets += (token.text == "[[") - (token.text == "]]")
            if token.operator not in ("&&", "||", "|", "&") or brackets:
                command.append(token)
                continue
            if connector == "" or (connector == "&&" and result) or (connector == "||" and result is False):
                result = self._command(command, condition=condition)
            elif result is None:
                self._undecided(command)
            connector = token.operator if token.operator in ("&&", "||") else ""
            command = []
        return result

    def _undecided(self, command: Sequence[Token]) -> None:
        if any(_ASSIGNMENT.match(token.text) for token in command):
            text = "a condition that only a shell can evaluate: the command after it is skipped"
            self.notes[command[0].line, text] = None

    def _command(self, command: Sequence[Token], *, condition: bool) -> bool | None:
        words = [token for token in command if not token.operator]
        if words and words[0].text == "!" and not words[0].quoted:
            result = self._command(words[1:], condition=condition)
            return None if result is None else not result
        if words and words[0].text in _DECLARATIONS:
            words = [token for token in words[1:] if _ASSIGNMENT.match(token.text)]
        rest = next((index for index, token in enumerate(words) if not _ASSIGNMENT.match(token.text)), None)
        if rest is None:
            for token in words:
                self._assign(token)
            return True
        name = words[rest].text
        if name in ("[", "[[", "test"):
            return self._test([token for token in command[rest + 1 :] if token.text not in ("]", "]]")])
        fields = [field for token in words[rest:] for field in self.scope.expand(token)]
        if name in ("source", "."):
            text = f"{' '.join(fields)} is not read; give its variables with --variable"
            self.notes[words[rest].line, text] = None
        elif name == "eval":
            text = " ".join(fields[1:])
            self.scope.charge([text])
            for statement in _statements(tokens(text)):
                self.execute(statement)
        elif fields:
            self.commands.append(fields)
        return None if condition else True

    def _assign(self, token: Token) -> None:
        match = _ASSIGNMENT.match(token.text)
        assert match is not None, token
        name, append = match[1], bool(match[2])
        if token.array is not None:
            new = [field for word in token.array for field in self.scope.expand(word)]
            if append:
                self.scope.values.setdefault(name, []).extend(new)
            else:
                self.scope.values[name] = new
            return
        old = self.scope.values.get(name, [])
        first = token.pieces[0]
        value = token._replace(pieces=(first._replace(text=first.text[match.end() :]), *token.pieces[1:]))
        text = self.scope.text(value)
        if append:
            text = (old[-1] if old else "") + text
            self.scope.charge([text])
        self.scope.values[name] = [*old[:-1], text] if append else [text]

    def _test(self, words: Sequence[Token]) -> bool | None:
        """Result of `[ ... ]`; None for conditions on files and the like."""
        for connector, decide in (("||", any), ("&&", all)):
            for index, token in enumerate(words):
                if token.operator == connector:
                    sides = [self._test(words[:index]), self._test(words[index + 1 :])]
                    return None if None in sides else decide(sides)
        if words and words[0].text == "!":
            result = self._test(words[1:])
            return None if result is None else not result
        match [self.scope.text(token, unset=False) for token in words]:
            case ["-z", text]:
                return not text
            case ["-n", text] | [text] if text not in ("-z", "-n"):
                return bool(text)
            case [left, "=" | "==", right]:
                return fnmatch.fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatch.fnmatchcase(left, right)
            case [left, name, right] if name in _NUMBERS and None not in (integer(left), integer(right)):
                return bool(getattr(integer(left), _NUMBERS[name])(integer(right)))
        return None
