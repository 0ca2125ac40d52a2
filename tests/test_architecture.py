"""House rules as tests over the source: layers, purity, invariant numbers, defaults, failures and sizes."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import pdrouter

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pdrouter"

LAYERS = (
    {"cli"},
    {"server"},
    {"options"},
    {"proxy", "control", "sim"},
    {"upstream", "telemetry"},
    {"engines"},
    {"core"},
    {"loading", "manual"},
    {"config"},
    {"references"},
    {"setting", "plugins"},
    {"errors", "files"},
)
"""A line may import what is below it; names on one line do not import each other (DESIGN: config and errors are one
line, but ``config`` raises what ``errors`` names; ``setting`` is a part of ``config``, and ``loading`` fills it)."""
FREE = {"__init__", "__main__"}

PURE = {"core", "engines"}
IMPURE_MODULES = frozenset(
    """
    asyncio concurrent contextvars glob http io locale logging multiprocessing os pathlib platform queue random sched
    secrets select selectors shutil signal socket socketserver ssl subprocess sys tempfile threading time urllib.request
    uuid httptools prometheus_client starlette structlog uvicorn uvloop
    """.split()  # noqa: SIM905 - a list of forty lines
)
IMPURE_BUILTINS = frozenset({"open", "print", "input", "exec", "eval", "__import__"})
CLOCK_READS = frozenset({"now", "utcnow", "today"})

NO_SHARED_STATE = {"core", "engines", "proxy", "upstream", "control"}
READ_ONLY = frozenset({"Mapping", "Sequence", "Collection", "Set", "frozenset", "tuple", "MappingProxyType"})
MUTABLE_CALLS = frozenset({"list", "dict", "set", "deque", "defaultdict", "OrderedDict", "Counter"})
Mutable = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp

CATCH_ALL = {"proxy/edge.py": 1, "control/tasks.py": 1}
"""The edge of the data plane and the task supervisor: the two places that answer for whatever happens below them."""

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500

SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def layer_of(name: str) -> int | None:
    """Return the number of a top-level name's layer, counted from above."""
    return next((number for number, names in enumerate(LAYERS) if name in names), None)


def top_of(file: str) -> str:
    """Return the top-level name that a file belongs to."""
    return file.partition("/")[0].removesuffix(".py")


def imports_of(file: str, source: str) -> Iterator[tuple[int, str]]:
    """Return each imported module with its line, wherever in the file it stands; relative ones made absolute."""
    package = ["pdrouter", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def wrong_layers(file: str, source: str) -> list[str]:
    """Return the imports that go up, sideways, or to a name without a layer."""
    own = top_of(file)
    if own in FREE:
        return []
    own_layer, wrong = layer_of(own), []
    if own_layer is None:
        return [f"{file}: {own} has no layer"]
    for line, module in imports_of(file, source):
        head, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if head != "pdrouter" or target in {own, "", "__version__"}:
            continue
        layer = layer_of(target)
        if layer is None or layer <= own_layer:
            wrong.append(f"{file}:{line}: {own} imports {target}")
    return wrong


def impurities(file: str, source: str) -> list[str]:
    """Return the imports and calls by which a file could do I/O, read a clock or draw a number of its own."""
    wrong = []
    for line, module in imports_of(file, source):
        parts = module.split(".")
        if not IMPURE_MODULES.isdisjoint({parts[0], ".".join(parts[:2])}):
            wrong.append(f"{file}:{line}: imports {module}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
            wrong.append(f"{file}:{node.lineno}: calls {node.func.id}()")
        elif isinstance(node, ast.Attribute) and node.attr in CLOCK_READS:
            wrong.append(f"{file}:{node.lineno}: reads a clock by .{node.attr}")
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            wrong.append(f"{file}:{node.lineno}: is asynchronous")
    return wrong


def numeric_defaults(file: str, source: str) -> list[str]:
    """Return the parameters whose default is a number."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function | ast.Lambda):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                value = default.operand if isinstance(default, ast.UnaryOp) else default
                is_number = isinstance(value, ast.Constant) and type(value.value) in {int, float}
                if is_number:
                    wrong.append(f"{file}:{node.lineno}: {getattr(node, 'name', 'lambda')} has a number as a default")
    return wrong


def shared_state(file: str, source: str) -> list[str]:
    """Return the module-level names that hold something mutable and aren't declared read-only."""
    wrong = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not _is_mutable(node.value):
            continue
        name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        if name != "__all__" and READ_ONLY.isdisjoint(re.findall(r"\w+", annotation)):
            wrong.append(f"{file}:{node.lineno}: {name} can be changed; annotate it as Mapping or Sequence")
    return wrong


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in MUTABLE_CALLS
    return isinstance(value, Mutable)


def catches_all(source: str) -> int:
    """Return how many handlers take any exception and don't pass it on."""
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]
    last = [(h, h.body[-1]) for h in handlers]
    takers = [h for h, end in last if not (isinstance(end, ast.Raise) and end.exc is None)]
    caught = [set(re.findall(r"\w+", ast.unparse(h.type))) if h.type else {"Exception"} for h in takers]
    return sum(not names.isdisjoint({"Exception", "BaseException"}) for names in caught)


def oversized(file: str, source: str) -> list[str]:
    """Return the functions and files that are too long to be read at a glance."""
    lines = source.count("\n")
    wrong = [f"{file}: {lines} lines"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                wrong.append(f"{file}:{node.lineno}: {node.name} has {length} lines")
    return wrong


def cited(source: str) -> set[str]:
    """Return the invariant numbers in a file's comments and docstrings."""
    if not re.search(r"\bI[1-9]", source):
        return set()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.ClassDef | Function))
    texts += [ast.get_docstring(node) or "" for node in documented]
    return set(re.findall(r"\bI[1-9]\d*\b", " ".join(texts)))


