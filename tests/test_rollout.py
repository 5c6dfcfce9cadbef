import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flow_grpo.losses import (
    clipped_surrogate,
    dpo_loss,
    flow_matching_error,
    guard_log_ratio,
    nft_loss,
    velocity_kl,
)
from flow_grpo.rollout import sample_trajectory
from flow_grpo.sde import SDE, SDES, diffuse, flow_sde, kl, log_prob, ode, velocity_slope

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


def replayed_step(network, trajectory, k, sde):
    """Take a stored step again, as training does: the live network with gradients on."""
    i = trajectory.trained[k]
    x = trajectory.latents[:, k]
    sigma, sigma_next = (trajectory.sigmas[j].expand(len(x)) for j in (i, i + 1))
    return sde.step(
        x,
        network(x, sigma),
        sigma,
        sigma_next,
        noise_level=0.7,
        sigma_max=trajectory.sigmas[1],
    )


def replayed_log_prob(network, trajectory, k, sde):
    step = replayed_step(network, trajectory, k, sde)
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
        log_ratio = new - trajectory.log_probs[:, k]
        assert torch.equal(
            clipped_surrogate(log_ratio, advantage, clip_range=1e-4).ratio, torch.ones(3)
        )


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
    assert trajectory[1:6] == (None,) * 5
    assert not trajectory.final.requires_grad


def test_reference_velocity_is_kept_for_the_trained_steps():
    trajectory = roll_out(Network(), trained=(1, 3), reference_velocity=lambda x, sigma: 2 * x)
    assert torch.equal(trajectory.reference_velocity, 2 * trajectory.latents)
    assert roll_out(Network()).reference_velocity is None


