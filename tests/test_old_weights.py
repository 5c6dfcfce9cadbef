"""The collecting ("old") weights: when they are renewed, who samples with them, what is saved."""

import json

import pytest
import torch
import toy
from safetensors.torch import load_file
from test_exactness import contents, metrics

from flow_grpo import checkpoint, collecting, registry, seeds, session
from flow_grpo.algorithms.base import Rows, renewed_every
from flow_grpo.progress import progress_bar

LORA = pytest.mark.parametrize("use_lora", [True, False], ids=["lora", "full"])


def copies(tensors) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def equal(one, other) -> bool:
    return all(map(torch.equal, one, other))


def followed(folder, algorithm: str, num_epochs: int, **settings):
    """Return, before and after each epoch of a run, (updates, current weights, old weights)."""
    run = toy.build(toy.config(folder, algorithm, **settings))
    found = []
    for epoch in range(num_epochs + 1):
        state = copies(run.policy.parameters), copies(run.policy.old)
        found.append((run.state.update, *state))
        if epoch < num_epochs:
            toy.train_epoch(run)
    run.rewards.close()
    return found


@pytest.mark.parametrize("algorithm", ["dpo", "sft", "rwr"])
@pytest.mark.parametrize(
    ("freq", "renewed"),
    [  # two updates an epoch: 0-2, 2-4, 4-6, 6-8, 8-10
        (1, [True] * 5),
        (3, [False, True, True, False, True]),
        (4, [False, True, False, True, False]),
        (7, [False, False, False, True, False]),
        (100, [False] * 5),
        (0, [False] * 5),  # offline
    ],
)
def test_online_weights_are_renewed_when_a_multiple_of_the_frequency_is_passed(
    tmp_path, algorithm, freq, renewed
):
    found = followed(tmp_path, algorithm, 5, train__old_update_freq=freq)
    assert [updates for updates, *_ in found] == [0, 2, 4, 6, 8, 10]
    for (_, _, before), (_, current, after), is_renewed in zip(found, found[1:], renewed):
        assert equal(after, current if is_renewed else before)
        assert not equal(current, before)


def test_a_multiple_is_passed_once_however_many_updates_an_epoch_has():
    for freq in (1, 2, 3, 5):
        for size in (1, 2, 4, 7):
            ends = range(0, 50 * size, size)
            decays = [renewed_every(freq, end, end + size) for end in ends]
            passed = [any(u % freq == 0 for u in range(end + 1, end + size + 1)) for end in ends]
            assert decays == [0.0 if each else 1.0 for each in passed]


def test_nfts_weights_are_the_average_of_the_formula(tmp_path):
    found = followed(
        tmp_path, "nft", 4, train__nft_old_ramp=0.1, train__nft_old_decay=0.5,
        train__updates_per_epoch=2,
    )  # fmt: skip
    expected = found[0][2]
    assert equal(expected, found[0][1])
    for (updates, current, old), decay in zip(found[1:], (0.2, 0.4, 0.5, 0.5), strict=True):
        assert decay == min(0.1 * updates, 0.5)
        expected = [decay * e + (1 - decay) * c for e, c in zip(expected, current)]
        torch.testing.assert_close(old, expected)
        assert not equal(old, current)


def test_an_epoch_that_teaches_nothing_still_averages(tmp_path):
    run = toy.build(toy.config(tmp_path, "nft", train__nft_old_ramp=0.1))
    for _ in range(3):
        toy.train_epoch(run)
    nothing = Rows(torch.zeros(0, 1, dtype=torch.int64), {"sigma": torch.zeros(0)})
    run.algorithm.rows = lambda *_, **__: nothing
    before, current = copies(run.policy.old), copies(run.policy.parameters)
    toy.train_epoch(run)
    run.rewards.close()
    assert equal(run.policy.parameters, current)
    expected = [0.5 * o + 0.5 * c for o, c in zip(before, current)]
    torch.testing.assert_close(run.policy.old, expected)


@pytest.mark.parametrize("algorithm", registry.names(session.ALGORITHMS))
def test_each_epoch_is_sampled_with_the_weights_that_the_algorithm_names(tmp_path, algorithm):
    run = toy.build(toy.config(tmp_path, algorithm))
    seen = []
    velocity = run.model.velocity

    def watched(module, *arguments):
        seen.append(copies(run.policy.parameters))
        return velocity(module, *arguments)

    for epoch in range(2):
        toy.train_epoch(run)
        run.model.velocity = watched
        named = run.policy.old if run.algorithm.rollout_weights == "old" else run.policy.parameters
        expected, current = copies(named), copies(run.policy.parameters)
        seen.clear()
        bar = progress_bar(run.accelerator, "rollout", 1)
        collecting.collect(run, epoch, bar)
        run.model.velocity = velocity
        assert len(seen) == 6  # steps; all samples are one batch
        assert all(equal(each, expected) for each in seen)
        assert equal(run.policy.parameters, current)
    is_old = run.algorithm.rollout_weights == "old"
    assert is_old == (algorithm in ("dpo", "sft", "rwr", "nft"))
    assert is_old == (not equal(current, expected))
    assert (run.policy.old is None) == (not is_old)
    run.rewards.close()


@pytest.fixture
def moved_run(tiny_config, make_run):
    """Return a function that builds a run of the tiny SD3, moved away from its old weights."""

    def build(algorithm: str, use_lora: bool, **train):
        config = tiny_config.copy_and_resolve_references()
        config.algorithm, config.use_lora = algorithm, use_lora
        for name, value in train.items():
            config.train[name] = value
        run = make_run(config.lock())
        with torch.no_grad():
            for place, parameter in enumerate(run.policy.parameters):
                noise = seeds.normal(parameter.shape, 1, seeds.ADAPTER_INIT, member=place)
                parameter.add_(0.02 * noise)
        return run

    return build


