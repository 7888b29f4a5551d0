"""Make the root file system of the exporter's image: run by the Containerfile, with the Python of the base image.

What is taken from the base is Python, its standard library without what an exporter has no use for, the shared libraries that
these are linked with, certificates and the names of users; everything else (shell, package manager, and their
vulnerabilities) stays behind. The base may be for another machine than this one: nothing of it is run.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

HOME = Path("/opt/torchobs")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
GLIBC = range(5, 37)
"""Minor versions whose wheels (`manylinux_2_17`) run on the base's C library, 2.36 of Debian 12."""
UNUSED = shutil.ignore_patterns(
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "turtle.py"),
    *("ensurepip", "lib2to3", "pydoc_data", "config-*", "EXTERNALLY-MANAGED", "_tkinter.*", "_test*", "*.a"),
)
"""Of the standard library."""
SYSTEM = (
    *("etc/ssl/certs/ca-certificates.crt", "etc/ssl/openssl.cnf", "etc/passwd", "etc/group", "etc/nsswitch.conf"),
    *("etc/os-release", "etc/debian_version", "etc/ld.so.cache", "etc/ld.so.conf"),
)
"""Files that are taken where the base has them."""
FOLDERS = {"tmp": 0o1777, "run": 0o755, "var/run": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755}
"""What a container's runtime mounts, and where volumes are mounted, with their modes."""
LIBRARIES = ("usr/local/lib", "usr/lib/{}-linux-gnu", "lib/{}-linux-gnu", "usr/lib64", "lib64", "usr/lib", "lib")
_DYNAMIC, _LOAD, _INTERPRETER = 2, 1, 3
_NEEDED, _STRINGS, _RUNPATHS = 1, 5, (15, 29)


def linked(path: Path) -> tuple[list[str], list[str]]:
    """Return the libraries that a 64-bit little-endian ELF file asks for, its loader among them, and where it says they are.

    Other files ask for nothing. Format: https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return [], []
    (at,), (size, number) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    segments = [struct.unpack_from("<IIQQQQ", data, at + index * size) for index in range(number)]

    def offset(address: int) -> int:
        loaded = ((begin, start, length) for kind, _, begin, start, _, length in segments if kind == _LOAD)
        return next(begin + address - start for begin, start, length in loaded if start <= address < start + length)

    def text(begin: int) -> str:
        return data[begin : data.index(b"\0", begin)].decode()

    found = [text(begin) for kind, _, begin, *_ in segments if kind == _INTERPRETER]
    folders: list[str] = []
    for kind, _, begin, _, _, length in segments:
        if kind == _DYNAMIC:
            entries = list(struct.iter_unpack("<QQ", data[begin : begin + length - length % 16]))
            strings = next((offset(value) for tag, value in entries if tag == _STRINGS), 0)
            found += [text(strings + value) for tag, value in entries if tag == _NEEDED]
            folders += [place for tag, value in entries if tag in _RUNPATHS for place in text(strings + value).split(":")]
    return found, folders


class RootFs:
    """The new root file system, made of parts of the base."""

    def __init__(self, base: Path, root: Path, machine: str) -> None:
        """``machine``: as ``uname -m`` names it."""
        self._base, self._root = base, root
        self._folders = [folder.format(machine) for folder in LIBRARIES]
        self._taken: set[str] = set()
        for folder in ("bin", "lib", "lib64"):  # where /usr is merged, as in Debian, they stay the links that they are
            if (base / folder).is_symlink():
                (root / folder).symlink_to((base / folder).readlink())
                (root / (base / folder).readlink()).mkdir(parents=True, exist_ok=True)

    def take(self, path: str) -> None:
        """Copy a file, through every link on the way to it."""
        source = self._real(path)
        if source is None or path in self._taken:
            return
        self._taken.add(path)
        target = self._root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)

    def take_libraries(self) -> None:
        """Copy what the programs and modules that are there are linked with, and what that is linked with in turn."""
        waiting = [(path, f"/{path.relative_to(self._root)}") for path in self._root.rglob("*") if path.is_file()]
        while waiting:
            source, place = waiting.pop()
            names, folders = linked(source)
            for name in names:
                path = self._found(name, [folder.replace("$ORIGIN", str(Path(place).parent)) for folder in folders])
                if path and path not in self._taken and not (self._root / path).exists():
                    self.take(path)
                    waiting.append((self._root / path, f"/{path}"))
                elif not path:
                    print(f"{place} asks for {name}, which the base does not have", file=sys.stderr)  # noqa: T201  # to the log

    def take_packages(self) -> None:
        """Copy what dpkg knows of the packages that files were taken of, where scanners look for it in images without dpkg."""
        owners = {}
        for listed in (self._base / "var/lib/dpkg/info").glob("*.list"):
            package = listed.name.removesuffix(".list").partition(":")[0]
            owners.update(dict.fromkeys(listed.read_text().splitlines(), package))
        names = set()
        for path in (str(path.relative_to(self._root)) for path in self._root.rglob("*") if path.is_file()):
            source = self._real(path)
            inside = str(source.relative_to(self._base)) if source is not None else path
            # where /usr is merged, dpkg has a file by its old name or its new one
            names |= {f"/{name.removeprefix('usr/')}" for name in (path, inside)} | {f"/{path}", f"/{inside}"}
        wanted = {owners[name] for name in names if name in owners}
        status = self._base / "var/lib/dpkg/status"
        for paragraph in status.read_text().split("\n\n") if status.exists() and wanted else ():
            name = next((line[9:] for line in paragraph.splitlines() if line.startswith("Package: ")), "")
            if name in wanted:
                (self._root / "var/lib/dpkg/status.d").mkdir(parents=True, exist_ok=True)
                (self._root / "var/lib/dpkg/status.d" / name).write_text(paragraph + "\n")

    def _found(self, library: str, folders: list[str]) -> str:
        if "/" in library:
            return library.lstrip("/")
        places = (os.path.normpath(f"{folder}/{library}").lstrip("/") for folder in (*folders, *self._folders))
        return next((place for place in places if (self._root / place).exists() or self._real(place)), "")

    def _real(self, path: str) -> Path | None:
        """The file itself within the base: absolute links lead there and not to this machine."""
        parts, place = [part for part in path.split("/") if part], self._base
        while parts:
            place /= parts.pop(0)
            if place.is_symlink():
                target = place.readlink()
                parts = [*target.parts, *parts]
                place = self._base if target.is_absolute() else place.parent
                parts = [part for part in parts if part != "/"]
            place = Path(os.path.normpath(place))
        return place if place.is_file() else None


def main() -> None:
    """Make it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--arch", default="")
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("root", type=Path)
    given = parser.parse_args()
    machine, root, library = MACHINES.get(given.arch) or os.uname().machine, given.root, sysconfig.get_path("stdlib")
    root.mkdir(parents=True)
    made, program = RootFs(given.base, root, machine), Path(sys.executable).resolve()
    made.take(str(program).lstrip("/"))
    shutil.copytree(f"{given.base}{library}", f"{root}{library}", ignore=UNUSED)
    install(root, given.wheels, given.lock, machine)
    made.take_libraries()
    for path in SYSTEM:
        made.take(path)
    made.take_packages()
    for folder, mode in FOLDERS.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder).chmod(mode)
    compile_all(root, Path(library), HOME)


