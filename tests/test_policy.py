"""The policy trains what it says, restores what it swaps, and replays what training runs."""

import math

import pytest
import torch
from accelerate import Accelerator

from flow_grpo import sde, seeds
from flow_grpo.models.sd3 import SD3
from flow_grpo.policy import Policy
from flow_grpo.rollout import sample_trajectory

SIZE = (32, 32)
PROMPTS = ['"AB" on a red sign', 'the word "CDE"']


@pytest.fixture
def build(tiny_config):
    """Return a function that builds the policy of the tiny configuration, with changes to it."""

    def policy(**train) -> Policy:
        config = tiny_config.copy_and_resolve_references().unlock()
        config.use_lora = train.pop("use_lora", True)
        for name, value in train.items():
            config.train[name] = value
        model = SD3.load(config, torch.device("cpu"))
        return Policy(model, config, Accelerator(cpu=True))

    return policy


def _move(policy: Policy, scale: float = 0.05) -> None:
    """Put random values into every trained tensor: B too, which starts at 0."""
    with torch.no_grad():
        for place, parameter in enumerate(policy.parameters):
            noise = seeds.normal(parameter.shape, 1, seeds.ADAPTER_INIT, member=place)
            parameter.add_(scale * noise)


def _inputs(policy: Policy, num: int = 2):
    x = seeds.normal((num, 4, 8, 8), 0, seeds.INITIAL_NOISE)
    prompts = (PROMPTS * num)[:num]
    cond = policy.model.encode(policy.module, prompts, size=SIZE, negative="")
    return x, torch.linspace(0.9, 0.3, num), cond


def _loss(policy: Policy, rows=slice(None), num: int = 4) -> torch.Tensor:
    """Return a sum over rows that depends on every one of them."""
    x, sigma, cond = _inputs(policy, num)
    module, model = policy.module, policy.model
    return model.velocity(module, x[rows], sigma[rows], cond.index(rows), 1.0).square().sum()


def _gradients(policy: Policy) -> list[torch.Tensor]:
    return [p.grad.clone() for p in policy.parameters]


def test_only_the_adapter_is_trained_in_float32(build):
    policy = build()
    assert policy.names
    assert all(".lora_A." in name or ".lora_B." in name for name in policy.names)
    assert {p.dtype for p in policy.parameters} == {torch.float32}
    trained = {name for name, p in policy.model.transformer.named_parameters() if p.requires_grad}
    assert trained == set(policy.names)
    for part in (policy.model.pipeline.vae, policy.model.pipeline.text_encoder):
        assert not any(p.requires_grad for p in part.parameters())


def test_the_adapter_reaches_every_target_of_every_block(build):
    policy = build()
    # two blocks of eight projections; the last block has no attn.to_add_out
    modules = {name.partition(".lora_")[0] for name in policy.names}
    assert len(modules) == 2 * len(policy.model.lora_targets) - 1
    for target in policy.model.lora_targets:
        assert any(module.endswith(f".{target}") for module in modules)


def test_the_adapter_starts_as_the_base_model_and_from_the_seed(build):
    first, second = build(), build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters))
    by_name = dict(zip(first.names, first.parameters))
    assert all(not p.any() for name, p in by_name.items() if "lora_B" in name)
    assert all(p.any() for name, p in by_name.items() if "lora_A" in name)


def test_building_a_policy_leaves_the_global_randomness_alone(build):
    torch.manual_seed(7)
    wanted = torch.rand(1)
    torch.manual_seed(7)
    build()
    assert torch.equal(torch.rand(1), wanted)


def test_the_reference_is_the_base_model_to_the_bit(build, tiny_config):
    policy = build()
    base = SD3.load(tiny_config, torch.device("cpu"))
    x, sigma, cond = _inputs(policy)
    _move(policy)
    with torch.no_grad():
        for scale in (1.0, 4.5):
            wanted = base.velocity(base.transformer, x, sigma, cond, scale)
            reference = policy.velocity(x, sigma, cond, scale, weights="reference")
            assert torch.equal(reference, wanted)
            current = policy.velocity(x, sigma, cond, scale)
            assert (current - wanted).abs().max() > 1e-3


def test_full_training_keeps_its_start_as_the_reference(build):
    policy = build(use_lora=False, kl_coef=0.1)
    assert len(policy.names) == len(list(policy.model.transformer.parameters()))
    x, sigma, cond = _inputs(policy)
    with torch.no_grad():
        start = policy.velocity(x, sigma, cond, 1.0)
        _move(policy, 0.01)
        assert (policy.velocity(x, sigma, cond, 1.0) - start).abs().max() > 1e-3
        assert torch.equal(policy.velocity(x, sigma, cond, 1.0, weights="reference"), start)


