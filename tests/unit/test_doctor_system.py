"""What `torchobs doctor --system` finds, and the remedy it names, on machines that are not this one."""

from __future__ import annotations

import pytest

from torchobs.cli import doctor_system
from torchobs.cli.doctor_checks import OK, WARN


def test_the_processor_is_named_with_the_instructions_that_matter() -> None:
    """Of x86 and of Arm; unknown ones are no error."""
    x86 = "processor : 0\nmodel name\t: Xeon 8480\nflags\t\t: fpu sse avx2 avx512f amx_bf16\n"
    assert doctor_system.cpu(x86).text.startswith("Xeon 8480, ")
    assert doctor_system.cpu(x86).text.endswith("; avx2, avx512f, amx_bf16")
    assert doctor_system.cpu("Features\t: fp asimd bf16 sve\n").text.endswith("; asimd, bf16, sve")
    assert doctor_system.cpu("").text.endswith("; no vector instructions known here")


@pytest.mark.parametrize(
    ("version", "driver", "available", "status", "words"),
    [
        ("12.6", "550.54.15", True, OK, ""),
        ("13.0", "550.54.15", True, WARN, "CUDA 13.0 needs driver 580 or newer"),
        ("12.6", "550.54.15", False, WARN, "CUDA_VISIBLE_DEVICES"),
        ("12.6", None, False, WARN, "nvidia-smi"),
        ("14.1", "700.1", True, OK, ""),
    ],
)
def test_the_driver_is_judged_by_torch_s_cuda(
    version: str,
    driver: str | None,
    available: bool,  # noqa: FBT001  # a column of the table
    status: str,
    words: str,
) -> None:
    """Too old a driver, and devices that torch does not see, have their remedy."""
    check = doctor_system.cuda(version, driver, available=available)
    assert check.status == status
    assert words in check.remedy


def test_a_torch_without_cuda_beside_a_gpu_is_a_warning() -> None:
    """Without one it is as it should be."""
    assert doctor_system.cuda_missing(devices=True).status == WARN
    assert doctor_system.cuda_missing(devices=False).status == OK


def test_packages_that_contradict_each_other_are_named() -> None:
    """Missing and too old ones of what a training stands on; extras, other systems and other packages are none."""
    found = {
        "torch": ("2.13.0+cu126", ["sympy>=1.13", "triton==3.5; sys_platform == 'nowhere'", "opt-einsum; extra == 'einsum'"]),
        "torchvision": ("0.20", ["torch==2.5.1", "numpy"]),
        "sympy": ("1.12", []),
        "flask": ("3", ["werkzeug"]),
        "lightning": ("2.6", ["this is no requirement"]),
    }
    checks = list(doctor_system.dependencies(found))
    assert [check.text for check in checks] == [
        "torch needs sympy>=1.13, and this environment has 1.12",
        "torchvision needs torch==2.5.1, and this environment has 2.13.0+cu126",
        "torchvision needs numpy, and this environment has none",
    ]
    assert checks[0].remedy == "pip install 'sympy>=1.13'"
    assert [check.status for check in doctor_system.dependencies({"torch": ("2.13.0", [])})] == [OK]


def test_this_machine() -> None:
    """Every check has a name and a text; torch is named with its build."""
    checks = {check.name: check for check in doctor_system.examine()}
    assert {"cpu", "memory", "torch build", "dependencies"} <= set(checks)
    assert all(check.text for check in checks.values())


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({}, OK, "2,000 collectives in torch 2.13"),
        ({"TORCH_FR_BUFFER_SIZE": "500"}, OK, "the last 500 collectives"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "500"}, OK, "the last 500 collectives"),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, WARN, "no collectives"),
    ],
)
def test_torch_s_flight_recorder_is_judged_by_its_variable(environ: dict[str, str], status: str, words: str) -> None:
    """Off, it has a remedy; a torch without one is no error."""
    check = doctor_system.flight_recorder(environ, readable=True)
    assert (check.status, words in check.text, bool(check.remedy)) == (status, True, status == WARN)
    assert doctor_system.flight_recorder(environ, readable=False).status == OK
