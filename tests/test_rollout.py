import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flow_grpo.losses import clipped_surrogate, velocity_kl
from flow_grpo.rollout import sample_trajectory
from flow_grpo.sde import SDE, SDES, flow_sde, kl, log_prob, ode

SIGMAS = torch.tensor([1.0, 0.96, 0.88, 0.75, 0.5, 0.2, 0.0])
LATENT = (2, 4, 4)


class Network(torch.nn.Module):
    """A small nonlinear velocity that records how it was called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(2, 2, 3, padding=1)
        self.calls = []

    def forward(self, x, sigma, *, replay=False):
        self.calls.append((x, sigma, replay))
        return torch.tanh(self.convolution(x.float())) * (1 + sigma.view(-1, 1, 1, 1))


def draw(num_noises, batch=3):
    source = torch.Generator().manual_seed(1)
    x = torch.randn(batch, *LATENT, generator=source)
    return x, torch.randn(batch, num_noises, *LATENT, generator=source)


def roll_out(network, name="flow_sde", stochastic=(1, 2, 3), trained=(1, 3), **settings):
    x, noises = draw(len(stochastic))
    return sample_trajectory(
        network,
        x,
        SIGMAS,
        sde=SDES[name],
        noise_level=0.7,
        stochastic=stochastic,
        trained=trained,
        noises=noises,
        **settings,
    )


def replayed_log_prob(network, trajectory, k, sde):
    """Score a stored step again, as training does: the live network with gradients on."""
    i = trajectory.trained[k]
    x = trajectory.latents[:, k]
    sigma, sigma_next = (trajectory.sigmas[j].expand(len(x)) for j in (i, i + 1))
    step = sde.step(
        x,
        network(x, sigma),
        sigma,
        sigma_next,
        noise_level=0.7,
        sigma_max=trajectory.sigmas[1],
    )
    return log_prob(step, trajectory.next_latents[:, k], normalised=sde.normalised)


@pytest.mark.parametrize("storage_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SDES)
def test_the_ratio_on_policy_is_exactly_1(name, storage_dtype):
    network = Network()
    trajectory = roll_out(network, name, (0, 1, 2, 4), (0, 2, 4), storage_dtype=storage_dtype)
    assert trajectory.log_probs.dtype == torch.float32
    for k in range(3):
        new = replayed_log_prob(network, trajectory, k, SDES[name])
        assert new.requires_grad
        advantage = torch.tensor([1.0, -1.0, 0.5])
        _, ratio = clipped_surrogate(new, trajectory.log_probs[:, k], advantage, clip_range=1e-4)
        assert torch.equal(ratio, torch.ones(3))


def test_the_ratio_off_policy_is_not_1():
    network = Network()
    trajectory = roll_out(network)
    with torch.no_grad():
        network.convolution.bias += 0.1
    new = replayed_log_prob(network, trajectory, 0, SDES["flow_sde"])
    assert ((new - trajectory.log_probs[:, 0]).abs() > 1e-5).all()


@pytest.mark.parametrize("storage_dtype", [torch.float32, torch.bfloat16])
def test_states_of_trained_steps_are_stored_before_and_after(storage_dtype):
    network = Network()
    trajectory = roll_out(network, trained=(1, 2), storage_dtype=storage_dtype)
    assert trajectory.latents.shape == trajectory.next_latents.shape == (3, 2, *LATENT)
    assert trajectory.latents.dtype == trajectory.next_latents.dtype == storage_dtype
    assert trajectory.log_probs.shape == (3, 2)
    assert trajectory.trained == (1, 2)
    assert torch.equal(trajectory.sigmas, SIGMAS)
    # The network saw the stored state itself, and the next step starts from the stored result.
    assert torch.equal(network.calls[1][0], trajectory.latents[:, 0])
    assert torch.equal(network.calls[2][0], trajectory.latents[:, 1])
    assert torch.equal(trajectory.next_latents[:, 0], trajectory.latents[:, 1])
    assert torch.equal(network.calls[3][0], trajectory.next_latents[:, 1])


def test_log_prob_is_of_the_rounded_state():
    # std is 0.02 at the last but one sigma: bfloat16 moves x_next by a good share of it.
    network = Network()
    trajectory = roll_out(network, trained=(3,), storage_dtype=torch.bfloat16)
    x, x_next = trajectory.latents[:, 0].float(), trajectory.next_latents[:, 0].double()
    sigma, sigma_next = SIGMAS[3].expand(3), SIGMAS[4].expand(3)
    v = network(x, sigma)
    step = flow_sde(x, v, sigma, sigma_next, noise_level=0.7, sigma_max=SIGMAS[1])
    expected = torch.distributions.Normal(step.mean.double(), step.std.double()).log_prob(x_next)
    torch.testing.assert_close(
        trajectory.log_probs[:, 0].double(), expected.mean((1, 2, 3)), rtol=0, atol=1e-6
    )
    noise = draw(3)[1][:, 2]
    unrounded = log_prob(step, step.mean + step.std * noise)
    assert (unrounded - trajectory.log_probs[:, 0]).abs().max() > 1e-5


def test_velocity_is_replayed_exactly_at_the_trained_steps_and_sees_each_sigma_once():
    network = Network()
    roll_out(network, trained=(1, 3))
    assert [replay for *_, replay in network.calls] == [False, True, False, True, False, False]
    assert torch.equal(torch.stack([sigma[0] for _, sigma, _ in network.calls]), SIGMAS[:-1])
    assert all(sigma.shape == (3,) for _, sigma, _ in network.calls)


def test_each_stochastic_step_takes_its_own_noise_and_the_others_none():
    network = Network()
    trajectory = roll_out(network, stochastic=(1, 3), trained=(3,))
    x, noises = draw(2)
    for i in range(len(SIGMAS) - 1):
        sigma, sigma_next = SIGMAS[i].expand(3), SIGMAS[i + 1].expand(3)
        v = network(x, sigma).detach()
        if i in (1, 3):
            step = flow_sde(x, v, sigma, sigma_next, noise_level=0.7, sigma_max=SIGMAS[1])
            x = step.mean + step.std * noises[:, (1, 3).index(i)]
        else:
            x = ode(x, v, sigma, sigma_next)
    torch.testing.assert_close(trajectory.final, x)


def test_without_stochastic_steps_it_is_the_ode_and_stores_nothing():
    network = Network()
    x, _ = draw(0)
    trajectory = sample_trajectory(network, x, SIGMAS)
    expected = x
    for i in range(len(SIGMAS) - 1):
        sigma, sigma_next = SIGMAS[i].expand(3), SIGMAS[i + 1].expand(3)
        expected = ode(expected, network(expected, sigma).detach(), sigma, sigma_next)
    assert torch.equal(trajectory.final, expected)
    assert trajectory[1:5] == (None, None, None, None)
    assert not trajectory.final.requires_grad


def test_reference_velocity_is_kept_for_the_trained_steps():
    trajectory = roll_out(Network(), trained=(1, 3), reference_velocity=lambda x, sigma: 2 * x)
    assert torch.equal(trajectory.reference_velocity, 2 * trajectory.latents)
    assert roll_out(Network()).reference_velocity is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trained": (1, 4)}, r"trained steps \(1, 4\) must be stochastic.*nearest valid .*\(1,\)"),
        ({"stochastic": (1, 1, 2)}, "ascending"),
        ({"stochastic": (1, 6), "trained": ()}, r"in \[0, 6\)"),
    ],
)
def test_impossible_steps_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        roll_out(Network(), **settings)


def test_training_without_noise_is_refused():
    x, noises = draw(1)
    settings = {"sde": SDES["cps"], "stochastic": (1,), "trained": (1,)}
    with pytest.raises(ValueError, match=r"noise_level \(0.0\) must be above 0"):
        sample_trajectory(Network(), x, SIGMAS, noises=noises, **settings)
    with pytest.raises(ValueError, match="noises hold 0 steps, but 1 are stochastic"):
        sample_trajectory(Network(), x, SIGMAS, noise_level=0.7, **settings)


def roll_out_fake(sde):
    """Roll out and take the losses with tensors that have no values: reading one raises."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, noises = torch.randn(3, *LATENT), torch.randn(3, 3, *LATENT)
        trajectory = sample_trajectory(
            lambda x, sigma, *, replay: torch.tanh(x),
            x,
            torch.rand(7),
            sde=sde,
            noise_level=0.7,
            stochastic=(0, 1, 2),
            trained=(0, 2),
            noises=noises,
        )
        sigma, sigma_next = torch.rand(2, 3)
        settings = {"noise_level": 0.7, "sigma_max": trajectory.sigmas[1]}
        step = sde.step(x, x, sigma, sigma_next, **settings)
        new = log_prob(step, x, normalised=sde.normalised)
        clipped_surrogate(new, trajectory.log_probs[:, 0], torch.randn(3), clip_range=1e-4)
        return kl(step, x) + velocity_kl(x, x)


@pytest.mark.parametrize("name", SDES)
def test_nothing_in_a_rollout_or_its_losses_waits_for_the_device(name):
    roll_out_fake(SDES[name])


def test_a_step_that_waits_for_the_device_is_noticed():
    def syncing(x, velocity, sigma, sigma_next, *, noise_level, sigma_max):
        sigma_max = sigma_max.item()
        return flow_sde(
            x, velocity, sigma, sigma_next, noise_level=noise_level, sigma_max=sigma_max
        )

    with pytest.raises(DataDependentOutputException):
        roll_out_fake(SDE(syncing, True))