@LORA
def test_old_velocities_leave_the_current_weights_untouched(moved_run, use_lora):
    policy = moved_run("nft", use_lora, kl_coef=0.1).policy
    before, old = copies(policy.parameters), copies(policy.old)
    x = seeds.normal((2, 4, 8, 8), 0, seeds.INITIAL_NOISE)
    sigma = torch.tensor([0.9, 0.3])
    cond = policy.model.encode(policy.module, ["a", "b"], size=(32, 32), negative="")
    current = policy.velocity(x, sigma, cond, 1.0)
    other = policy.velocity(x, sigma, cond, 1.0, weights="old")
    reference = policy.velocity(x, sigma, cond, 1.0, weights="reference")
    assert current.requires_grad
    assert not other.requires_grad
    assert not reference.requires_grad
    assert (other - current).abs().max() > 1e-3
    assert torch.equal(other, reference)  # so far the old weights are the first ones
    assert torch.equal(policy.velocity(x, sigma, cond, 1.0), current)
    assert equal(policy.parameters, before)
    assert equal(policy.old, old)
    assert all(p.requires_grad for p in policy.parameters)
    policy.velocity(x, sigma, cond, 1.0).sum().backward()  # asked for last, it has its graph
    assert all(p.grad is not None for p in policy.parameters)
    policy.renew_old(0.0)
    assert torch.equal(policy.velocity(x, sigma, cond, 1.0, weights="old"), current)
    policy.renew_old(1.0)
    assert equal(policy.old, before)


@LORA
@pytest.mark.parametrize(
    ("algorithm", "train"), [("dpo", {"dpo_beta": 5.0}), ("sft", {"kl_coef": 0.5})]
)
def test_the_gradient_is_that_of_the_current_weights_alone(moved_run, algorithm, train, use_lora):
    run = moved_run(algorithm, use_lora, **train)
    policy, old = run.policy, copies(run.policy.old)
    x_0 = seeds.normal((4, 4, 8, 8), 0, seeds.INITIAL_NOISE)
    noise = seeds.normal((2, 4, 8, 8), 0, seeds.FORWARD_NOISE)
    num = 4 if algorithm == "dpo" else 2  # two pairs, or two images
    batch = toy.row_batch(
        [1.0] * num, kept={"final": x_0[:num]}, noise=noise, weight=torch.ones(2),
        sigma=torch.tensor([0.7, 0.4]), cond=run.prompt_cache(["a", "b", "a", "b"][:num], "cpu"),
    )  # fmt: skip

    def loss() -> torch.Tensor:
        return run.algorithm.loss(policy, batch)[0]

    loss().backward()
    gradient = [p.grad.clone() for p in policy.parameters]
    assert equal(policy.old, old)
    # Central differences along the gradient. A float32 loss of order 10 is known to 1e-6.
    norm = torch.stack([g.square().sum() for g in gradient]).sum().sqrt().item()
    step, values = 1e-2, []
    with torch.no_grad():
        for move in (step, -2 * step):
            for parameter, g in zip(policy.parameters, gradient):
                parameter.add_(move * g / norm)
            values.append(loss().item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(norm, rel=0.02)


NFT = ["--config.algorithm=nft", "--config.train.nft_old_ramp=0.1", "--config.num_epochs=4",
       "--config.save_freq=2", "--config.eval_freq=2",
       "--config.num_checkpoint_limit=100"]  # fmt: skip
REWARD = "--config.reward_fn=odd_rewards:Contrast:1.0"


@LORA
def test_a_resumed_run_goes_on_with_its_old_weights(tiny_arguments, train, tmp_path, use_lora):
    call = [*tiny_arguments, REWARD, *NFT, f"--config.use_lora={use_lora}"]
    whole = train(*call, "--config.run_name=whole")
    assert whole.code == 0, whole.err
    part = [*call, "--config.run_name=part"]
    assert train(*part, "--config.num_epochs=2").code == 0
    outcome = train(*part)
    assert "epoch 2, update 4" in outcome.err
    one, other = (tmp_path / "runs" / name for name in ("part", "whole"))
    for name in ("checkpoint-2", "checkpoint-4"):
        state = one / "checkpoints" / name / checkpoint.STATE
        old, current = (load_file(state / f"{each}.safetensors") for each in ("old", "parameters"))
        assert old.keys() == current.keys()
        assert any(not torch.equal(old[key], current[key]) for key in old)
    found, wanted = contents(one), contents(other)
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []
    lines = [line for line in metrics(one) if "reward/total" in line]
    assert lines == [line for line in metrics(other) if "reward/total" in line]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3]


def test_a_checkpoint_without_the_old_weights_is_no_use_to_an_algorithm_that_has_them(
    tiny_arguments, train, tmp_path
):
    call = [*tiny_arguments, REWARD, "--config.num_epochs=1"]
    assert train(*call, "--config.run_name=grpo").code == 0
    folder = tmp_path / "runs" / "grpo" / "checkpoints" / "checkpoint-1"
    names = json.loads((folder / "manifest.json").read_text())["files"]
    assert "state/parameters.safetensors" in names
    assert "state/old.safetensors" not in names
    outcome = train(
        *call, "--config.algorithm=nft", f"--config.resume_from={folder}", "--config.run_name=nft"
    )
    assert "old.safetensors is missing" in outcome.error
