"""The house rules that a program can check: layers, collectives, sizes, forbidden names.

Each checker takes a path and the source text, and returns complaints: "file:line: what; how to
mend". `test_the_house` runs them all over the tree; `test_a_planted_fault_is_found` shows each one
a fault.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("moejax", "pallas_kernels", "configs", "launch")
CODE = (*PACKAGES, "tests", "benchmarks")

# From left to right: a file imports its own layer or those to its left. `moejax` alone is its
# __init__.py.
LAYERS = (
    ("pallas_kernels",),
    ("moejax.core",),
    ("moejax.model",),
    ("moejax.parallel",),
    ("moejax.train", "moejax.data", "moejax.convert"),
    (
        *("moejax.config", "moejax.plan", "moejax.trained", "moejax.generate", "moejax.evaluate"),
        "moejax",
    ),
    ("configs",),
    ("launch",),
)
# These stand beside each other and do not know each other, but for the pairs (who, whom) below.
BESIDE = LAYERS[4]
BESIDE_MAY = {("moejax.train", "moejax.data"), ("moejax.train", "moejax.convert")}
KERNELS_MAY_IMPORT = {"jax", "numpy", "jaxtyping"}

WRAPPER = "moejax/core/collectives.py"
COLLECTIVES = {
    *("psum", "pmean", "pmax", "pmin", "psum_scatter", "unreduced_psum_scatter"),
    *(
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
        "all_to_all",
        "ragged_all_to_all",
    ),
    *("ppermute", "pshuffle", "pswapaxes", "pbroadcast", "psend", "precv", "pcast", "pvary"),
    *("axis_index", "axis_size"),
}

MAX_FILE, MAX_KERNEL_FILE, MAX_FUNCTION = 400, 600, 60
# "file" or "file::function" -> its lines. May only shrink: lower a number, drop a line as you mend.
SIZE_EXCEPTIONS: dict[str, int] = {}

TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".json", ".ipynb", ".cfg", ".sbatch"}
NOT_OURS = ("build", "dist", "runs", "__pycache__")
ELSEWHERE = re.compile(
    r"(?<![\w.~*)\]}-])/(?:work|tmp)\b"
    r"|pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|debian\.org|conda\.anaconda"
)


def layer_of(module: str) -> tuple[int, str] | None:
    """Returns (rank, layer) of a dotted name, or None if no layer claims it."""
    for rank, names in enumerate(LAYERS):
        for name in names:
            if module == name or (name != "moejax" and module.startswith(name + ".")):
                return rank, name
    return None


def imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute dotted name) of every imported module or member."""
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def check_layers(path: str, source: str) -> list[str]:
    """Each file imports its own layer or those to its left; kernels know jax and tensors alone."""
    if path.split("/")[0] not in PACKAGES:
        return []
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    here = layer_of(module)
    if here is None:
        return [f"{path}:1: {module} has no place among the layers; give it one in LAYERS"]
    found = []
    for line, name in imports(path, ast.parse(source)):
        top = name.split(".")[0]
        if top not in PACKAGES:
            if here[1] == "pallas_kernels" and not _kernels_may(path, top):
                found.append(
                    f"{path}:{line}: pallas_kernels imports {name}; pass it in, for it knows "
                    f"{', '.join(sorted(KERNELS_MAY_IMPORT))} and the standard library alone"
                )
            continue
        there = layer_of(name) or (len(LAYERS), name)
        beside = here[1] != there[1] and {here[1], there[1]} <= set(BESIDE)
        if there[0] > here[0] or (beside and (here[1], there[1]) not in BESIDE_MAY):
            found.append(
                f"{path}:{line}: {here[1]} imports {name}, not to its left; move the shared part "
                "left, or pass it in as an argument"
            )
    return found


def _kernels_may(path: str, top: str) -> bool:
    allowed = KERNELS_MAY_IMPORT | sys.stdlib_module_names
    return top in allowed or (path.endswith("/triton.py") and top in {"triton", "jax_triton"})


