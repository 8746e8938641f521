"""The house rules as tests: sizes, language, layers, and calls that are never safe."""

import ast
import functools
import graphlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FIRST_WORDS = {"What", "Which", "Where", "That", "Whoever", "When", "Whose"}
"""Words that turn a docstring's first line into a clause: it is a noun phrase or a verb in the third person."""
RETIRED_WORDS = {"told", "tell", "hear", "forget", "settle", "whoever", "beside", "peer", "stream"}
"""Words that no public name holds, but within one of STANDARD_TERMS (docs/glossary.md has the field's words)."""
STANDARD_TERMS = re.compile(r"(residual|cuda)_streams?|forget_gates?")
RANK_NAMES = {"ProcessGroup", "DeviceMesh", "get_rank", "get_world_size"}
RANK_MODULE = "torch.distributed"
KNOW_RANKS = ("megalin/parallel/", "megalin/checkpoint/", "megalin/optim/", "megalin/train/")
BANNED_CALLS = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "tempfile.mktemp",
    "__import__",
    "pydoc.locate",
    "runpy.run_path",
    "runpy.run_module",
    "importlib.util.spec_from_file_location",
}
IMPORT_BY_NAME = (
    "megalin/layers/external_mixers.py",  # decides on modules that configs name
    "megalin/optional.py",  # of megalin's extras
    "megalin/__init__.py",  # of its table of public names
    "megalin/ops/dispatch/backend.py",  # of the package megalin.ops
)
"""Files that import modules by names from elsewhere than their own text."""
# keyword -> (call, or None for any; the only values that are safe, None = absent)
SAFE_KEYWORDS = {
    "weights_only": ("torch.load", {True}),
    "allow_pickle": ("numpy.load", {None, False}),
    "shell": (None, {None, False}),
}
Check = Callable[[ast.Module], Iterator[str]]


def _sources(*folders: str) -> list[str]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


@functools.lru_cache(maxsize=1)
def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Every node of a file: each rule reads them, and a walk takes longer than the parser."""
    return list(ast.walk(tree))


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """The full dotted name of `a.b.c`, with what the file calls `a` resolved; "" for anything else."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, aliases)):
        return f"{owner}.{node.attr}"
    return ""


def _imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, full name, local name) of everything imported; a plain `import a.b` binds `a`."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield node.lineno, item.name, item.asname or item.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for item in node.names:
                yield node.lineno, f"{node.module}.{item.name}", item.asname or item.name


def _aliases(tree: ast.Module) -> dict[str, str]:
    found = {}
    for _, full, local in _imports(tree):
        plain = "." in full and full.partition(".")[0] == local
        found[local] = local if plain else full
    return found


def _is_rank_module(name: str) -> bool:
    return name == RANK_MODULE or name.startswith(f"{RANK_MODULE}.")


def long_functions(tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def missing_docstring(tree: ast.Module) -> Iterator[str]:
    if not (ast.get_docstring(tree) and tree.body[0].lineno == 1):
        yield "1: the first line is no docstring that says what the file owns"


def clause_docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings, attributes' too, whose first line begins with a clause."""
    for node in _nodes(tree):
        for child in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            text = child.value.value if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) else None
            if isinstance(text, str):
                first = re.match(r"\w*", text.strip())
                if first and first[0] in FIRST_WORDS:
                    yield f"{child.lineno}: a docstring begins with {first[0]}"


