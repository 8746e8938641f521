"""Source of a kernel with all that it reads: the functions it calls and the constants of modules, without comments."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from .launch import OPTIONS, PREFIX

FOLDER = Path(__file__).parents[2] / "csrc/triton"


@functools.cache
def _definitions(module: str) -> dict[str, ast.stmt]:
    """Top-level functions, constants and imports of a module of csrc/triton, by name."""
    path = FOLDER / Path(*module.split(".")).with_suffix(".py")
    found: dict[str, ast.stmt] = {}
    for statement in ast.parse(path.read_text("utf-8")).body:
        if isinstance(statement, ast.FunctionDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {
                name.id: statement for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
        elif isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(PREFIX):
            found |= {alias.asname or alias.name: statement for alias in statement.names}
    return found


def kernels() -> list[str]:
    """Kernels of csrc/triton: the functions compiled by Triton that no other such function calls."""
    compiled: set[tuple[str, str]] = set()
    called: set[tuple[str, str]] = set()
    for path in sorted(FOLDER.rglob("*.py")):
        module = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        if path.name == "__init__.py":
            continue
        for name, statement in _definitions(module).items():
            if isinstance(statement, ast.FunctionDef) and _is_compiled(statement):
                compiled.add((module, name))
                names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                called |= {_origin(module, other) for other in names - {name}}
    return sorted(f"{module}.{name}" for module, name in compiled - called)


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def _origin(module: str, name: str) -> tuple[str, str]:
    """Module that defines a name of `module`, and the name there."""
    statement = _definitions(module).get(name)
    if not isinstance(statement, ast.ImportFrom):
        return module, name
    original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
    return _origin(str(statement.module).removeprefix(PREFIX), original)


def takes(kernel: str, text: str) -> bool:
    """Whether the text of a launch begins with a value for each argument of the kernel."""
    module, _, name = kernel.rpartition(".")
    function = _definitions(module).get(name)
    if not isinstance(function, ast.FunctionDef):
        return False
    given = [word.partition("=")[0] for word in text.split()]
    names = [argument.arg for argument in function.args.args]
    return given[: len(names)] == names and not {*given[len(names) :]} - {*OPTIONS}


def source_of(kernel: str) -> str:
    """Text of a kernel and of everything it reads in csrc/triton, each once, in the order of first use."""
    module, _, name = kernel.rpartition(".")
    found: dict[tuple[str, str], str] = {}
    _collect(module, name, found)
    return "\n".join(found.values())


def _collect(module: str, name: str, found: dict[tuple[str, str], str]) -> None:
    module, name = _origin(module, name)
    statement = _definitions(module).get(name)
    if statement is None or (module, name) in found:
        return
    found[module, name] = _text(statement)
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            _collect(module, node.id, found)


def _text(statement: ast.stmt) -> str:
    """Source without comments and without a function's docstring."""
    if isinstance(statement, ast.FunctionDef) and ast.get_docstring(statement) is not None:
        body = statement.body[1:] or [ast.Pass()]
        statement = ast.FunctionDef(**{**{name: getattr(statement, name) for name in statement._fields}, "body": body})
        ast.fix_missing_locations(statement)
    return ast.unparse(statement)