def dotted_names(tree: ast.Module) -> Iterator[tuple[ast.AST, int, str]]:
    """Yields (node, line, name) of each name or attribute, import aliases resolved."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            parts, inner = [], node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in aliases:
                yield node, node.lineno, ".".join([aliases[inner.id], *reversed(parts)])


def check_collectives(path: str, source: str) -> list[str]:
    """Only the wrapper calls collectives of jax.lax: `()` and one device need no special case."""
    if path == WRAPPER or path.split("/")[0] not in PACKAGES:
        return []
    # Inside a kernel the axes are those of its own grid.
    banned = COLLECTIVES - ({"axis_index"} if path.startswith("pallas_kernels/") else set())
    tree = ast.parse(source)
    named = [*imports(path, tree), *((line, name) for _, line, name in dotted_names(tree))]
    return sorted(
        {
            f"{path}:{line}: {name} is used outside {WRAPPER}; call the wrapper there"
            for line, name in named
            if name.startswith("jax.") and ".lax." in name and name.split(".")[-1] in banned
        }
    )


def check_sizes(path: str, source: str, exceptions: dict[str, int] = SIZE_EXCEPTIONS) -> list[str]:
    """Files have at most 400 lines (kernels 600), functions 60; exceptions only shrink."""
    limit = MAX_KERNEL_FILE if path.startswith("pallas_kernels/") else MAX_FILE
    sizes = [(path, 1, len(source.splitlines()), limit)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            sizes.append((f"{path}::{node.name}", node.lineno, lines, MAX_FUNCTION))
    found = []
    for key, line, lines, most in sizes:
        if lines > max(most, exceptions.get(key, 0)):
            found.append(f"{path}:{line}: {key} has {lines} lines, the limit is {most}; split it")
    for key, allowed in exceptions.items():
        if key.split("::")[0] == path:
            now = max((lines for name, _, lines, _ in sizes if name == key), default=0)
            most = MAX_FUNCTION if "::" in key else limit
            if now <= most:
                found.append(f"{path}:1: {key} needs no exception; drop it from SIZE_EXCEPTIONS")
            elif now < allowed:
                found.append(f"{path}:1: {key} has {now} lines; lower its SIZE_EXCEPTIONS")
    return found


def check_forbidden(path: str, source: str) -> list[str]:
    """A header, and no utils.py, **kwargs, silent ImportError, environment variable as a switch."""
    found, tree = [], ast.parse(source)
    if path.split("/")[-1] in {"utils.py", "util.py"}:
        found.append(f"{path}:1: a file of this name attracts anything; name it after its subject")
    if path.split("/")[0] in PACKAGES and not ast.get_docstring(tree):
        found.append(f"{path}:1: no docstring at the top; say in a few sentences what the file is")
    for node in ast.walk(tree):
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if function and node.args.kwarg and path.split("/")[0] != "tests":
            found.append(
                f"{path}:{node.lineno}: **{node.args.kwarg.arg} hides the arguments; name each one"
            )
        # A handler that ends in `raise` only says it better.
        silent = isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise)
        if silent and node.type is not None:
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            if caught & {"ImportError", "ModuleNotFoundError"}:
                found.append(
                    f"{path}:{node.lineno}: except {' or '.join(sorted(caught))} is silent; make "
                    "it a dependency or an extra, imported where a named choice asks for it"
                )
    return found + _environment_reads(path, tree)


def _environment_reads(path: str, tree: ast.Module) -> list[str]:
    """Reads of single variables; setting one, or handing all to a child process, is no switch."""
    if path.split("/")[0] not in {"moejax", "pallas_kernels"}:
        return []
    named = list(dotted_names(tree))
    lines = {
        line
        for _, line, n in named
        if re.fullmatch(r"os\.(getenv|environ\.(get|pop|items|keys))", n)
    }
    environ = {id(node) for node, _, name in named if name == "os.environ"}
    for node in ast.walk(tree):
        reads = (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and id(node.value) in environ
        )
        tests = isinstance(node, ast.Compare) and any(id(c) in environ for c in node.comparators)
        if isinstance(node, ast.Subscript | ast.Compare) and (reads or tests):
            lines.add(node.lineno)
    return [
        f"{path}:{line}: reads an environment variable; make it a config field or an argument"
        for line in sorted(lines)
    ]


def check_places(path: str, source: str) -> list[str]:
    """No file names a path of one machine, or the host of a package registry."""
    return [
        f"{path}:{number}: names {match.group()!r}; use a path relative to the repository, or "
        "tempfile, and package names without a host"
        for number, line in enumerate(source.splitlines(), 1)
        if (match := ELSEWHERE.search(line))
    ]


PYTHON_CHECKS = (check_layers, check_collectives, check_sizes, check_forbidden)


def files() -> list[Path]:
    """Every text file of the repository, in order."""
    found = [p for p in (ROOT / ".ci").iterdir() if p.is_file()]
    for path in ROOT.rglob("*"):
        folders = path.relative_to(ROOT).parts[:-1]
        ours = not any(
            f.startswith(".") or f in NOT_OURS or f.endswith(".egg-info") for f in folders
        )
        if (
            ours
            and path.is_file()
            and (path.suffix in TEXT or path.name in {"Makefile", ".gitignore"})
        ):
            found.append(path)
    return sorted(found)


def test_the_house():
    complaints = []
    for file in files():
        path, source = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        complaints += check_places(path, source)
        if file.suffix == ".py" and path.split("/")[0] in CODE:
            for check in PYTHON_CHECKS:
                complaints += check(path, source)
    gone = [key for key in SIZE_EXCEPTIONS if not (ROOT / key.split("::")[0]).is_file()]
    complaints += [
        f"tests/test_house.py:1: SIZE_EXCEPTIONS names {key}, which is gone" for key in gone
    ]
    assert not complaints, "\n" + "\n".join(complaints)


FAULTS = [
    (check_layers, "moejax/core/mesh.py", "from moejax.model import moe", 1),
    (check_layers, "moejax/core/mesh.py", "def f():\n    import moejax.config", 2),
    (check_layers, "moejax/core/mesh.py", "from moejax import train", 1),
    (check_layers, "moejax/core/mesh.py", "from ..model import moe", 1),
    (check_layers, "moejax/data/pack.py", "from moejax.train import loss", 1),
    (check_layers, "moejax/convert/hf.py", "from moejax.data import pack", 1),
    (check_layers, "moejax/config.py", "import configs.demo", 1),
    (check_layers, "configs/demo.py", "from launch import train", 1),
    (check_layers, "moejax/extra/new.py", "", 1),
    (check_layers, "pallas_kernels/pick.py", "import flax", 1),
    (check_layers, "pallas_kernels/pick.py", "import triton", 1),
    (check_layers, "pallas_kernels/pick.py", "import moejax.core", 1),
    (check_collectives, "moejax/model/moe.py", "import jax\njax.lax.psum(1, 'ep')", 2),
    (
        check_collectives,
        "moejax/model/moe.py",
        "from jax import lax\nlax.all_to_all(x, 'ep', 0, 0)",
        2,
    ),
    (
        check_collectives,
        "moejax/model/moe.py",
        "import jax.lax as l\nl.pcast(x, 'ep', to='varying')",
        2,
    ),
    (check_collectives, "moejax/train/step.py", "from jax.lax import ppermute as send", 1),
    (check_collectives, "moejax/model/moe.py", "import jax\nf = jax.lax.axis_index", 2),
    (check_collectives, "pallas_kernels/pick.py", "import jax\njax.lax.all_gather(x, 'a')", 2),
    (check_sizes, "moejax/core/mesh.py", "x = 1\n" * 401, 1),
    (check_sizes, "pallas_kernels/pick.py", "x = 1\n" * 601, 1),
    (check_sizes, "moejax/core/mesh.py", "\ndef f():\n" + "    x = 1\n" * 60, 2),
    (check_forbidden, "moejax/core/utils.py", "'''Header.'''", 1),
    (check_forbidden, "moejax/core/mesh.py", "x = 1", 1),
    (check_forbidden, "moejax/core/mesh.py", "'''H.'''\ndef f(*, a, **kwargs): ...", 2),
    (
        check_forbidden,
        "moejax/core/mesh.py",
        "'''H.'''\ntry:\n    import a\nexcept ImportError:\n    a = 0",
        4,
    ),
    (
        check_forbidden,
        "tests/test_a.py",
        "try:\n    import a\nexcept (OSError, ModuleNotFoundError):\n    a = 0",
        3,
    ),
    (check_forbidden, "moejax/core/mesh.py", "'''H.'''\nimport os\nx = os.environ['A']", 3),
    (
        check_forbidden,
        "moejax/core/mesh.py",
        "'''H.'''\nfrom os import environ\nx = environ.get('A')",
        3,
    ),
    (check_forbidden, "pallas_kernels/pick.py", "'''H.'''\nimport os\nx = os.getenv('A')", 3),
    (check_forbidden, "pallas_kernels/pick.py", "'''H.'''\nimport os\nx = 'A' in os.environ", 3),
    (check_places, "README.md", "run it\nin " + "/" + "tmp/demo", 2),
    (check_places, "configs/demo.py", "x = '" + "/" + "work/data'", 1),
    (check_places, "constraints.txt", "https://pypi" + ".org/simple", 1),
]


@pytest.mark.parametrize(("check", "path", "source", "line"), FAULTS)
def test_a_planted_fault_is_found(check, path, source, line):
    complaints = check(path, source)
    assert len(complaints) == 1
    assert complaints[0].startswith(f"{path}:{line}: ") and "; " in complaints[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "moejax/train/loop.py",
            "'''H.'''\nfrom moejax.data import loader\nfrom moejax.core import mesh",
        ),
        (
            "moejax/plan/cost.py",
            "'''H.'''\nfrom moejax.config import Config\nimport moejax.train.loss",
        ),
        (
            "launch/train.py",
            "'''H.'''\nimport os\nfrom configs import demo\nx = os.environ['RANK']",
        ),
        (
            "pallas_kernels/a/triton.py",
            "'''H.'''\nimport jax_triton\nimport functools\nimport numpy",
        ),
        ("pallas_kernels/a/hopper.py", "'''H.'''\nimport jax\ni = jax.lax.axis_index('row')"),
        (WRAPPER, "'''H.'''\nimport jax\njax.lax.psum(1, 'a')"),
        (
            "moejax/model/moe.py",
            "'''H.'''\nfrom moejax.core import collectives\ncollectives.psum(1, ())",
        ),
        (
            "moejax/plan/compile.py",
            "'''H.'''\nimport os\ne = {**os.environ}\nos.environ['A'] = '1'",
        ),
        ("moejax/core/mesh.py", "'''H.'''\ndef f(*args): return g(**dict(args))"),
        ("moejax/core/mesh.py", "'''home/work/x, and/tmp, https://jax.dev/tmp'''"),
    ],
)
def test_honest_code_passes(path, source):
    complaints = [c for check in (*PYTHON_CHECKS, check_places) for c in check(path, source)]
    assert not complaints


def test_size_exceptions_only_shrink():
    path, long = "moejax/core/mesh.py", "def f():\n" + "    x = 1\n" * 69
    assert check_sizes(path, long, {f"{path}::f": 70}) == []
    assert "has 70 lines, the limit" in check_sizes(path, long, {f"{path}::f": 69})[0]
    assert "lower its" in check_sizes(path, long, {f"{path}::f": 80})[0]
    assert "needs no exception" in check_sizes(path, "def f(): ...", {f"{path}::f": 70})[0]
    assert "needs no exception" in check_sizes(path, "x = 1", {path: 500})[0]
