"""The rules of the house that no other tool checks."""

import ast
import re
from collections.abc import Iterator
from importlib.metadata import metadata, version
from pathlib import Path

from packaging.requirements import Requirement

from torchobs import _version

PACKAGE = Path(_version.__file__).parent
METADATA = metadata("torchobs")
REQUIREMENTS = [Requirement(line) for line in METADATA.get_all("Requires-Dist") or ()]
WATCHERS = ("exporter", "cli")  # whatever else is in the package may run in a training process
SDK_ONLY = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the package by its path inside it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path


def imported(source: str) -> set[str]:
    """The absolute module names that `source` imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_a_plain_install_brings_three_packages_no_torch_and_the_version_in_the_source() -> None:
    """Without conflicts for a training image; torch is the user's own in every extra, too. `_version.py` has the version."""
    assert {r.name for r in REQUIREMENTS if r.marker is None} == {"nvidia-ml-py", "opentelemetry-api", "psutil"}
    assert "torch" not in {r.name for r in REQUIREMENTS}
    assert version("torchobs") == _version.__version__


def test_the_extra_all_holds_what_is_ours_to_choose() -> None:
    """`torchobs[all]` means all, but for tools of ours, and frameworks, which would bring a torch."""

    def brought_by(extra: str) -> set[str]:
        return {r.name for r in REQUIREMENTS if r.marker and r.marker.evaluate({"extra": extra})}

    left_out = {"all", "dev", "bench", "release", "lightning", "transformers", "accelerate"}
    extras = set(METADATA.get_all("Provides-Extra") or ()) - left_out
    assert brought_by("all") == set().union(*map(brought_by, extras))


def test_only_the_guard_catches_everything() -> None:
    """A blanket handler anywhere else would hide what the guard disables, counts and logs."""
    blanket = re.compile(r"except\s*:|(except\b|suppress\()[^:\n]*\b(Base)?Exception\b")
    reasons = {
        "cli/run.py": "it shows the script's own traceback, and raises again",
        "debug/operations.py": "the error's name becomes part of the result, and it is raised again",
        "debug/stopping.py": "the same",
        "debug/nan_origin.py": "a backward pass for the other ranks' sake raises what it likes; the origin is known by then",
        "exporter/otlp/push.py": "a request that raises is one refused request: the thread of its signal goes on",
        "guard/outputs.py": "the exception is returned to a caller who asked for that",
        "guard/model_files.py": "a damaged file raises anything in what reads it, which the verdict says",
        "injection/sitecustomize.py": "the guard is not to be imported: torchobs itself may be what does not fit",
        "probes/exits.py": "a class' own `__str__`, which the interpreter calls under a handler, too",
        "probes/hot_path.py": "the guard's own decision, inline: in every step its frame would cost more than what it guards",
        "probes/steps.py": "the same",
        "support/error_guard.py": "it is the guard",
    }
    assert sorted(name for name, path in sources() if blanket.search(path.read_text())) == sorted(reasons)


def test_only_the_settings_read_the_environment() -> None:
    """Every variable is documented, validated and named in one place; Python's own path is none of ours."""
    reading = re.compile(
        r"\bos\.(environb?|getenv)\b(?!(\.get\(|\.pop\(|\[)\"PYTHON(PATH|USERBASE)\")|from os import .*\b(environ|getenv)\b"
    )
    assert {name for name, path in sources() if reading.search(path.read_text())} == {"config/settings.py"}


def test_the_training_process_gets_no_sdk() -> None:
    """Nothing that a trainer may import names the SDK; import-linter knows `opentelemetry` only as one package."""
    trainer = {name: path.read_text() for name, path in sources() if not name.startswith(WATCHERS)}
    named = {name: imported(source) for name, source in trainer.items() if "opentelemetry" in source}  # to parse all takes long
    assert {name: modules for name, modules in named.items() if any(module.startswith(SDK_ONLY) for module in modules)} == {}


def test_the_readme_s_commands_exist(checkout: Path) -> None:
    """A newcomer types what the README and CONTRIBUTING say."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", (checkout / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        named = set(re.findall(r"(?:\$ |`)make ([a-z-]+)", (checkout / page).read_text()))
        assert named <= targets
    assert {"demo", "test"} <= targets


def test_links_between_pages_lead_somewhere(checkout: Path) -> None:
    """Every relative link in a page names a file that is there, and its heading; pages that files to deploy name are there."""
    folders = [checkout / name for name in ("docs", "deploy", "helm")]
    for page in [*checkout.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]:
        for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            if heading and linked.suffix == ".md":
                assert heading in anchors(linked), f"{page.name} links to {target}#{heading}"
    for file in (path for path in (checkout / "deploy").rglob("*") if path.is_file() and path.suffix != ".md"):
        for target in re.findall(r"(?<!/)\b(?:torchobs/blob/main/)?(docs/[a-z-]+\.md)", file.read_text()):
            assert (checkout / target).exists(), f"{file.name} names {target}"


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading)).strip().lower().replace(" ", "-") for heading in headings}
