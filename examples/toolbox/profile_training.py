"""Where the time of a step goes: torch's table, a trace for Perfetto, memory and operations by module."""

import torch

from torchobs import debug

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
batches = [torch.randn(32, 64)] * 8

loop = debug.profile(batches, wait=1, warmup=1, active=4, batch_size=32, trace="step.json.gz")
for x in loop:
    with debug.context("forward and backward", samples=len(x)):
        model(x).sum().backward()
print(loop.result)  # the table; step.json.gz opens in https://ui.perfetto.dev
print(debug.memory_by_module(model, batches[0]))
print(debug.count_flops(model, batches[0]))
