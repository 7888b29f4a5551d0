"""The guard beside a training that is recorded: findings are in the flight file."""

import argparse
from math import nan
from pathlib import Path

import pytest
import torch

from tests.training import Recording
from torchobs import catalog, guard


def test_violations_are_events_and_metrics(run: Recording) -> None:
    """Promise: what was refused can be seen outside."""
    with pytest.raises(guard.ContractError):
        guard.Contract("b 2", max=1.0).check(torch.tensor([[nan, 2.0]]), "batch")
    with pytest.raises(guard.NonFiniteOutputError):
        guard.sanitize_outputs(torch.tensor([nan]))
    guard.sanitize_outputs(torch.tensor([nan, 1.0]), "nan_to_num")
    run.whole_round()
    values = run.values()
    assert values["torchobs.guard.violations", "contract", "error", "finite"] == 1
    assert values["torchobs.guard.violations", "contract", "error", "max"] == 1
    assert values["torchobs.guard.sanitized", "numerics", "refuse", "error"] == 1
    assert values["torchobs.guard.sanitized", "numerics", "nan_to_num", "warning"] == 1
    (violation,) = run.frames("torchobs.guard.violation")
    about = violation["attrs"]
    assert (about["tensor"], about["category"], about["severity"]) == ("batch", "contract", "error")
    assert [frame["attrs"]["policy"] for frame in run.frames("torchobs.guard.outputs")] == ["refuse", "nan_to_num"]


def test_every_finding_has_a_category_and_a_severity(run: Recording, tmp_path: Path) -> None:
    """Promise: files, models, outputs, inference and resources are events and metrics too, each with how bad it is."""
    path = tmp_path / "whole.pt"
    torch.save(argparse.Namespace(), path)
    with pytest.raises(guard.UnsafeFileError):
        guard.load(path)
    with pytest.raises(guard.WrongFileError):
        guard.verify(path, sha256="0" * 64)
    guard.check_model({"w": torch.full((2,), nan)})
    guard.check_outputs(torch.zeros(4, 2), classes=1)
    guard.safe_inference(lambda x: x, torch.tensor([nan]))
    guard.resources(cpu=None, memory=0, disk=None, gpu_memory=None).check()
    run.whole_round()
    found = [event for event in vars(catalog).values() if isinstance(event, catalog.Event) and ".guard." in event.name]
    frames = [(event.name, frame["attrs"]) for event in found for frame in run.frames(event.name)]
    assert {(name, about["category"], about["severity"]) for name, about in frames} == {
        ("torchobs.guard.file", "file", "error"), ("torchobs.guard.model", "numerics", "warning"),
        ("torchobs.guard.outputs", "numerics", "warning"), ("torchobs.guard.outputs", "numerics", "error"),
        ("torchobs.guard.recovery", "numerics", "error"), ("torchobs.guard.resource", "resources", "warning"),
    }  # fmt: skip
    values = run.values()
    for by, category, severity in (
        ("load", "file", "error"),
        ("verify", "file", "error"),
        ("check_model", "numerics", "warning"),
    ):
        assert values["torchobs.guard.findings", by, category, severity] == 1
    assert values["torchobs.guard.exceeded", "resources", "memory", "warning"] == 1
    assert values["torchobs.guard.recoveries", "return", "numerics", "error"] == 1
