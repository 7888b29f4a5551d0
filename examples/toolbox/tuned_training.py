"""Plan what is faster, measure it, and train with mixed precision, accumulated gradients and a schedule."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchobs import tune

tune.seed(0)
device = tune.device()
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1)).to(device)
x = torch.randn(512, 32)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True)
batch = (x[:32].to(device), x[:32].sum(1, keepdim=True).to(device))
print(tune.optimize(model, mode="amp", level="advanced", example=batch[0]))
print(tune.benchmark(model, batch, nn.functional.mse_loss, modes=("none", "amp"), rounds=6, amp="bf16"))
run = tune.pipeline(model, nn.functional.mse_loss, lr=1e-2, scheduler="cosine", warmup_steps=4, accumulate=2, amp="bf16")
result = run.fit(loader, epochs=5, checkpoint="tuned.pt")
print(result)
