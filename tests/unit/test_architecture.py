"""docs/architecture.md names rooms, layers, files and functions that there are; modules can be read one after the other."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

import grimp
import pytest

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "docs/architecture.md"
NAMED = re.compile(r"`(?P<name>[A-Za-z_][A-Za-z_.]*)`\s+in\s+\[[^\]]+\]\((?P<target>[^)]+\.py)\)")


def defined(path: Path) -> set[str]:
    """The names that a module defines at its top, those of its classes' methods (`Class.method`) and fields."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for part in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(node, ast.ClassDef) and isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(f"{node.name}.{part.name}")
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                names.add(part.target.id)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def test_every_name_beside_a_file_is_defined_in_it(checkout: Path) -> None:
    """Whoever follows a walk finds what it names: a class, a method, a function or a constant."""
    page = checkout / PAGE
    found = [(match["name"], match["target"]) for match in NAMED.finditer(page.read_text())]
    assert len(found) > 30
    missing = [(name, target) for name, target in found if name not in defined((page.parent / target).resolve())]
    assert missing == []


def test_every_room_stands_in_the_tree(checkout: Path) -> None:
    """Each folder of the package that holds modules is linked, and so is each module at its top but for the dunder ones."""
    package, text = checkout / "torchobs", (checkout / PAGE).read_text()
    folders = {path.parent for path in package.rglob("*.py")} - {package}
    rooms = {path for path in folders if any(module.name != "__init__.py" for module in path.glob("*.py"))}
    modules = {path for path in package.glob("*.py") if not path.name.startswith("_")}
    linked = {(checkout / "docs" / target).resolve() for target in re.findall(r"\]\((\.\./torchobs/[^)]+)\)", text)}
    assert rooms | modules <= linked


def test_the_layers_are_those_that_lint_holds(checkout: Path, pytestconfig: pytest.Config) -> None:
    """The drawing has the lines of import-linter's contract, in their order."""
    contract = (pytestconfig.rootpath / "pyproject.toml").read_text().split("layers = [")[1].split("]")[0]
    layers = [layer for layer in re.findall(r'"([^"]+)"', contract) if layer != "__main__"]
    drawn = (checkout / PAGE).read_text().split("## The direction of imports")[1].split("```text\n")[1].split("```")[0]
    assert drawn.splitlines() == [layer.removeprefix("_version | ") for layer in layers]


def test_no_module_imports_itself_by_a_detour() -> None:
    """Neither at run time, in a function or at its head, nor for the type checker."""
    graph = grimp.build_graph("torchobs", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as problem:
        pytest.fail(" -> ".join(problem.args[1]))