def marked(source: str) -> set[str]:
    """Return the invariant numbers that a test file's tests hold."""
    if "pytest.mark.invariant" not in source:
        return set()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {
        str(argument.value)
        for call in calls
        if ast.unparse(call.func) == "pytest.mark.invariant"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def invariant_table() -> Mapping[str, bool]:
    """Return the numbers in ARCHITECTURE.md's table, and whether each is to come."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| I")]
    return {row[0]: "to come" in " ".join(row[2:]) for row in rows if re.fullmatch(r"I[1-9]\d*", row[0])}


def test_imports_go_down() -> None:
    """What is below is imported, what is above or beside never: see ``LAYERS``."""
    assert [wrong for file, source in SOURCES.items() for wrong in wrong_layers(file, source)] == []


@pytest.mark.invariant("I5")
def test_the_core_and_the_engines_are_pure() -> None:
    """No I/O, no clock, no chance of their own, nothing asynchronous."""
    pure = {file: source for file, source in SOURCES.items() if top_of(file) in PURE}
    assert len(pure) > 10
    assert [wrong for file, source in pure.items() for wrong in impurities(file, source)] == []


def test_defaults_are_written_in_one_place() -> None:
    """No signature outside ``config.py`` has a number of its own; the simulator's models are data and exempt."""
    files = {file: source for file, source in SOURCES.items() if file != "config.py" and top_of(file) != "sim"}
    assert [wrong for file, source in files.items() for wrong in numeric_defaults(file, source)] == []


def test_modules_hold_no_state() -> None:
    """What a module holds can't be changed by whoever imports it, so that everything is built once and passed down."""
    files = {file: source for file, source in SOURCES.items() if top_of(file) in NO_SHARED_STATE}
    assert [wrong for file, source in files.items() for wrong in shared_state(file, source)] == []


def test_any_exception_is_caught_in_two_places_only() -> None:
    """Elsewhere a failure is named, or goes up."""
    counts = Counter({file: catches_all(source) for file, source in SOURCES.items()})
    assert {file: count for file, count in counts.items() if count > CATCH_ALL.get(file, 0)} == {}


def test_files_and_functions_are_short() -> None:
    """A reader sees a function at once and finds a file's one noun."""
    assert [wrong for file, source in SOURCES.items() for wrong in oversized(file, source)] == []


def test_invariants_are_known_cited_and_held() -> None:
    """A number in code or tests is in the table of ARCHITECTURE.md, a test holds it, and none there is forgotten."""
    table = invariant_table()
    in_code = set().union(*map(cited, SOURCES.values()))
    in_tests = set().union(*(marked(path.read_text("utf-8")) for path in ROOT.glob("tests/**/test_*.py")))
    to_come = {number for number, is_to_come in table.items() if is_to_come}
    faults = {
        "cited in src, not in the table": in_code - set(table),
        "marked in tests, not in the table": in_tests - set(table),
        "cited in src, held by no test": in_code - in_tests - to_come,
        "in the table, neither cited nor held": set(table) - in_code - in_tests - to_come,
    }
    assert {what: sorted(numbers) for what, numbers in faults.items() if numbers} == {}


@pytest.mark.parametrize(
    ("file", "source", "is_wrong"),
    [
        ("core/router.py", "from pdrouter.engines import base", True),
        ("core/router.py", "import pdrouter.proxy.app", True),
        ("core/router.py", "from pdrouter import server", True),
        ("core/router.py", "from ..engines import base", True),
        ("core/router.py", "from .. import engines", True),
        ("core/router.py", "def f():\n    import pdrouter.cli", True),
        ("core/router.py", "from . import ledger\nfrom pdrouter.core.load import LoadView", False),
        ("core/policies/base.py", "from ..load import LoadView", False),
        ("core/router.py", "from pdrouter.errors import RouterError\nimport msgspec", False),
        ("proxy/app.py", "from pdrouter.control import health", True),
        ("proxy/app.py", "from pdrouter.upstream import pool\nfrom pdrouter import __version__", False),
        ("telemetry/metrics.py", "from pdrouter.upstream import pool", True),
        ("server.py", "from pdrouter.cli import main", True),
        ("stray.py", "", True),
        ("__main__.py", "from pdrouter.cli import main", False),
    ],
)
def test_the_layer_rule_bites(file: str, source: str, is_wrong: bool) -> None:
    """However an import is written."""
    assert bool(wrong_layers(file, source)) is is_wrong


@pytest.mark.invariant("I5")
@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import os.path as p",
        "import urllib.request",
        "from urllib import request",
        "def f():\n    from random import random",
        "open('x')",
        "stamp = datetime.now()",
        "async def f(): ...",
    ],
)
def test_the_purity_rule_bites(source: str) -> None:
    """However it is reached; parsing an address or a URL stays allowed."""
    assert impurities("core/x.py", source)
    assert not impurities(
        "core/x.py", "from urllib.parse import urlsplit\nimport math\nfrom pdrouter.core.load import time"
    )


