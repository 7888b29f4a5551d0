"""How much a rank says by default: what a Prometheus has to store of it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from tests import support
from tests.exporters import Service
from tests.fork_server import Python
from torchobs.exporter.config import ExporterConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prometheus_client.samples import Sample

LIMIT = 300
SMALL_LIMIT, OWN_LIMIT = 105, 60
"""The budgets: of a rank that uses everything, of one of a small DDP job on a CPU, and of the exporter itself. Hardware, of
which a machine may have any amount, is not in them (there is none where this test runs)."""

TRAINING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import torchobs

model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(40)])
bias = [p for name, p in model.named_parameters() if name.endswith("bias")]
weight = [p for name, p in model.named_parameters() if name.endswith("weight")]
optimizer = torch.optim.AdamW([{"params": weight}, {"params": bias, "weight_decay": 0.0}], lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
compiled = torch.compile(model, backend="eager")
for epoch in range(2):
    for (batch,) in DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=8, num_workers=2):
        with torch.autocast("cpu", torch.float16):
            loss = compiled(batch).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        torchobs.log(tokens=10, samples=8, accuracy=0.5)
    torch.save(model.state_dict(), "checkpoint.pt")
import time
time.sleep(2.5)  # the slow sensors are first asked after a second
print("trained", flush=True)
input()
"""


SMALL = """
import time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import torchobs

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), 8)
for epoch in range(4):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(parallel(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        time.sleep(0.1)  # the slow sensors are first asked after a second, and DDP's timings read at the backward after that
print("trained", flush=True)
input()
"""


def samples_of(
    script: str, flight_dir: Path, home: Path, is_complete: Callable[[Service], bool], **environ: str
) -> list[Sample]:
    """What the page has of a training that has ended but for its last line."""
    (home / "train.py").write_text(script)
    command = [sys.executable, "-m", "torchobs", "run", "--no-exporter", "--dir", str(flight_dir), "train.py"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        Python(command, cwd=home, env={**support.clean_environment(), **environ}, **pipes) as rank,
        Service(ExporterConfig(flight_dir=str(flight_dir))) as exporter,
    ):
        assert rank.stdout is not None
        assert rank.stdout.readline() == "trained\n"
        support.wait_until(lambda: is_complete(exporter))
        page = exporter.page()
        rank.communicate("\n", timeout=30)
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


def test_a_rank_of_a_small_job_has_few_series(flight_dir: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """What never happens in this run (a scaler, a compilation, a failing probe) takes no series; nor does the exporter many.

    Six are the states of the rank, all of which are there (a state set).
    """
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def is_complete(exporter: Service) -> bool:
        return exporter.value("torchobs_steps_total") == 32 and exporter.value("torchobs_ddp_time_seconds") is not None

    samples = samples_of(SMALL, flight_dir, tmp_path, is_complete, **job)
    of_the_rank = sorted(sample.name for sample in samples if "rank" in sample.labels)
    assert {"torchobs_loss", "torchobs_grad_norm", "torchobs_ddp_time_seconds"} <= {*of_the_rank}
    assert len(of_the_rank) <= SMALL_LIMIT, of_the_rank
    of_the_exporter = [sample.name for sample in samples if not sample.labels.get("run_id")]
    assert len(of_the_exporter) <= OWN_LIMIT, of_the_exporter


def test_a_rank_that_uses_everything_has_at_most_three_hundred_series(flight_dir: Path, tmp_path: Path) -> None:
    """Forty layers, two parameter groups, a scaler, a scheduler, workers, checkpoints and a compiled model."""
    samples = samples_of(TRAINING, flight_dir, tmp_path, lambda exporter: exporter.value("torchobs_steps_total") == 16)
    by_name = Counter(sample.name for sample in samples if "rank" in sample.labels)
    assert 90 < by_name.total() <= LIMIT, by_name.most_common(12)