@pytest.mark.parametrize("use_lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", ["reference", "ema"])
def test_other_weights_are_swapped_in_and_the_current_ones_come_back(build, name, use_lora):
    policy = build(use_lora=use_lora, kl_coef=0.1, ema=True)
    _move(policy, 0.01)
    before = [p.detach().clone() for p in policy.parameters]
    flags = [p.requires_grad for p in policy.parameters]
    x, sigma, cond = _inputs(policy)
    with torch.no_grad():
        current = policy.velocity(x, sigma, cond, 1.0)
        other = policy.velocity(x, sigma, cond, 1.0, weights=name)
        assert (other - current).abs().max() > 1e-3
        assert torch.equal(policy.velocity(x, sigma, cond, 1.0), current)
    with pytest.raises(RuntimeError, match="inside"), policy.weights(name):
        raise RuntimeError("inside")
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters, before))
    assert [p.requires_grad for p in policy.parameters] == flags == [True] * len(flags)


def test_the_average_follows_the_weights(build):
    policy = build(ema=True, ema_decay=0.9)
    start = [p.detach().clone() for p in policy.parameters]
    _loss(policy).backward()
    policy.step(0, 1e-2)
    # update 0 has decay min(1 / 10, 0.9): the average moves 9/10 of the way
    with policy.weights("ema"):
        assert all(map(torch.equal, policy.parameters, policy.ema.tensors))
    current = [p.detach() for p in policy.parameters]
    for average, first, last in zip(policy.ema.tensors, start, current):
        torch.testing.assert_close(average, 0.1 * first + 0.9 * last)


def test_unknown_weights_list_the_known_ones(build):
    policy = build()
    x, sigma, cond = _inputs(policy)
    with pytest.raises(ValueError, match=r"'best'.*current, reference, old, ema"):
        policy.velocity(x, sigma, cond, 1.0, weights="best")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("sde_type", ["flow_sde", "cps", "dance_sde"])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_the_ratio_of_an_unchanged_policy_is_exactly_1(
    build, sde_type, guidance_scale, checkpointing
):
    policy = build(gradient_checkpointing=checkpointing)
    _move(policy)
    x, _, cond = _inputs(policy)
    window, kind = (0, 2), sde.SDES[sde_type]

    def velocity(x, sigma, *, replay):
        return policy.velocity(x, sigma, cond, guidance_scale, replay=replay)

    noises = torch.stack([seeds.normal(x.shape, 0, seeds.STEP_NOISE, t=t) for t in window], 1)
    kept = sample_trajectory(
        velocity, x, policy.model.sigmas(4, SIZE), sde=kind, noise_level=0.7,
        stochastic=window, trained=window, noises=noises,
    )  # fmt: skip
    assert not kept.final.requires_grad
    for place, t in enumerate(window):
        sigma, sigma_next = (kept.sigmas[i].expand(2) for i in (t, t + 1))
        model = policy.model
        v = model.velocity(policy.module, kept.latents[:, place], sigma, cond, guidance_scale)
        assert v.requires_grad
        transition = kind.step(
            kept.latents[:, place], v, sigma, sigma_next, noise_level=0.7, sigma_max=kept.sigmas[1]
        )
        new = sde.log_prob(transition, kept.next_latents[:, place], normalised=kind.normalised)
        assert torch.equal(torch.exp(new - kept.log_probs[:, place]), torch.ones(2))


def test_a_replayed_velocity_runs_the_training_graph_and_is_detached(build):
    policy = build()
    _move(policy)
    x, sigma, cond = _inputs(policy)
    with_grad = []
    hook = policy.model.transformer.register_forward_hook(
        lambda *_: with_grad.append(torch.is_grad_enabled())
    )
    with torch.no_grad():
        replayed = policy.velocity(x, sigma, cond, 4.5, replay=True)
        policy.velocity(x, sigma, cond, 4.5)
    hook.remove()
    assert with_grad == [True, False]
    trained = policy.model.velocity(policy.module, x, sigma, cond, 4.5)
    assert not replayed.requires_grad
    assert trained.requires_grad
    assert torch.equal(replayed, trained)


