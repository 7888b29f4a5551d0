"""``torchobs doctor --system``: what a training computes with, as checks: torch, CUDA, driver, cuDNN, NCCL, CPU, packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchobs.cli.doctor_checks import OK, WARN, Check
from torchobs.config import settings
from torchobs.diagnosis import text_format

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
_JUDGED = re.compile(
    r"(torch|torchvision|torchaudio|torchao|triton|nvidia-.*|numpy|transformers|accelerate|lightning|torchmetrics)"
)
"""Distributions that a training stands on, by their normal names; all others are not ours to judge"""
_DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
"""Least driver by CUDA's major version: NVIDIA, CUDA Compatibility, table of minor version compatibility"""


def examine() -> Iterator[Check]:
    """Yield the checks; torch is imported, and nothing is computed on a GPU."""
    yield cpu()
    yield memory()
    yield from torch_build()
    yield from dependencies()


def cpu(cpuinfo: str | None = None) -> Check:
    """Name the processor, how many of it this process may have, and the instructions that matter to torch."""
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    names = re.findall(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = {flag for line in re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE) for flag in line.split()}
    found = [flag for flag in _CPU_FLAGS if flag in flags]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = text_format.clean(names[0]) if names else platform.machine()
    instructions = ", ".join(found) or "no vector instructions known here"
    return Check("cpu", OK, f"{name}, {text_format.plural(usable, 'processor')}; {instructions}")


def memory() -> Check:
    """Tell the memory of the machine and what is free of it."""
    import psutil

    now = psutil.virtual_memory()
    return Check("memory", OK, f"{text_format.size(now.total)}, {text_format.size(now.available)} of it available")


def torch_build() -> Iterator[Check]:
    """Yield what torch was built with, and whether driver and devices fit to it."""
    try:
        import torch
    except (ImportError, OSError) as problem:  # a missing shared library is either
        yield Check("torch build", WARN, f"cannot be imported: {text_format.clean(problem)}", "reinstall torch")
        return
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    yield Check("torch build", OK, f"{torch.__version__}, {threads}")
    if torch.version.hip:
        yield Check("rocm", OK, f"torch is built with ROCm {torch.version.hip}")
    elif torch.version.cuda is None:
        yield cuda_missing(devices=bool(list(Path("/dev").glob("nvidia[0-9]*"))))
    else:
        yield cuda(torch.version.cuda, _driver(), available=torch.cuda.is_available())
        if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            yield Check("cudnn", OK, str(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]
    if torch.distributed.is_available():
        backends = [
            name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(torch.distributed, f"is_{name}_available", bool)()
        ]
        nccl = f"; NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if "nccl" in backends else ""  # type: ignore[no-untyped-call]
        yield Check("distributed", OK, f"{', '.join(backends) or 'no backend'}{nccl}")
        bindings = torch._C._distributed_c10d  # noqa: SLF001  # there is no public name
        readable = any(hasattr(bindings, name) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
        yield flight_recorder(settings.environment(), readable=readable)


def flight_recorder(environ: Mapping[str, str], *, readable: bool) -> Check:
    """Judge whether torch records collectives, which names the rank of a hung run that did not come to one."""
    if not readable:
        return Check("flight recorder", OK, "this torch has none that can be read: hung ranks are told by phases and stacks")
    size = environ.get("TORCH_FR_BUFFER_SIZE") or environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    if size == "0":
        remedy = "TORCH_FR_BUFFER_SIZE=2000: then the rank that did not come to a collective is named"
        return Check("flight recorder", WARN, "torch records no collectives: TORCH_FR_BUFFER_SIZE is 0", remedy)
    if size:
        return Check("flight recorder", OK, f"torch records the last {text_format.clean(size)} collectives")
    return Check("flight recorder", OK, "torch's default: the last 2,000 collectives in torch 2.13, none in older versions")


def cuda_missing(*, devices: bool) -> Check:
    """Judge a torch that was built without CUDA."""
    text = "torch is built without CUDA"
    if devices:
        return Check("cuda", WARN, f"{text}, and there are NVIDIA devices", "install torch from its CUDA index (pytorch.org)")
    return Check("cuda", OK, f"{text}; there are no NVIDIA devices")


def cuda(version: str, driver: str | None, *, available: bool) -> Check:
    """Judge whether the driver is new enough for the CUDA that torch was built with."""
    text = f"torch is built with CUDA {version}, driver {driver or 'not found'}"
    least = _DRIVER_OF_CUDA.get(int(version.partition(".")[0]), 0)
    if driver is not None and int(driver.partition(".")[0]) < least:
        return Check("cuda", WARN, text, f"CUDA {version} needs driver {least} or newer, or a torch built with an older CUDA")
    if not available:
        return Check(
            "cuda", WARN, f"{text}; torch sees no device", "nvidia-smi, CUDA_VISIBLE_DEVICES; in a container --gpus all"
        )
    return Check("cuda", OK, text)


def _driver() -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def dependencies(found: dict[str, tuple[str, list[str]]] | None = None) -> Iterator[Check]:
    """Yield which requirements of the packages that a training stands on, and of torchobs, are not met.

    Args:
        found: name to version and requirements, as their metadata has them; by default those of this environment.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name
    except ModuleNotFoundError:
        yield Check("dependencies", WARN, "packaging is not installed: requirements were not compared", "pip install packaging")
        return
    if found is None:
        found = {each.name or "": (each.version, each.requires or []) for each in importlib.metadata.distributions()}
    versions = {canonicalize_name(name): version for name, (version, _) in found.items()}
    conflicts = 0
    for name, (_, requirements) in sorted(found.items()):
        if name != "torchobs" and not _JUDGED.fullmatch(canonicalize_name(name)):
            continue
        for line in requirements:
            try:
                wanted = Requirement(line)
            except InvalidRequirement:
                continue
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            version = versions.get(canonicalize_name(wanted.name))
            if version is None or not wanted.specifier.contains(version, prereleases=True):
                conflicts += 1
                has = f"has {version}" if version else "has none"
                text = f"{name} needs {wanted.name}{wanted.specifier}, and this environment {has}"
                yield Check("dependencies", WARN, text, f"pip install '{wanted.name}{wanted.specifier}'")
    if not conflicts:
        yield Check("dependencies", OK, "requirements of torch, of what stands on it, and of torchobs are met")
