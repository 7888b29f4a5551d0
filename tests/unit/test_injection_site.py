"""torchobs on a volume: what is copied, whom it fits, and what it does to the Python programs of a container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests import support
from tests.support import for_each
from torchobs._version import __version__
from torchobs.flight import reader
from torchobs.injection.copy_site import copy_site, fit_of, main
from torchobs.injection.sitecustomize import misfit

if TYPE_CHECKING:
    from collections.abc import Iterable

# Not the environment's: it has torchobs installed.
PYTHON = str(getattr(sys, "_base_executable", sys.executable))
HERE = sys.version_info[:2]
Ended = tuple[list[str], str, int]
"""Lines, standard error and status of a program"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume after the init container."""
    volume = tmp_path_factory.mktemp("site")
    copy_site(volume)
    return volume


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """What a training's image has on its path: a module of torch's name, for the import is the subject and not torch."""
    modules = tmp_path / "image"
    modules.mkdir()
    (modules / "torch.py").write_text("print('torch')\n")
    return modules


def run(path: Iterable[Path], *command: str, python: str = PYTHON, **environ: str) -> Ended:
    """Run Python in a container with this PYTHONPATH."""
    variables = {"PATH": os.environ["PATH"], **environ}
    if searched := os.pathsep.join(map(str, path)):
        variables["PYTHONPATH"] = searched
    done = subprocess.run([python, *command], env=variables, capture_output=True, text=True, check=False, timeout=120, cwd="/")
    return done.stdout.splitlines(), done.stderr, done.returncode


@for_each(
    {
        "psutil's": ("cp36-abi3-manylinux_2_12_x86_64 cp36-abi3-manylinux2010_x86_64", [3, 10], False, [2, 12], "x86_64"),
        "older name": ("cp36-abi3-manylinux2014_aarch64", [3, 10], False, [2, 17], "aarch64"),
        "compiled on the spot": ("cp313-cp313-linux_x86_64", [3, 13], True, [0, 0], "x86_64"),
        "pure Python": ("py3-none-any", [3, 10], False, None, None),
    }
)
def test_what_a_wheel_needs_is_read_from_its_tags(tags: str, *expected: object) -> None:
    """PEP 600's names of wheels."""
    wheel = "".join(f"Tag: {tag}\n" for tag in tags.split())
    assert fit_of([wheel, "Tag: py3-none-any\n"]) == dict(zip(("python", "exact", "glibc", "machine"), expected, strict=True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"python": [3, 99]}, f"this is Python {HERE[0]}.{HERE[1]}, and 3.99 or later is needed"),
        ({"python": [3, 9], "exact": True}, f"this is Python {HERE[0]}.{HERE[1]}, and 3.9 is needed"),
        ({"python": list(HERE), "exact": True}, None),
        ({"machine": "riscv64"}, f"this machine is {os.uname().machine}, and psutil is compiled for riscv64"),
        ({"glibc": [99, 1]}, "and 99.1 is needed"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], reason: str | None) -> None:
    """Python, machine and C library."""
    fit = {"python": [3, 10], "exact": False, "glibc": [2, 12], "machine": os.uname().machine}
    complaint = misfit(fit | change)
    assert complaint is None if reason is None else complaint is not None and complaint.endswith(reason)


def test_the_volume_has_torchobs_and_what_it_requires_and_hides_nothing(site: Path) -> None:
    """On PYTHONPATH stands one module; torch is the image's."""
    assert [path.name for path in (site / "start").glob("*.py")] == ["sitecustomize.py"]
    packages = site / "packages"
    assert all((packages / name).exists() for name in ("torchobs/api.py", "psutil", "pynvml.py", "opentelemetry/metrics"))
    assert not (packages / "torch").exists()
    program = "import psutil, pynvml, opentelemetry.metrics, torchobs; print(torchobs.__file__)"
    lines, errors, status = run([packages], "-c", program)
    assert (lines, errors, status) == ([str(packages / "torchobs" / "__init__.py")], "", 0)
    assert run([], str(site / "torchobs"), "--version")[0] == [f"torchobs {__version__}"]