def test_the_other_rules_bite() -> None:
    """Each finds its fault and passes its opposite."""
    assert numeric_defaults("x", "def f(a, *, b=-1): ...")
    assert numeric_defaults("x", "f = lambda a=0.5: a")
    assert not numeric_defaults("x", "def f(a=None, b=True, c=''): ...")
    assert shared_state("x", "A = {}")
    assert shared_state("x", "A: dict[str, int] = dict()")
    assert not shared_state("x", "A: Mapping[str, int] = {}\nB = (1, 2)\n__all__ = []")
    assert catches_all("try: ...\nexcept (ValueError, Exception): ...\ntry: ...\nexcept: ...") == 2
    assert catches_all("try: ...\nexcept ValueError: ...\ntry: ...\nexcept BaseException:\n    x = 1\n    raise") == 0
    assert oversized("x", "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES)
    assert not oversized("x", "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1))
    assert oversized("x", "\n" * (MAX_FILE_LINES + 1))
    assert cited('"""Holds (I3)."""\nx = "I4"  # I11, I12') == {"I3", "I11", "I12"}
    assert marked('@pytest.mark.invariant("I2")\ndef test_x(): ...') == {"I2"}


def test_every_file_is_looked_at() -> None:
    """The rules see the package that is imported."""
    assert len(SOURCES) > 30
    assert Path(pdrouter.__file__).parent == PACKAGE
