"""The arrows between the packages, and what no file may do: read from the source, not from a run.

    examples ─→ deepinfer ─→ deepinfer_protocol ←─ deepinfer_workers ─→ deepinfer_kernels ─→ torch

Also says, in fresh processes, what importing costs: no torch in the engine, and nothing of the process touched.
Knows nothing of what the packages do.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final, NamedTuple

import pytest

REPO: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("deepinfer", "protocol", "workers", "kernels", "examples", "benchmarks", "tests")


class Layer(NamedTuple):
    folder: str
    ours: frozenset[str]  # which of our packages it may import, itself apart
    others: frozenset[str]  # which third-party packages


# The table of arrows. A new third-party import is a decision: add it here in the commit that makes it.
LAYERS: Final = {
    "deepinfer": Layer(
        "deepinfer",
        frozenset({"deepinfer_protocol"}),
        frozenset(
            {
                "deepseek_recipe",
                "huggingface_hub",
                "jinja2",
                "llguidance",
                "h11",
                "msgspec",
                "opentelemetry",
                "prometheus_client",
                "rich",
                "starlette",
                "tokenizers",
                "trio",
                "typer",
                "uvicorn",
                "uvloop",
                "zmq",
            }
        ),
    ),
    "deepinfer_protocol": Layer("protocol/deepinfer_protocol", frozenset(), frozenset({"msgspec"})),
    "deepinfer_workers": Layer(
        "workers/deepinfer_workers",
        frozenset({"deepinfer_protocol", "deepinfer_kernels"}),
        frozenset({"gguf", "msgspec", "numpy", "tokenizers", "torch", "zmq"}),
    ),
    "deepinfer_kernels": Layer("kernels/deepinfer_kernels", frozenset(), frozenset({"numpy", "torch", "triton"})),
    "examples": Layer("examples", frozenset({"deepinfer"}), frozenset({"starlette", "uvicorn", "uvloop"})),
    # Training is beside the engine, and shares the formats of checkpoints with the workers.
    "examples.train_nano": Layer(
        "examples/train_nano",
        frozenset({"deepinfer", "deepinfer_kernels", "deepinfer_protocol", "deepinfer_workers", "examples"}),
        frozenset({"numpy", "tokenizers", "torch"}),
    ),
}

# They rebuild objects from bytes by running code, or are built on that.
PICKLING_MODULES: Final = frozenset({"pickle", "marshal", "shelve", "cloudpickle", "dill", "joblib", "multiprocessing"})
PICKLING_NAMES: Final = frozenset({"recv_pyobj", "send_pyobj", "ProcessPoolExecutor"})
PICKLING_CALLS: Final = frozenset({"torch.load", "torch.save"})

# They belong to the process, and the process to whoever embeds the engine; the command line owns its own.
PROCESS_NAMES: Final = frozenset({"add_signal_handler", "set_event_loop_policy"})
PROCESS_CALLS: Final = frozenset({"signal.signal", "logging.basicConfig"})

ENVIRONMENT_CALLS: Final = frozenset({f"os.{name}" for name in ("environ", "environb", "getenv", "getenvb", "putenv")})


class Use(NamedTuple):
    """An import or a dotted name in a file: `module` is set for imports only."""

    path: str  # from the root of the repository, with the line
    module: str
    name: str  # dotted; for `from a import b`, "a.b"


def uses_in(source: str, path: str) -> Iterator[Use]:
    for node in ast.walk(ast.parse(source, path)):
        at = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Use(at, alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            yield from (Use(at, module, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield Use(at, "", dotted(node))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@cache
def uses(folder: str) -> tuple[Use, ...]:
    files = sorted((REPO / folder).rglob("*.py"))
    return tuple(
        use for file in files for use in uses_in(file.read_text(encoding="utf-8"), file.relative_to(REPO).as_posix())
    )


def stray_imports(package: str, found: tuple[Use, ...]) -> list[Use]:
    layer = LAYERS[package]
    allowed = layer.ours | layer.others | {package} | sys.stdlib_module_names
    return [use for use in found if use.module and use.module.split(".")[0] not in allowed]


def pickling(found: tuple[Use, ...]) -> list[Use]:
    return [
        use
        for use in found
        if PICKLING_MODULES & set(use.module.split("."))
        or use.name in PICKLING_CALLS
        or use.name.rpartition(".")[2] in PICKLING_NAMES
    ]


def touching_process(found: tuple[Use, ...]) -> list[Use]:
    return [use for use in found if use.name in PROCESS_CALLS or use.name.rpartition(".")[2] in PROCESS_NAMES]


def reading_environment(found: tuple[Use, ...]) -> list[Use]:
    return [use for use in found if use.name in ENVIRONMENT_CALLS]


def outside(path: str, found: list[Use]) -> list[Use]:
    return [use for use in found if not use.path.startswith(f"{path}:")]


# The rules


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_what_its_row_of_the_table_allows(package: str) -> None:
    nested = tuple(f"{layer.folder}/" for name, layer in LAYERS.items() if name.startswith(f"{package}."))
    found = tuple(use for use in uses(LAYERS[package].folder) if not use.path.startswith(nested))
    assert stray_imports(package, found) == []


def test_the_arrows_form_no_circle() -> None:
    TopologicalSorter({package: layer.ours for package, layer in LAYERS.items()}).prepare()


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_pickles(folder: str) -> None:
    assert pickling(uses(folder)) == []


def test_the_engine_leaves_the_process_alone() -> None:
    touching = touching_process(uses("deepinfer"))
    assert [use for use in touching if not use.path.startswith("deepinfer/cli/")] == []


def test_the_engine_does_not_know_its_command_line() -> None:
    found = [use for use in uses("deepinfer") if use.module.startswith("deepinfer.cli")]
    homes = ("deepinfer/cli/", "deepinfer/__main__.py:")
    assert found and [use for use in found if not use.path.startswith(homes)] == []


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("prometheus_client", ("deepinfer/prometheus.py",)),
        ("huggingface_hub", ("deepinfer/hub.py",)),
        ("uvicorn", ("deepinfer/cli/http_server.py", "deepinfer/http/connection.py")),
        ("h11", ("deepinfer/http/connection.py",)),
    ],
)
def test_what_an_extra_brings_is_imported_where_it_is_used(package: str, homes: tuple[str, ...]) -> None:
    found = [use for use in uses("deepinfer") if use.module.split(".")[0] == package]
    for home in homes:
        assert len(outside(home, found)) < len(found)
        found = outside(home, found)
    assert found == []


def test_only_the_http_server_knows_http() -> None:
    """And nobody but the command that runs it knows the server: an engine needs neither."""
    found = [use for use in uses("deepinfer") if use.module.startswith(("starlette", "deepinfer.http"))]
    homes = ("deepinfer/http/", "deepinfer/cli/http_server.py:")
    assert found and [use for use in found if not use.path.startswith(homes)] == []


def test_the_engine_reads_the_environment_in_one_file() -> None:
    assert outside("deepinfer/env.py", reading_environment(uses("deepinfer"))) == []


@pytest.mark.parametrize("folder", ["protocol", "workers", "kernels"])
def test_a_home_of_a_package_is_no_package(folder: str) -> None:
    """With an `__init__.py`, `import kernels` in a checkout would find ours in place of somebody else's."""
    assert [path.name for path in (REPO / folder).glob("*.py")] == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("import pickle", pickling),
        ("from torch.multiprocessing import spawn", pickling),
        ("import torch\ndef f():\n    torch.load('x')", pickling),
        ("sock.recv_pyobj()", pickling),
        ("self.sock().send_pyobj(1)", pickling),
        ("from concurrent.futures import ProcessPoolExecutor", pickling),
        ("import signal\nsignal.signal(2, None)", touching_process),
        ("from signal import signal", touching_process),
        ("get_loop().add_signal_handler(2, f)", touching_process),
        ("import os\nos.environ['A']", reading_environment),
        ("from os import getenv", reading_environment),
    ],
)
def test_the_rules_see_what_they_forbid(source: str, rule: Callable[[tuple[Use, ...]], list[Use]]) -> None:
    assert rule(tuple(uses_in(source, "planted.py")))