def test_a_volume_that_cannot_be_written_does_not_stop_the_pod(capsys: pytest.CaptureFixture[str]) -> None:
    """An init container that fails would."""
    assert main(["/proc/nowhere"]) == 0
    assert main([]) == 0
    assert capsys.readouterr().err.count("the training runs unobserved") == 2


def test_a_program_without_torch_pays_nothing(site: Path, image: Path) -> None:
    """No module of ours but the one that waits."""
    program = "import json, sys; print([name for name in sys.modules if 'torchobs' in name or 'opentelemetry' in name])"
    assert run([site / "start", image], "-c", program) == (["[]"], "", 0)


@pytest.mark.parametrize(
    "look_first", ["", "import importlib.util; importlib.util.find_spec('torch');"], ids=["import", "looked for"]
)
def test_the_import_of_torch_begins_it(site: Path, image: Path, look_first: str) -> None:
    """Once torch is there; also if somebody has only looked for it before. Torch's spec and loader are as ever."""
    program = (
        f"{look_first or 'pass;'} import sys, torch;"
        " print('torchobs.runtime.session' in sys.modules, type(torch.__loader__).__name__)"
    )
    lines, _, status = run([site / "start", image], "-c", program, TORCHOBS_DIR=str(image))
    assert (lines, status) == (["torch", "True SourceFileLoader"], 0)


def test_a_variable_that_kubernetes_did_not_find_is_no_directory(site: Path, image: Path) -> None:
    """Where a ConfigMap might have set PYTHONPATH and did not, a reference is left over, for this process and its children."""
    program = "import os, sys; print([one for one in sys.path if '$' in one], os.environ['PYTHONPATH'])"
    path = [site / "start", image, Path("$(PYTHONPATH_OF_POD)")]
    assert run(path, "-c", program) == ([f"[] {site / 'start'}:{image}"], "", 0)


def test_a_launcher_is_left_alone(site: Path, image: Path) -> None:
    """Torchrun imports torch as well, and is no rank."""
    (image / "torchrun").write_text("import sys, torch; print('torchobs.runtime.session' in sys.modules)")
    assert run([site / "start", image], str(image / "torchrun")) == (["torch", "False"], "", 0)


def test_the_images_own_torchobs_is_kept(site: Path, image: Path) -> None:
    """Another version, begun by its own script."""
    (image / "torchobs.py").write_text("")
    lines, errors, _ = run([site / "start", image], "-c", "import torch, torchobs; print(torchobs.__file__)")
    assert (lines, errors) == (["torch", str(image / "torchobs.py")], "")


def test_the_images_own_sitecustomize_runs_too(site: Path, image: Path) -> None:
    """Under its own name, and its errors are shown as Python shows them."""
    (image / "sitecustomize.py").write_text("print('mine', __name__, __file__)")
    lines, errors, _ = run([site / "start", image], "-c", "import sitecustomize; print(sitecustomize.__file__)")
    customize = str(image / "sitecustomize.py")
    assert (lines, errors) == ([f"mine sitecustomize {customize}", customize], "")
    (image / "sitecustomize.py").write_text("1 / 0")
    lines, errors, status = run([site / "start", image], "-c", "import torch")
    assert (lines, status, "ZeroDivisionError" in errors) == (["torch"], 0, True)


@pytest.mark.parametrize("broken", ["fit", "fit.json", "packages"])
def test_a_refusal_is_one_line_and_the_training_goes_on(site: Path, image: Path, tmp_path: Path, broken: str) -> None:
    """An interpreter that does not fit, or half a volume, which is read-only; children and other ranks do not repeat it."""
    half = tmp_path / "half"
    (half / "start").mkdir(parents=True)
    (tmp_path / "flight").mkdir()
    (half / "start" / "sitecustomize.py").write_text((site / "start" / "sitecustomize.py").read_text())
    fit = json.loads((site / "fit.json").read_text()) | ({"python": [3, 99]} if broken == "fit" else {})
    if broken != "fit.json":
        (half / "fit.json").write_text(json.dumps(fit))
    program = "import torch, subprocess, sys; print(subprocess.call([sys.executable, '-c', 'import torch']))"
    lines, errors, status = run([half / "start", image], "-u", "-c", program)
    assert (lines, status) == (["torch", "torch", "0"], 0)
    assert errors.startswith("torchobs: off, the training runs unobserved: ")
    assert len(errors.splitlines()) == 1
    assert not (half / "reported").exists()
    assert [path.name.startswith(".") for path in (tmp_path / "flight").iterdir()] == [True]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with torch and a module of the user's, as `pip install --user` puts them there."""
    packages = tmp_path / "home" / ".local" / "lib" / f"python{HERE[0]}.{HERE[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "torch.py").write_text("print('torch')\n")
    (packages / "linked.pth").write_text(str(tmp_path / "linked"))
    (tmp_path / "linked").mkdir()
    return tmp_path / "home"