@pytest.mark.parametrize("storage_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SDES)
def test_old_means_are_those_that_an_unchanged_policy_finds_again(name, storage_dtype):
    network = Network()
    settings = {"stochastic": (0, 1, 3), "trained": (0, 3), "storage_dtype": storage_dtype}
    trajectory = roll_out(network, name, keep_means=True, **settings)
    assert trajectory.old_means.shape == (3, 2, *LATENT)
    assert trajectory.old_means.dtype == torch.float32  # not rounded with the states
    for k in range(2):
        step = replayed_step(network, trajectory, k, SDES[name])
        assert torch.equal(step.mean, trajectory.old_means[:, k])
    # The noise of steps 0 and 3 leads from the mean to the stored state, before its rounding.
    std = [replayed_step(network, trajectory, k, SDES[name]).std for k in range(2)]
    x_next = trajectory.old_means + torch.stack(std, 1) * draw(3)[1][:, [0, 2]]
    assert torch.equal(x_next.to(storage_dtype), trajectory.next_latents)
    assert roll_out(network, name, **settings).old_means is None


@pytest.mark.parametrize("solver", ["euler", "dpm2m"])
@pytest.mark.parametrize("window", [(0, 1), (1, 2), (3, 4), (4, 5)])
def test_a_prefix_run_apart_changes_nothing(window, solver):
    # The break is at the window's start; storage in bfloat16 must not reach the prefix.
    network, start = Network(), window[0]
    x, noises = draw(2)
    settings = {"solver": solver, "storage_dtype": torch.bfloat16, "keep_means": True}
    whole = roll_out(network, "cps", window, window, **settings)
    whole_calls, network.calls = network.calls, []
    prefix = sample_trajectory(network, x, SIGMAS, solver=solver, last=start)
    assert prefix[1:6] == (None,) * 5
    assert prefix.final.dtype == torch.float32
    rest = sample_trajectory(
        network,
        prefix.final,
        SIGMAS,
        sde=SDES["cps"],
        noise_level=0.7,
        stochastic=window,
        trained=window,
        noises=noises,
        first=start,
        **settings,
    )
    for one, two in zip(whole, rest):
        assert one == two if isinstance(one, tuple) or one is None else torch.equal(one, two)
    assert len(network.calls) == len(whole_calls) == 6
    for (x_one, sigma_one, replay_one), (x_two, sigma_two, replay_two) in zip(
        whole_calls, network.calls
    ):
        assert torch.equal(x_one, x_two)
        assert torch.equal(sigma_one, sigma_two)
        assert replay_one == replay_two


def test_eulers_run_may_be_cut_anywhere_and_one_of_no_steps_returns_x():
    network = Network()
    x, _ = draw(0)
    whole = sample_trajectory(network, x, SIGMAS).final
    for cut in range(len(SIGMAS)):
        middle = sample_trajectory(network, x, SIGMAS, last=cut)
        assert torch.equal(middle.sigmas, SIGMAS)
        end = sample_trajectory(network, middle.final, SIGMAS, first=cut)
        assert torch.equal(end.final, whole)
    assert torch.equal(sample_trajectory(network, x, SIGMAS, last=0).final, x)


def test_a_shared_prefix_can_be_run_once_for_its_members():
    # Members that start from one noise are equal up to the window: the prefix of one, repeated.
    network = Network()
    x, noises = draw(2)
    shared = x[:1].expand(3, *LATENT)
    settings = {"sde": SDES["flow_sde"], "noise_level": 0.7, "solver": "dpm2m", "noises": noises}
    settings |= {"stochastic": (2, 3), "trained": (2, 3)}
    whole = sample_trajectory(network, shared, SIGMAS, **settings)
    prefix = sample_trajectory(network, x[:1], SIGMAS, solver="dpm2m", last=2).final
    branched = sample_trajectory(network, prefix.expand(3, *LATENT), SIGMAS, first=2, **settings)
    # A convolution of another batch size may round otherwise.
    torch.testing.assert_close(branched.final, whole.final, rtol=0, atol=1e-5)
    assert (branched.final[0] - branched.final[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first": 2}, r"stochastic steps \(1, 2, 3\) must be ascending indices in \[2, 6\)"),
        ({"last": 3}, r"stochastic steps \(1, 2, 3\) must be ascending indices in \[0, 3\)"),
        ({"first": 4, "last": 2}, r"steps \[4, 2\) are not a part of \[0, 6\).*\[2, 4\)$"),
        ({"last": 7}, r"steps \[0, 7\) are not a part of \[0, 6\).*\[0, 6\)$"),
        ({"first": -1}, r"steps \[-1, 6\) are not a part of \[0, 6\).*\[0, 6\)$"),
        ({"solver": "heun"}, r"solver \('heun'\) is unknown; allowed are euler, dpm2m$"),
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


def roll_out_fake(sde, name="flow_sde"):
    """Roll out and take the losses with tensors that have no values: reading one raises."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, noises = torch.randn(3, *LATENT), torch.randn(3, 2, *LATENT)
        trajectory = sample_trajectory(
            lambda x, sigma, *, replay: torch.tanh(x),
            x,
            torch.rand(7),
            sde=sde,
            noise_level=0.7,
            stochastic=(0, 3),
            trained=(0, 3),
            noises=noises,
            keep_means=True,
            solver="dpm2m",
        )
        sigma, sigma_next, advantage = torch.rand(3, 3)
        settings = {"noise_level": 0.7, "sigma_max": trajectory.sigmas[1]}
        step = sde.step(x, x, sigma, sigma_next, **settings)
        new = log_prob(step, x, normalised=sde.normalised)
        log_ratio = new - trajectory.log_probs[:, 0]
        log_ratio = log_ratio + guard_log_ratio(noises[:, 0], x, trajectory.old_means[:, 0])
        loss = clipped_surrogate(log_ratio, advantage, clip_range=1e-4).loss
        loss = loss / velocity_slope(name, sigma, sigma_next, noise_level=0.7)
        x = diffuse(x, noises[:, 0], sigma)
        error = flow_matching_error(x, x, x)
        pairs, _ = dpo_loss(error, error, error, error, beta=100.0)
        return loss + pairs + nft_loss(x, x, x, x, sigma, advantage, beta=1.0), (
            kl(step, x) + velocity_kl(x, x, std=step.std)
        )


@pytest.mark.parametrize("name", SDES)
def test_nothing_in_a_rollout_or_its_losses_waits_for_the_device(name):
    roll_out_fake(SDES[name], name)


def test_a_step_that_waits_for_the_device_is_noticed():
    def syncing(x, velocity, sigma, sigma_next, *, noise_level, sigma_max):
        sigma_max = sigma_max.item()
        return flow_sde(
            x, velocity, sigma, sigma_next, noise_level=noise_level, sigma_max=sigma_max
        )

    with pytest.raises(DataDependentOutputException):
        roll_out_fake(SDE(syncing, True))
