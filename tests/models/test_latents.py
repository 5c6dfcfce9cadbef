"""What several adapters share: tokens of latents, autoencoders' scales, copies of sigmas."""

import math
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flow_grpo.models import autoencoders
from flow_grpo.models.schedulers import scheduler_sigmas
from flow_grpo.models.tokens import pack, unpack


def test_a_token_is_a_square_of_latents_channel_by_channel():
    latents = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    grid = pack(latents)
    assert grid.shape == (2, 2, 3, 12)
    square = latents[1, :, 2:4, 4:6]  # of row 1, column 2
    assert torch.equal(grid[1, 1, 2], square.flatten())
    assert torch.equal(unpack(grid), latents)


class _Autoencoder(torch.nn.Module):
    """Halve the pixels' values; undo it."""

    def __init__(self, **config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.dtype, self.config = torch.float32, SimpleNamespace(**config)

    def encode(self, pixels):
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: pixels / 2))

    def decode(self, latents, return_dict):
        return (latents * 2,)


def test_one_scale_and_shift_for_all_channels():
    vae, images = _Autoencoder(shift_factor=0.25, scaling_factor=4.0), torch.rand(2, 3, 4, 4)
    x = autoencoders.encode_shifted(vae, images)
    torch.testing.assert_close(x, ((2 * images - 1) / 2 - 0.25) * 4)
    torch.testing.assert_close(autoencoders.decode_shifted(vae, x), images)
    far = autoencoders.decode_shifted(vae, 100 * torch.ones(1, 3, 2, 2))
    assert torch.equal(far, torch.ones(1, 3, 2, 2))


def test_a_mean_and_deviation_a_channel():
    mean, std = [0.5, 0.0, -1.0], [2.0, 1.0, 0.5]
    vae, clips = _Autoencoder(latents_mean=mean, latents_std=std), torch.rand(2, 5, 3, 4, 4)
    with torch.no_grad():
        x = autoencoders.encode_standardised(vae, clips)
        back = autoencoders.decode_standardised(vae, x)
    assert x.shape == (2, 3, 5, 4, 4)
    for channel in range(3):
        wanted = ((2 * clips[:, :, channel] - 1) / 2 - mean[channel]) / std[channel]
        torch.testing.assert_close(x[:, channel], wanted)
    torch.testing.assert_close(back, clips)


LINEAR = torch.linspace(1, 1 / 4, 4)


@pytest.mark.parametrize("mu", [None, 0.3])
def test_the_shift_of_a_dynamic_schedule_is_the_schedulers_or_the_pipelines_own(mu):
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    # A line from 0.5 at 256 tokens to 1.15 at 4096.
    shift = math.exp(0.5 + 0.65 * (1024 - 256) / (4096 - 256) if mu is None else mu)
    sigmas = scheduler_sigmas(scheduler, 4, linear=True, num_tokens=1024, mu=mu)
    torch.testing.assert_close(sigmas[:-1], shift / (shift + 1 / LINEAR - 1))
    assert sigmas[-1] == 0


def test_sigmas_that_the_scheduler_makes_are_another_schedule():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(7)
    given = scheduler_sigmas(scheduler, 4, linear=True)
    torch.testing.assert_close(given[:-1], 3 * LINEAR / (1 + 2 * LINEAR))
    own = scheduler_sigmas(scheduler, 4, linear=False)
    assert own[3] < 0.01 < 0.4 < given[3]
    assert len(scheduler.timesteps) == 7