BEGUN = "import sys, torch; print('torchobs.runtime.session' in sys.modules)"


def by_user_base(site: Path, home: Path, *command: str, image: Iterable[Path] = (), python: str = PYTHON) -> Ended:
    """The same in a container with a path of the image's, where the policy sets one variable."""
    variables = {"HOME": str(home), "TORCHOBS_DIR": str(home), "PYTHONUSERBASE": str(site / "user")}
    return run(image, *command, python=python, **variables)


def test_an_image_keeps_its_own_path(site: Path, image: Path, tmp_path: Path) -> None:
    """No policy can see what an image sets as `PYTHONPATH`: replaced, its torch would not be found."""
    assert by_user_base(site, tmp_path, "-c", BEGUN, image=[image])[0] == ["torch", "True"]


def test_what_a_user_has_installed_stays_on_the_path(site: Path, home: Path, tmp_path: Path) -> None:
    """At the place where it was, with what its `.pth` files add; ours is not there, and Python says where the user's is."""
    plain = "import site, sys; print([path for path in sys.path if '-packages' in path or 'linked' in path], site.USER_SITE)"
    lines, errors, status = by_user_base(site, home, "-c", plain)
    assert (lines, errors, status) == (run([], "-c", plain, HOME=str(home))[0], "", 0)
    assert str(tmp_path / "linked") in lines[0]
    assert by_user_base(site, home, "-c", BEGUN)[0] == ["torch", "True"]


def test_pip_installs_where_it_always_did(site: Path, home: Path) -> None:
    """Ours is mounted read-only."""
    program = "import sysconfig; print(sysconfig.get_path('purelib', 'posix_user'))"
    (home / "pip3").write_text(program)
    lines, errors, _ = by_user_base(site, home, str(home / "pip3"))
    assert (lines[0].startswith(str(home / ".local")), errors) == (True, "")
    (home / "pipeline.py").write_text("import os; print(os.environ['PYTHONUSERBASE'])")
    assert by_user_base(site, home, str(home / "pipeline.py"))[0] == [str(site / "user")]


def test_a_virtual_environment_needs_the_annotation(site: Path, image: Path, tmp_path: Path) -> None:
    """It has no user's site-packages: it trains unobserved until its `PYTHONPATH` is said."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    shutil.copy(image / "torch.py", packages)
    assert by_user_base(site, tmp_path, "-c", BEGUN, python=python) == (["torch", "False"], "", 0)
    assert by_user_base(site, tmp_path, "-c", BEGUN, python=python, image=[site / "start"])[0] == ["torch", "True"]


def test_a_training_that_does_not_know_torchobs_is_recorded(site: Path, image: Path, flight_dir: Path) -> None:
    """Every step, from the first, with the settings of the environment; its output is what it is without."""
    (image / "torch.py").unlink()
    for path in Path(torch.__file__).parent.parent.iterdir():  # everything installed here but torchobs
        if "torchobs" not in path.name and path.suffix != ".pth":
            (image / path.name).symlink_to(path)
    script, environ = support.ROOT / "tests" / "scripts" / "plain_training.py", {"OMP_NUM_THREADS": "1"}
    lines, errors, _ = run([site / "start", image], str(script), "7", TORCHOBS_DIR=str(flight_dir), **environ)
    assert (lines, errors) == ([str(step) for step in range(1, 8)], "")
    (path,) = flight_dir.glob("*.flight")
    with closing(reader.open_path(str(path))) as file:
        values = {point.series.name: point.value for point in file.read(final=True).points}
    assert values["torchobs.steps"] == 7
