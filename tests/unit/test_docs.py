"""The pages say what the catalog says, name commands, functions, rooms and layers that there are, and modules read in turn."""

from __future__ import annotations

import ast
import re
import shlex
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from typing import TYPE_CHECKING

import grimp
import pytest
import torch

from torchobs import debug, guard, tune
from torchobs.cli.__main__ import COMMANDS
from torchobs.config.options import BOOLEAN
from torchobs.config.settings import OPTIONS

if TYPE_CHECKING:
    from pathlib import Path


def test_the_pages_stay_short(checkout: Path) -> None:
    """As `wc -w` counts them: what is added takes the place of something, or moves to a page of its own."""
    words = {page.stem: len(page.read_text().split()) for page in (checkout / "docs").glob("*.md")}
    assert sum(words.values()) <= 35_000
    assert words["debug"] + words["tune"] + words["guard"] <= 6_000
    assert [name for name, count in words.items() if count > 2_500 and name != "metrics"] == []


def test_every_setting_has_its_row(checkout: Path) -> None:
    """With its variables, and what is allowed, in the words of the messages about wrong values."""
    page = (checkout / "docs" / "settings.md").read_text()
    for option in OPTIONS:
        allowed = "a switch" if option.kind is BOOLEAN else option.kind.allowed
        row = rf"^\| `{option.name}` \| `{'`, `'.join(option.variables)}`.* \| {re.escape(allowed)} \| "
        assert re.search(row, page, re.MULTILINE), option.name


WRITTEN = ("top", "inspect", "report", "compare", "runs", "stacks", "profile", "level", "doctor", "exporter")
STANDS_FOR = {"LEVEL": "advanced", "N": "3", "NUMBER": "3", "…": "x"}


def _commands(checkout: Path) -> list[tuple[str, str, str]]:
    """Page, command and arguments of each call of ours in a console block, or in the running text."""
    pages = [checkout / "README.md", *(checkout / "docs").rglob("*.md"), *(checkout / "deploy").rglob("*.md")]
    called = rf"torchobs ({'|'.join(WRITTEN)})\b"
    commands = []
    for page in pages:
        text = page.read_text()
        for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
            inner = re.sub(r"(.*)bash -c '(.*)'", r"\2", line)
            commands += [(page.name, *call) for call in re.findall(rf"{called}((?:'[^']*'|[^|#>])*)", inner)]
        commands += [(page.name, *call) for call in re.findall(rf"`{called}( [^`|#>]*)`", text)]
    return commands


def test_every_documented_command_is_taken(checkout: Path) -> None:
    """An option or an argument that there is not would be found by whoever was woken up."""
    commands = _commands(checkout)
    assert len({command for _, command, _ in commands}) == len(WRITTEN)
    for page, command, rest in commands:
        words = [STANDS_FOR.get(word, word) for word in shlex.split(rest)]
        file, function, _ = COMMANDS[command]
        parser = getattr(import_module(f"torchobs.cli.{file}"), "parser" if function == "main" else f"{function}_parser")
        try:
            (parser(lenient=True) if command == "exporter" else parser()).parse_args(words)
        except SystemExit as ended:
            if ended.code:
                pytest.fail(f"{page}: torchobs {command} {rest}")


def section(checkout: Path, heading: str) -> str:
    """The text below a heading of the README, up to the next one."""
    return (checkout / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]


def test_every_alert_is_in_the_table_of_the_rules_with_its_runbook(checkout: Path) -> None:
    """No alert is missing from it, none there is missing from the rules, and what the README picks is among them."""
    deployed = checkout / "deploy" / "prometheus"
    alerts = re.findall(r"^ *- alert: (\w+)$", (deployed / "rules" / "torchobs-alerts.yml").read_text(), re.MULTILINE)
    link = r"\[(\w+)\]\((?:\.\./\.\./)?docs/runbooks/(\w+)\.md\)"
    linked = re.findall(link, (deployed / "README.md").read_text())
    assert sorted(linked) == sorted((alert, alert) for alert in alerts)
    assert len(alerts) >= 12
    assert set(re.findall(link, section(checkout, "What it finds"))) <= set(linked)


def test_the_figures_of_overhead_are_those_that_were_measured(checkout: Path) -> None:
    """How much longer a step is said to be is what docs/overhead.md has of it, compiled and in Python."""
    measured = (checkout / "docs" / "overhead.md").read_text()
    rows = re.findall(r"^\| ([\d.]+ ms) \| (.+?) \| (.+?) \|$", section(checkout, "What it costs"), re.MULTILINE)
    assert len(rows) >= 3
    for step, *said in rows:
        for way, words in zip(("compiled", "in Python"), said, strict=True):
            ((longer, share),) = re.findall(r"([\d.]+ µs)(?:, ([\d.]+ %))?", words)  # of no difference, the interval's end
            row = rf"^\| {step} \| torchobs, {way} \|.*\b{re.escape(longer)} \|.*{re.escape(share)} \|$"
            assert re.search(row, measured, re.MULTILINE), (step, way)


BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WRONG = "images: finite: 1 NaN among 768 values, the first at [2, 1, 0, 3]; expected finite values"
PRINTED = {"debug": ["TensorStats"], "tune": ["Plan: mode amp"], "guard": [WRONG, "torch.serialization.add_safe_globals"]}


@pytest.mark.filterwarnings("ignore")  # of libraries that read model files
@pytest.mark.parametrize(("name", "least"), [("debug", 12), ("tune", 4), ("guard", 9)])
def test_the_examples_run(
    name: str, least: int, checkout: Path, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: every fenced Python block, in one namespace, with the page's line in a traceback; it prints what it says."""
    monkeypatch.setenv("TORCHOBS_DIR", str(flight_dir))
    monkeypatch.setenv("TORCHOBS_EXPORTER", "false")
    monkeypatch.chdir(flight_dir)
    page, names = (checkout / f"docs/{name}.md").read_text(), {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(page))
    assert len(blocks) >= least
    debug.clear()  # of what other tests have done
    with torch.random.fork_rng(devices=[]):
        for block in blocks:
            before = page[: block.start(1)].count("\n")
            exec(compile("\n" * before + block[1], f"docs/{name}.md", "exec"), names)  # noqa: S102  # it is what is tested
    printed = capsys.readouterr().out
    assert [text for text in PRINTED[name] if text not in printed] == []


def test_every_function_is_in_the_table_and_in_an_example(checkout: Path) -> None:
    """Promise: none is missing, and none there is not in the package; the README names such as there are."""
    for toolbox in (debug, tune, guard):
        short = toolbox.__name__.rpartition(".")[2]
        page = (checkout / f"docs/{short}.md").read_text()
        functions = {name for name in toolbox.__all__ if callable(getattr(toolbox, name)) and name.islower()}
        rows = "".join(line for line in page.splitlines() if line.startswith("| ["))
        called = set(re.findall(rf"\b{short}\.(\w+)", "".join(BLOCK.findall(page))))
        assert functions - (called & set(re.findall(r"[`@ ](\w+)[(`]", rows))) == set()
        assert called <= set(toolbox.__all__)
        shown = set(re.findall(rf"\b{short}\.(\w+)\(", section(checkout, "By hand")))
        assert shown
        assert shown <= set(dir(toolbox))


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
    named = [(match["name"], match["target"]) for match in NAMED.finditer(page.read_text())]
    assert len(named) > 30
    missing = [(name, target) for name, target in named if name not in defined((page.parent / target).resolve())]
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