def install(root: Path, wheels: Path, lock: Path, machine: str) -> None:
    """Make the environment of torchobs: the locked wheels for the machine, whose hashes pip checks, and torchobs' own."""
    home, version = root / str(HOME).lstrip("/"), "python{}.{}".format(*sys.version_info)
    site, program = home / "lib" / version / "site-packages", Path(sys.executable).resolve()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-compile"]
    pip += ["--root-user-action=ignore", "--no-deps", "--only-binary=:all:", f"--target={site}", f"--find-links={wheels}"]
    pip += [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
    pip += [f"--platform={tag}_{machine}" for tag in ("manylinux1", "manylinux2010", "manylinux2014")]
    subprocess.run([*pip, "--require-hashes", "--requirement", str(lock)], check=True)
    (own,) = wheels.glob("torchobs-*.whl")
    shutil.rmtree(site / "bin")  # their shebang is this machine's
    subprocess.run([*pip, "--no-index", str(own)], check=True)
    shutil.rmtree(site / "bin")
    (home / "bin").mkdir()
    for name in ("python", "python3"):
        (home / "bin" / name).symlink_to(program)
    (home / "pyvenv.cfg").write_text(f"home = {program.parent}\ninclude-system-site-packages = false\n")
    script = home / "bin/torchobs"
    script.write_text(f"#!{HOME}/bin/python\nimport sys\nfrom torchobs.cli.__main__ import main\nsys.exit(main())\n")
    script.chmod(0o755)


def compile_all(root: Path, *folders: Path) -> None:
    """Compile everything, for nobody can write there later; by content and not by time, so that it is the same each time."""
    for folder in folders:
        done = compileall.compile_dir(
            f"{root}{folder}", stripdir=str(root), prependdir="/", quiet=2, force=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )  # fmt: skip
        if not done:
            sys.exit(f"{folder} cannot be compiled")


if __name__ == "__main__":
    main()
