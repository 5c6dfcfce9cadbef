"""Every model family on a GPU: exact replay in its precisions, and the unpatched pipeline's result.

The last results are kept in `benchmarks/`.
"""

import os

import diffusers
import families
import pytest
import tiny_flux
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from families import FAMILIES

from flow_grpo import collecting, seeds, session, updating
from flow_grpo.progress import progress_bar
from flow_grpo.rollout import sample_trajectory
from flow_grpo.run_folder import RunFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1e-6  # of |ratio - 1|: in bf16 a velocity rounded otherwise would show at 1e-3
every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture
def fresh_accelerator(monkeypatch):
    """Let a test choose its precision: accelerate keeps the first one of a process."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@every_family
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_ratio_is_one_in_every_epochs_first_update(
    name, precision, checkpointing, tiny_dir, edit_set, tmp_path, fresh_accelerator
):
    config = families.settings(
        name, tiny_dir(name),
        **{
            "mixed_precision": precision, "logdir": str(tmp_path), "run_name": "run",
            "trackers": (), "train.gradient_checkpointing": checkpointing,
            "train.learning_rate": 3e-3, "sample.num_steps": 4, "sample.groups_per_epoch": 2,
            "sample.group_size": 4, "sample.batch_size": 4, "eval.num_prompts": 2,
        },
    )  # fmt: skip
    config.reward_fn = {"odd_rewards:Contrast": 1.0}
    if families.adapter(name).max_images:
        config.dataset, config.prompt_fn = str(edit_set), "geneval"
    accelerator = Accelerator(mixed_precision=precision)
    assert accelerator.device.type == "cuda"
    plan = session.check_config(config, 1)
    run = session.build(families.adapter(name), config, accelerator, plan, RunFolder(config))
    try:
        found = []
        for epoch in range(3):
            run.state.epoch = epoch
            collected = collecting.collect(run, epoch, progress_bar(accelerator, "", 1))
            scores, _ = collecting.score(run, collected)
            found.append(updating.update(run, collected, scores))
    finally:
        run.rewards.close()
        run.folder.close()
    worst = max(metrics["train/ratio_dev_first"] for metrics in found)
    with open(os.environ.get("GPU_RESULTS", os.devnull), "a") as file:
        file.write(f"ratio {name} {precision} checkpointing {checkpointing}: {worst:.3g}\n")
    assert worst <= TOLERANCE
    assert found[-1]["train/grad_norm"] > 0


@every_family
@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
def test_noise_0_is_the_unpatched_pipeline(name, guided, tiny_dir):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    adapter, device = families.adapter(name), torch.device("cuda")
    model = adapter.load(families.settings(name, tiny_dir(name)), device)
    pipeline = getattr(diffusers, adapter.pipeline_class).from_pretrained(tiny_dir(name))
    size, prompts = FAMILIES[name].sizes[0], ['"AB" on a red sign, painted', 'the word "CDE"']
    scale = FAMILIES[name].guidance_scale if guided else 1.0
    count, images = FAMILIES[name].references, None
    if count:
        images = [[tiny_flux.image(10 * s + i, *size[::-1]) for i in range(count)] for s in (0, 1)]
    x = seeds.normal((2, *model.latent_shape(size)), 0, seeds.INITIAL_NOISE).to(device)
    with torch.no_grad():
        negative = model.negative if guided else None
        cond = model.encode(model.transformer, prompts, images, size=size, negative=negative)
        final = sample_trajectory(
            lambda x, sigma, *, replay: model.velocity(model.transformer, x, sigma, cond, scale),
            x, model.sigmas(3, size).to(device),
        ).final  # fmt: skip
    stock = families.unpatched(
        name, pipeline.to(device), prompts, x, images,
        size=size, num_steps=3, guidance_scale=scale,
    )  # fmt: skip
    assert (final - stock).abs().max() < 1e-4
    assert (final - x).abs().max() > 0.1


def test_flux_learns_by_the_gradients_of_the_plain_attention():
    """cuDNN's backward is wrong where gradients of one shape have several layouts."""
    from diffusers import FluxTransformer2DModel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    pipeline = tiny_flux.flux()
    pipeline.transformer = FluxTransformer2DModel(
        num_layers=2, num_single_layers=2, num_attention_heads=4, attention_head_dim=128,
        joint_attention_dim=pipeline.text_encoder_2.config.d_model, pooled_projection_dim=16,
        in_channels=pipeline.transformer.config.in_channels, guidance_embeds=True,
    ).to(torch.bfloat16)  # fmt: skip
    torch.backends.cuda.enable_cudnn_sdp(True)
    model = families.adapter("flux")(pipeline, torch.device("cuda"), max_sequence_length=48)
    size = (32 * model.size_unit, 32 * model.size_unit)
    x = seeds.normal((3, *model.latent_shape(size)), 0, seeds.INITIAL_NOISE).cuda()
    with torch.no_grad():
        cond = model.encode(model.transformer, ["a", "b c", "d"], size=size, negative=None)
    trained = [p for n, p in model.transformer.named_parameters() if "attn.to_q.weight" in n]
    for parameter in trained:
        parameter.requires_grad_(True)

    def gradients():
        sigma = torch.full((3,), 0.5, device="cuda")
        velocity = model.velocity(model.transformer, x, sigma, cond, 3.5)
        return torch.autograd.grad((velocity - x).square().mean(), trained)

    found = gradients()
    with sdpa_kernel(SDPBackend.MATH):
        wanted = gradients()
    errors = [
        float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, wanted, strict=True)
    ]
    with open(os.environ.get("GPU_RESULTS", os.devnull), "a") as file:
        file.write(f"flux gradients, relative error: {max(errors):.3g}\n")
    assert len(errors) == 4
    assert max(errors) < 0.05  # bf16; a gradient of another layout is off by more than 1
