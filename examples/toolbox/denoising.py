"""The denoising steps of a diffusion pipeline: norm, drift and time of the latents after each."""

import torch

from torchobs import debug

torch.manual_seed(0)
unet = torch.nn.Conv2d(3, 3, 3, padding=1)  # a pipeline of diffusers takes callback_on_step_end=monitor instead
monitor = debug.diffusion_monitor()
latents = torch.randn(1, 3, 16, 16)
with torch.no_grad():
    for timestep in range(900, 0, -100):
        latents = latents - 0.1 * unet(latents)
        monitor.step(latents, timestep)
found = monitor.result()
print(found)
print("all is well" if found.ok else found.problems)
