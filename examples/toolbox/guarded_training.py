"""Train on data of which some is bad: batches are checked, a NaN is skipped, the weights and outputs looked at afterwards."""

import torch
from torch import nn

from torchobs import guard

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
batches = [(x, x.mean(1, keepdim=True)) for x in torch.randn(40, 8, 16)]
batches[7][0][3, 5] = float("nan")
contract = guard.Contract("batch 16", dtype="floating", max_norm=1e3)
print(*[f"batch {number}: {found}" for number, (x, _) in enumerate(batches) for found in contract.inspect(x, "x").problems])
recovery = guard.Recovery(model, torch.optim.AdamW(model.parameters(), lr=1e-2), guard.RecoveryPolicy(nonfinite=3))
with guard.resources(memory=95, on_exceed=lambda report: print(report.problems)):
    outcomes = [recovery.step(batch, nn.functional.mse_loss) for batch in recovery.batches(batches)]
print(f"{sum(outcome.stepped for outcome in outcomes)} steps, then {dict(recovery.counts)}: {recovery.evidence[0].reason}")
print(guard.check_model(model), guard.safe_inference(model, batches[0][0]), sep="\n")