def _public_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of modules' and classes' public functions, classes, arguments and attributes."""
    for node in _nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield child.lineno, child.name
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and (
                    not child.name.startswith("_") or child.name == "__init__"
                ):
                    yield from ((item.lineno, item.arg) for item in (*child.args.args, *child.args.kwonlyargs))
                targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
                yield from ((target.lineno, target.id) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def retired_words(tree: ast.Module) -> Iterator[str]:
    for line, name in _public_names(tree):
        if name.startswith("_"):
            continue
        snake = STANDARD_TERMS.sub("", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
        for word in re.findall(r"[a-z]+", snake):
            if word.removesuffix("s") in RETIRED_WORDS:
                yield f"{line}: the public name {name} holds the retired word {word}"


def distributed_imports(tree: ast.Module) -> Iterator[str]:
    for line, name, _ in _imports(tree):
        if _is_rank_module(name):
            yield f"{line}: imports {name}"
    aliases = _aliases(tree)
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute) and _dotted(node, aliases) == RANK_MODULE:
            yield f"{node.lineno}: reaches {RANK_MODULE}"


def rank_names(tree: ast.Module) -> Iterator[str]:
    yield from distributed_imports(tree)
    for node in _nodes(tree):
        name = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name", ast.arg: "arg"}.get(type(node))
        if name and getattr(node, name).rpartition(".")[2] in RANK_NAMES:
            yield f"{node.lineno}: names {getattr(node, name)}"


def unsafe_calls(tree: ast.Module) -> Iterator[str]:
    aliases = _aliases(tree)
    for node in _nodes(tree):
        if isinstance(node, ast.Constant) and node.value == "0.0.0.0":
            yield f"{node.lineno}: listens to every network"
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func, aliases)
        if called in BANNED_CALLS:
            yield f"{node.lineno}: calls {called}"
        given = {item.arg: getattr(item.value, "value", item) for item in node.keywords}
        for keyword, (function, safe) in SAFE_KEYWORDS.items():
            if called == (function or called) and given.get(keyword) not in safe:
                yield f"{node.lineno}: calls {called or 'something'} with unsafe {keyword}"


def imports_by_name(tree: ast.Module) -> Iterator[str]:
    """Imports whose name is neither a constant nor begins with one that keeps it in this package."""
    aliases = _aliases(tree)
    for node in _nodes(tree):
        if isinstance(node, ast.Call) and _dotted(node.func, aliases) == "importlib.import_module":
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            start = name.value if isinstance(name, ast.Constant) else ""
            if not start or (name is not node.args[0] and not start.startswith("megalin.")):
                yield f"{node.lineno}: imports a module by a name from elsewhere"


def broad_excepts(tree: ast.Module) -> Iterator[str]:
    """Handlers of everything, but those that raise again, or name the cause of what one call raised."""
    for node in _nodes(tree):
        if not isinstance(node, ast.Try | ast.TryStar):
            continue
        for handler in node.handlers:
            caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            names = {name.id for name in caught if isinstance(name, ast.Name)}
            broad = handler.type is None or names & {"Exception", "BaseException"}
            last = handler.body[-1]
            again = isinstance(last, ast.Raise) and last.exc is None
            cause = last.cause.id if isinstance(last, ast.Raise) and isinstance(last.cause, ast.Name) else None
            translated = len(node.body) == 1 and cause is not None and cause == handler.name
            if broad and (handler.type is None or not (again or translated)):
                yield f"{handler.lineno}: catches everything"


PLANTED = [
    (long_functions, "def f():\n" + "    x = 1\n" * 60, "1: f has 61 lines"),
    (long_functions, "class A:\n    async def f(self):\n" + "        x = 1\n" * 60, "2: f has 61 lines"),
    (missing_docstring, "import os\n", "no docstring"),
    (missing_docstring, "# comment\n'''doc'''\n", "no docstring"),
    (clause_docstrings, "'What a rank holds.'\n", "1: a docstring begins with What"),
    (clause_docstrings, "def _f():\n    'Where it lies.'\n", "2: a docstring begins with Where"),
    (clause_docstrings, "class A:\n    x: int\n    'That of a rank.'\n", "3: a docstring begins with That"),
    (retired_words, "def tell(line): ...\n", "1: the public name tell holds"),
    (retired_words, "class A:\n    def f(self, peers): ...\n", "the public name peers holds"),
    (retired_words, "class StreamCopies: ...\n", "the public name StreamCopies holds the retired word stream"),
    (retired_words, "FLOPS_BESIDE = 1\n", "the public name FLOPS_BESIDE holds"),
    (retired_words, "class A:\n    def __init__(self):\n        self.told = 1\n", "3: the public name told"),
    (distributed_imports, "import torch.distributed as dist\n", "imports torch.distributed"),
    (distributed_imports, "from torch import distributed\n", "imports torch.distributed"),
    (distributed_imports, "from torch.distributed.tensor import DTensor\n", "imports torch.distributed.tensor.DTensor"),
    (distributed_imports, "import torch\ndef f():\n    torch.distributed.barrier()\n", "3: reaches torch.distributed"),
    (distributed_imports, "import torch as t\nt.distributed.barrier()\n", "2: reaches torch.distributed"),
    (rank_names, "from torch.distributed.device_mesh import init_device_mesh\n", "imports torch.distributed"),
    (rank_names, "def f(group: 'ProcessGroup', get_rank): ...\n", "names get_rank"),
    (rank_names, "def f(mesh: DeviceMesh): ...\n", "names DeviceMesh"),
    (rank_names, "size = mesh.get_world_size()\n", "names get_world_size"),
    (rank_names, "from megalin.parallel.mesh import ProcessGroup\n", "names ProcessGroup"),
    (unsafe_calls, "import pickle\npickle.load(f)\n", "2: calls pickle.load"),
    (unsafe_calls, "from pickle import loads as read\nread(b)\n", "calls pickle.loads"),
    (unsafe_calls, "import torch\ntorch.load(f)\n", "unsafe weights_only"),
    (unsafe_calls, "import torch\ntorch.load(f, weights_only=False)\n", "unsafe weights_only"),
    (unsafe_calls, "import torch\ntorch.load(f, weights_only=flag)\n", "unsafe weights_only"),
    (unsafe_calls, "import numpy as np\nnp.load(f, allow_pickle=True)\n", "unsafe allow_pickle"),
    (unsafe_calls, "eval(text)\n", "calls eval"),
    (unsafe_calls, "exec(text)\n", "calls exec"),
    (unsafe_calls, "import subprocess\nsubprocess.run(c, shell=True)\n", "unsafe shell"),
    (unsafe_calls, "import os.path\nos.system(c)\n", "calls os.system"),
    (unsafe_calls, "from os import system\nsystem(c)\n", "calls os.system"),
    (unsafe_calls, "import yaml\nyaml.load(f)\n", "calls yaml.load"),
    (unsafe_calls, "import tempfile\ntempfile.mktemp()\n", "calls tempfile.mktemp"),
    (unsafe_calls, "server.bind(('0.0.0.0', 80))\n", "listens to every network"),
    (unsafe_calls, "__import__(name)\n", "calls __import__"),
    (imports_by_name, "import importlib\nimportlib.import_module(name)\n", "2: imports a module by a name"),
    (imports_by_name, "import importlib\nimportlib.import_module(f'{name}.x')\n", "imports a module by a name"),
    (imports_by_name, "from importlib import import_module as f\nf(f'me{name}')\n", "imports a module by a name"),
    (broad_excepts, "try:\n    f()\nexcept:\n    pass\n", "3: catches everything"),
    (broad_excepts, "try:\n    f()\nexcept Exception:\n    pass\n", "catches everything"),
    (broad_excepts, "try:\n    f()\nexcept Exception as e:\n    raise A from None\n", "catches everything"),
    (broad_excepts, "try:\n    f()\n    g()\nexcept Exception as e:\n    raise A from e\n", "catches everything"),
    (broad_excepts, "try:\n    f()\nexcept (OSError, Exception) as e:\n    pass\n", "catches everything"),
    (broad_excepts, "try:\n    f()\nexcept BaseException:\n    pass\n", "catches everything"),
]

CLEAN = '''"""A file that keeps every rule."""
import importlib
import os
import subprocess
import numpy as np
import torch

def f(model, path):
    model.eval()
    importlib.import_module("triton")
    importlib.import_module(f"megalin.commands.{path}")
    try:
        np.load(path)
        np.load(path, allow_pickle=False)
        torch.load(path, weights_only=True)
        subprocess.run(["ls"], shell=False)
        os.path.exists(path)
    except (OSError, ValueError):
        pass
    except BaseException:
        path.unlink()
        raise
    try:
        read(path)
    except Exception as error:
        raise ValueError(path) from error
'''


@pytest.mark.parametrize(("check", "source", "expected"), PLANTED)
def test_planted_fault_is_found(check, source, expected):
    assert any(expected in problem for problem in check(ast.parse(source)))


@pytest.mark.parametrize("check", sorted({check for check, _, _ in PLANTED}, key=lambda check: check.__name__))
def test_clean_source_passes(check):
    assert list(check(ast.parse(CLEAN))) == []


def test_files_are_short():
    paths = [*_sources("megalin", "tools", "examples", "tests", "csrc"), "setup.py"]
    assert len(paths) > 10
    lengths = {path: len((ROOT / path).read_text("utf-8").splitlines()) for path in paths}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def _class_names(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def _twice(places: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {', '.join(paths)}" for name, paths in places.items() if len(paths) > 1]


def test_planted_class_name_is_found_twice():
    names = _class_names(ast.parse("class A: ...\nclass _B: ...\n"))
    assert _twice({name: ["a.py", "b.py"] for name in names} | {"C": ["c.py"]}) == ["A: a.py, b.py"]


def _applies(path: str, folders: tuple[str, ...], excluded: tuple[str, ...]) -> bool:
    return path.startswith(folders) and not path.startswith(excluded)


CODE = ("megalin/", "tools/", "examples/", "csrc/", "setup.py")
RULES: dict[Check, tuple[tuple[str, ...], tuple[str, ...]]] = {
    long_functions: (("megalin/", "tools/", "examples/", "tests/"), ()),
    missing_docstring: (CODE, ("setup.py",)),
    clause_docstrings: ((*CODE, "tests/"), ("setup.py",)),
    retired_words: (("megalin/", "tools/", "csrc/"), ()),
    rank_names: (("megalin/layers/", "megalin/model/"), ()),
    distributed_imports: (("megalin/",), KNOW_RANKS),
    unsafe_calls: (CODE, ()),
    imports_by_name: (("megalin/",), IMPORT_BY_NAME),
    broad_excepts: (CODE, ()),
}
"""Folders whose files keep a rule, and those of them that need not."""


@pytest.fixture(scope="module")
def problems() -> dict[object, list[str]]:
    """Violations of each rule, and the public classes of one name: every file is parsed once."""
    found: dict[object, list[str]] = {check: [] for check in RULES}
    classes: dict[str, list[str]] = defaultdict(list)
    for path in [*_sources("megalin", "tools", "examples", "csrc", "tests"), "setup.py"]:
        tree = ast.parse((ROOT / path).read_text("utf-8"), path)
        for check, folders in RULES.items():
            if _applies(path, *folders):
                found[check] += [f"{path}:{problem}" for problem in check(tree)]
        if path.startswith(("megalin/", "tools/", "csrc/")):
            for name in _class_names(tree):
                classes[name].append(path)
    return found | {"classes": _twice(classes)}


@pytest.mark.parametrize("rule", [*RULES, "classes"], ids=lambda rule: getattr(rule, "__name__", rule))
def test_files_keep_the_rule(rule, problems):
    assert problems[rule] == []


def _assert_acyclic(imported: dict[str, set[str]]) -> None:
    graphlib.TopologicalSorter(imported).prepare()


def test_planted_import_cycle_is_found():
    with pytest.raises(graphlib.CycleError):
        _assert_acyclic({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_modules_do_not_import_each_other_in_a_circle():
    graph = grimp.build_graph("megalin", cache_dir=None, exclude_type_checking_imports=True)
    _assert_acyclic({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