def test_accumulated_gradients_are_those_of_the_whole_batch(build):
    policy = build()
    _move(policy)
    _loss(policy).backward()
    whole = _gradients(policy)
    policy.optimizer.zero_grad()
    for rows, last in ((slice(0, 2), False), (slice(2, 4), True)):
        with policy.accumulate(sync=last):
            _loss(policy, rows).backward()
    for part, full in zip(_gradients(policy), whole):
        torch.testing.assert_close(part, full, rtol=1e-4, atol=1e-4 * whole[0].abs().max().item())


def test_gradient_checkpointing_gives_the_same_gradients(build):
    gradients = []
    for checkpointing in (False, True):
        policy = build(gradient_checkpointing=checkpointing)
        assert policy.model.transformer.is_gradient_checkpointing is checkpointing
        _move(policy)
        _loss(policy).backward()
        gradients.append(_gradients(policy))
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients))


def test_a_step_descends_clips_and_clears(build):
    policy = build(max_grad_norm=1.0)
    _move(policy)
    loss = _loss(policy)
    loss.backward()
    norm = math.sqrt(sum(g.square().sum().item() for g in _gradients(policy)))
    assert norm > 1.0
    result = policy.step(0, 1e-3)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert not result.skipped
    assert _loss(policy) < loss
    assert all(p.grad is None for p in policy.parameters)
    assert {group["lr"] for group in policy.optimizer.param_groups} == {1e-3}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_gradient_stops_before_the_weights_move(build, value):
    policy = build(ema=True)
    _loss(policy).backward()
    policy.parameters[1].grad[0, 0] = value
    before = [p.detach().clone() for p in policy.parameters]
    average = [t.clone() for t in policy.ema.tensors]
    with pytest.raises(FloatingPointError, match="at update 3; weights are unchanged"):
        policy.step(3, 1e-3)
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters, before))
    assert all(torch.equal(t, q) for t, q in zip(policy.ema.tensors, average))


class WithIdleLayer(torch.nn.Module):
    """Wrap a transformer's blocks so that one layer takes no part in the result."""

    def __init__(self, block):
        super().__init__()
        self.block, self.idle = block, torch.nn.Linear(2, 2)

    def forward(self, *args, **kwargs):
        return self.block(*args, **kwargs)


def test_parameters_without_a_gradient_are_frozen_and_listed(build, tiny_config, monkeypatch):
    assert build(use_lora=False).frozen == []  # SD3's all take part
    load = SD3.load.__func__

    def with_idle_layer(cls, config, device):
        model = load(cls, config, device)
        blocks = model.transformer.transformer_blocks
        blocks[0] = WithIdleLayer(blocks[0])
        return model

    monkeypatch.setattr(SD3, "load", classmethod(with_idle_layer))
    policy = build(use_lora=False)
    idle = [f"transformer_blocks.0.idle.{name}" for name in ("weight", "bias")]
    assert policy.frozen == idle
    assert not set(idle) & set(policy.names)
    _loss(policy).backward()
    assert all(p.grad is not None for p in policy.parameters)


def test_the_probe_of_full_training_holds_one_gradient_at_a_time(tiny_config):
    """It runs before a back-end divides anything; all gradients are as large as the model."""
    tiny_config.unlock().use_lora = False
    model, most = SD3.load(tiny_config, torch.device("cpu")), []
    parameters = list(model.transformer.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(
            lambda _: most.append(sum(p.grad is not None for p in parameters))
        )
    policy = Policy(model, tiny_config, Accelerator(cpu=True))
    assert max(most) == 1
    assert len(most) == len(policy.names) == len(parameters) - len(policy.frozen)
    assert all(p.grad is None for p in parameters)


def test_a_state_is_gathered_one_moment_at_a_time(build, monkeypatch):
    """Each is whole on the device until it is on the host; together they may not fit."""
    policy = build()

    class Whole:
        """Stand for a whole tensor on the device."""

        now = most = 0

        def __init__(self):
            Whole.now += 1
            Whole.most = max(Whole.most, Whole.now)

        def __del__(self):
            Whole.now -= 1

        def cpu(self) -> torch.Tensor:
            return torch.zeros(1)

    backend = policy._backend
    loss = _loss(policy)
    policy.backward(loss)
    policy.step(0, 1e-3)
    monkeypatch.setattr(backend, "_whole_moment", lambda index, value: Whole())
    state = policy.state()["optimizer"]
    names = {"step", "exp_avg", "exp_avg_sq"}
    assert state.keys() == {f"{i}.{n}" for i in range(len(policy.names)) for n in names}
    assert Whole.most <= 2, "the one in hand and the next"
