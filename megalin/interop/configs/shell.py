"""What a shell script that starts a training would run: its commands with variables filled in. Nothing is ever run."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megalin.interop.configs.shell_words import Scope, Token, tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARATIONS = ("export", "local", "declare", "typeset", "readonly")
_LOOPS = ("for", "while", "until", "select")
_NUMBERS = {"-eq": "__eq__", "-ne": "__ne__", "-gt": "__gt__", "-lt": "__lt__", "-ge": "__ge__", "-le": "__le__"}


class Script(NamedTuple):
    """What was read of a script.

    Attributes:
        commands: the words of each command that would run, in order.
        notes: (line, what was left out) of parts that only a shell can tell.
    """

    commands: list[list[str]]
    notes: list[tuple[int, str]]


def read_script(text: str, variables: Mapping[str, str]) -> Script:
    """Reads bash: assignments, arrays, `if` and `case` over texts and numbers; loops and here-documents are left out.

    A variable that nothing has set stays in the words as `${NAME}`; of the environment nothing is read. PWD is `.`.

    Args:
        variables: given by hand: those of the environment, and arguments of the script by their numbers.

    Raises:
        ConfigError: a quote or bracket that is never closed.
    """
    reader = _Reader(Scope({name: [value] for name, value in {"PWD": ".", **variables}.items()}))
    for statement in _statements(tokens(text)):
        reader.execute(statement)
    return Script(reader.commands, reader.notes)


def _statements(stream: Sequence[Token]) -> Iterator[list[Token]]:
    """The tokens between ends of lines, `;` and `;;`; the last of these is a statement of its own."""
    statement: list[Token] = []
    for token in stream:
        if token.operator in ("\n", ";", ";;"):
            yield statement
            statement = []
            if token.operator == ";;":
                yield [token]
        else:
            statement.append(token)
    yield statement


class _Frame:
    """An `if`, `case` or loop that is being read: whether its branch is taken (None: cannot be told)."""

    def __init__(self, kind: str, line: int, *, outer: bool, active: bool | None = None) -> None:
        self.kind, self.line, self.outer, self.active = kind, line, outer, active
        self.done: bool | None = active  # whether a branch was taken
        self.subject: str | None = None
        self.wants_pattern = False

    def branch(self, holds: bool | None) -> None:
        """Begins a branch: taken where its condition holds and none was before it."""
        self.active = None if self.done is None else (not self.done and holds)
        self.done = True if self.active else None if self.active is None else self.done


class _Reader:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.frames: list[_Frame] = []
        self.commands: list[list[str]] = []
        self.notes: list[tuple[int, str]] = []

    def execute(self, statement: list[Token]) -> None:
        while statement:
            word = "" if statement[0].quoted else statement[0].text
            frame = self.frames[-1] if self.frames else None
            if frame and frame.kind == "case" and frame.wants_pattern and word not in ("esac", ";;"):
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
            frame.wants_pattern, frame.active = True, False
        elif self._active():
            self._list(statement, condition=False)
        else:
            self._left_out(statement)

    def _active(self) -> bool:
        return all(frame.outer and frame.active for frame in self.frames[-1:])

    def _left_out(self, statement: Sequence[Token]) -> None:
        """Notes a statement that may count and is skipped as its condition cannot be told."""
        undecided = next((frame for frame in self.frames if frame.active is None), None)
        counts = any(_ASSIGNMENT.match(token.text) or token.text.startswith("--") for token in statement)
        if undecided and counts:
            what = "a loop" if undecided.kind in _LOOPS else "a condition that only a shell can tell"
            note = (undecided.line, f"{what}: what it holds is left out")
            if note not in self.notes:
                self.notes.append(note)

    def _case(self, statement: list[Token]) -> list[Token]:
        frame = _Frame("case", statement[0].line, outer=self._active(), active=False)
        frame.subject = self.scope.text(statement[1], unset=False) if len(statement) > 1 else ""
        frame.wants_pattern = True
        self.frames.append(frame)
        return statement[3:]  # case WORD in

    def _pattern(self, frame: _Frame, statement: list[Token]) -> list[Token]:
        end = next((index for index, token in enumerate(statement) if token.operator == ")"), len(statement))
        patterns = [self.scope.text(token) for token in statement[:end] if not token.operator]
        frame.wants_pattern = False
        frame.branch(any(fnmatch.fnmatchcase(frame.subject or "", pattern) for pattern in patterns))
        return statement[end + 1 :]

    def _list(self, statement: Sequence[Token], *, condition: bool) -> bool | None:
        """Runs commands joined by && and ||; the last result."""
        command: list[Token] = []
        result: bool | None = True
        joined, brackets = "", 0  # the joint before the command, and open [[
        for token in [*statement, Token(0, "&")]:
            brackets += (token.text == "[[") - (token.text == "]]")
            if token.operator not in ("&&", "||", "|", "&") or brackets:
                command.append(token)
                continue
            if joined == "" or (joined == "&&" and result) or (joined == "||" and result is False):
                result = self._command(command, condition=condition)
            elif result is None:
                self._undecided(command)
            joined = token.operator if token.operator in ("&&", "||") else ""
            command = []
        return result

    def _undecided(self, command: Sequence[Token]) -> None:
        if any(_ASSIGNMENT.match(token.text) for token in command):
            self.notes.append((command[0].line, "a condition that only a shell can tell: what follows it is left out"))

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
            self.notes.append((words[rest].line, f"{' '.join(fields)} is not read; give its variables by hand"))
        elif name == "eval":
            for statement in _statements(tokens(" ".join(fields[1:]))):
                self.execute(statement)
        elif fields:
            self.commands.append(fields)
        return None if condition else True

    def _assign(self, token: Token) -> None:
        match = _ASSIGNMENT.match(token.text)
        assert match is not None, token
        name, append = match[1], bool(match[2])
        old = self.scope.values.get(name, [])
        if token.array is not None:
            new = [field for word in token.array for field in self.scope.expand(word)]
            self.scope.values[name] = [*old, *new] if append else new
            return
        first = token.pieces[0]
        value = token._replace(pieces=(first._replace(text=first.text[match.end() :]), *token.pieces[1:]))
        text = self.scope.text(value)
        self.scope.values[name] = [*old[:-1], (old[-1] if old else "") + text] if append else [text]

    def _test(self, words: Sequence[Token]) -> bool | None:
        """What `[ ... ]` says; None where it asks for files and the like."""
        for joint, decide in (("||", any), ("&&", all)):
            for index, token in enumerate(words):
                if token.operator == joint:
                    sides = [self._test(words[:index]), self._test(words[index + 1 :])]
                    return None if None in sides else decide(sides)
        texts = [self.scope.text(token, unset=False) for token in words]
        match texts:
            case ["!", *_]:
                result = self._test(words[1:])
                return None if result is None else not result
            case ["-z", text]:
                return not text
            case ["-n", text] | [text] if text not in ("-z", "-n"):
                return bool(text)
            case [left, "=" | "==", right]:
                return fnmatch.fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatch.fnmatchcase(left, right)
            case [left, name, right] if name in _NUMBERS and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
                return bool(getattr(int(left), _NUMBERS[name])(int(right)))
        return None
