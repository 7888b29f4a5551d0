"""``debug.inspect_diffusion`` and ``diffusion_monitor`` on diffusers' real classes with tiny random configurations."""

# mypy: disable-error-code="no-untyped-call, attr-defined, operator"

from typing import Any

import diffusers
import pytest
import torch

from tests.debug.models import texts
from torchobs import debug


def ddpm() -> Any:
    """A pipeline without callbacks."""
    torch.manual_seed(1)
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=100))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latent() -> Any:
    """A latent diffusion pipeline with callbacks, without a text encoder."""
    torch.manual_seed(1)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=2,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=None, tokenizer=None, unet=unet,
        scheduler=diffusers.DDIMScheduler(num_train_timesteps=100, steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_components_of_a_pipeline() -> None:
    """Parameters are those that torch counts; absent components and the scheduler have none."""
    pipeline = latent()
    inspection = debug.inspect_diffusion(pipeline)
    counted = {name: sum(x.numel() for x in getattr(pipeline, name).parameters()) for name in ("unet", "vae")}
    rows = {row.name: row for row in inspection.components}
    assert {name: rows[name].parameters for name in counted} == counted
    assert inspection.total_parameters == sum(counted.values())
    assert inspection.size_bytes >= 4 * inspection.total_parameters
    assert (rows["text_encoder"].kind, rows["scheduler"].kind) == ("absent", "DDIMScheduler")
    assert (inspection.dtypes, inspection.devices, inspection.problems) == (("float32",), ("cpu",), ())
    assert "UNet2DConditionModel" in str(inspection)


def test_what_does_not_fit_together() -> None:
    """A component of another type, and a weight that is not finite."""
    pipeline = latent()
    pipeline.vae.to(torch.bfloat16)
    with torch.no_grad():
        pipeline.unet.conv_in.bias[0] = float("nan")
    said = texts(debug.inspect_diffusion(pipeline))
    assert any("bfloat16" in text for text in said)
    assert "unet.conv_in.bias: 1 NaN of 8 elements" in said


def test_steps_by_diffusers_callback() -> None:
    """Norms are those of the latents at each step; the image is what it is without the monitor."""
    pipeline, latents = latent(), []
    monitor = debug.diffusion_monitor()

    def both(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        latents.append(kwargs["latents"].clone())
        return monitor(pipe, step, timestep, kwargs)

    options = {"prompt_embeds": torch.zeros(1, 3, 16), "guidance_scale": 1.0, "num_inference_steps": 4, "output_type": "latent"}
    plain = pipeline(**options, generator=torch.Generator().manual_seed(2)).images
    watched = pipeline(**options, generator=torch.Generator().manual_seed(2), callback_on_step_end=both).images
    assert torch.equal(plain, watched)
    result = monitor.result()
    assert [row.step for row in result.rows] == [0, 1, 2, 3]
    assert [row.norm for row in result.rows] == pytest.approx([float(x.norm()) for x in latents], rel=1e-5)
    drift = float((latents[1] - latents[0]).norm() / latents[0].norm())
    assert result.rows[0].drift is None
    assert result.rows[1].drift == pytest.approx(drift, rel=1e-5)
    assert (result.first_nonfinite, result.problems) == (None, ())
    with pytest.raises(ValueError, match="callback_on_step_end_tensor_inputs"):
        monitor(pipeline, 0, 1, {})


def test_a_pipeline_without_callbacks_whose_latents_become_nan() -> None:
    """The first such step is named; the scheduler has its own step again."""
    pipeline = ddpm()
    monitor = debug.diffusion_monitor()
    with monitor.watch(pipeline):
        pipeline(num_inference_steps=3, output_type="np")
    assert "step" not in vars(pipeline.scheduler)
    assert (monitor.result().steps, monitor.result().problems) == (3, ())
    assert debug.summary().denoising == (monitor.result(),)
    with torch.no_grad():
        pipeline.unet.conv_out.bias[0] = float("nan")
    monitor.clear()
    with monitor.watch(pipeline):
        pipeline(num_inference_steps=3, output_type="np")
    result = monitor.result()
    assert result.first_nonfinite == 0
    assert result.problems[0].text.startswith("64 NaN")