def test_the_table_sees_a_stray_import() -> None:
    planted = tuple(uses_in("def f():\n    import torch.nn\n    from deepinfer_kernels import ops", "planted.py"))
    assert [use.name for use in stray_imports("deepinfer", planted)] == ["torch.nn", "deepinfer_kernels.ops"]


# What importing does, in fresh processes

IMPORT_ENGINE: Final = """
import asyncio, logging, signal, sys
handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
policy = asyncio.get_event_loop_policy()
root = (logging.root.level, list(logging.root.handlers), logging.root.disabled)
import deepinfer
assert deepinfer.__file__, "deepinfer has no __init__.py"
assert "torch" not in sys.modules, "torch was imported"
assert handlers == {number: signal.getsignal(number) for number in signal.valid_signals()}, "a signal handler was set"
assert asyncio.get_event_loop_policy() is policy, "the event loop policy was changed"
assert root == (logging.root.level, list(logging.root.handlers), logging.root.disabled), "the root logger was changed"
"""
IMPORT_WITHOUT_TORCH: Final = "import sys, {0}\nassert 'torch' not in sys.modules, 'torch was imported'"


def run_fresh(code: str) -> None:
    folders = [str(REPO / folder) for folder in (".", "protocol", "workers", "kernels")]
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_the_engine_loads_no_torch_and_touches_nothing() -> None:
    run_fresh(IMPORT_ENGINE)


@pytest.mark.parametrize("module", ["deepinfer_protocol", "deepinfer_workers.fake", "deepinfer_workers.__main__"])
def test_a_module_imports_without_torch(module: str) -> None:
    run_fresh(IMPORT_WITHOUT_TORCH.format(module))


def test_training_needs_nothing_of_the_engine() -> None:
    """It runs where little more than torch is installed."""
    others = "{'deepinfer', 'deepinfer_protocol', 'deepinfer_workers', 'msgspec', 'tokenizers', 'zmq'}"
    run_fresh(f"import sys, examples.train_nano.train\nassert not {others} & set(sys.modules)")


# Places of one machine

MACHINE_PATHS: Final = tuple("/".join(("", *parts, "")) for parts in (("work",), ("root",), ("tmp", "exp")))
TEXT_SUFFIXES: Final = frozenset({".py", ".md", ".toml", ".txt", ".sh", ".json", ".yml", ".yaml", ".cfg"})


def text_files() -> Iterator[Path]:
    for path in REPO.iterdir():  # .git is a file in a linked checkout, and names its place
        if path.is_file() and path.suffix in TEXT_SUFFIXES | {""} and path.name != ".git":
            yield path
    for folder in (*FOLDERS, "docs", ".ci"):
        for path in (REPO / folder).rglob("*"):
            is_text = path.suffix in TEXT_SUFFIXES or folder == ".ci"
            if is_text and path.is_file() and "node_modules" not in path.parts:
                yield path


def test_no_file_names_a_place_of_one_machine() -> None:
    named = {
        f"{path.relative_to(REPO)}: {place}"
        for path in text_files()
        for place in MACHINE_PATHS
        if place in path.read_text(encoding="utf-8", errors="replace")
    }
    assert named == set()
