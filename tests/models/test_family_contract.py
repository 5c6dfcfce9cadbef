"""Hold every adapter to one contract, each on its own tiny random pipeline (tests/families.py)."""

from typing import NamedTuple

import diffusers
import families
import pytest
import tiny_flux
import torch
from accelerate import Accelerator
from families import FAMILIES

from flow_grpo import registry, sde, seeds
from flow_grpo.models.base import Cond, FlowModel
from flow_grpo.policy import Policy
from flow_grpo.rollout import sample_trajectory

PROMPTS = ['"AB" on a red sign, painted', 'the word "CDE"']  # of different lengths
NUM_STEPS = 3
# Both sum the same float32 products in another order: a few units in the last place a step.
SAME = {"rtol": 0.0, "atol": 1e-5}
every_family = pytest.mark.parametrize("name", FAMILIES)


class Loaded(NamedTuple):
    """An adapter, loaded as a run loads it, and what to ask of it."""

    name: str
    model: FlowModel
    size: tuple[int, int]

    @property
    def family(self) -> families.Family:
        return FAMILIES[self.name]

    @property
    def scale(self) -> float:
        return self.family.guidance_scale

    def references(self, num: int, first: int = 0) -> list[list] | None:
        """Return the reference images of `num` prompts, as large as the image to make."""
        count, (height, width) = self.family.references, self.size
        if not count:
            return None
        seeds_ = range(first, first + num)
        return [[tiny_flux.image(10 * s + i, width, height) for i in range(count)] for s in seeds_]

    def noise(self, num: int = 2) -> torch.Tensor:
        shape = (num, *self.model.latent_shape(self.size))
        return self.model.initial_latents(
            num, self.size, seeds.normal(shape, 0, seeds.INITIAL_NOISE)
        )

    @torch.no_grad()
    def cond(self, prompts=PROMPTS, images=None, *, negative=True) -> Cond:
        return self.model.encode(
            self.model.transformer,
            prompts,
            images or self.references(len(prompts)),
            size=self.size,
            negative=self.model.negative if negative else None,
        )

    @torch.no_grad()
    def velocity(self, x, sigma, cond, scale=None) -> torch.Tensor:
        scale = self.scale if scale is None else scale
        return self.model.velocity(self.model.transformer, x, sigma, cond, scale)

    def sampled(self, x, scale: float) -> torch.Tensor:
        """Return x_0 of the prompts by the core's ODE."""
        cond = self.cond(negative=scale > 1)

        def velocity(x, sigma, *, replay):
            return self.velocity(x, sigma, cond, scale)

        return sample_trajectory(velocity, x, self.model.sigmas(NUM_STEPS, self.size)).final


def _rms(difference: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of every sample (b,)."""
    return difference.square().flatten(1).mean(1).sqrt()


@pytest.fixture(scope="module")
def models(tiny_dir):
    """Return the function (family, precision) -> its adapter, loaded once."""
    loaded = {}

    def load(name: str, precision: str = "no") -> FlowModel:
        if (name, precision) not in loaded:
            config = families.settings(name, tiny_dir(name), mixed_precision=precision)
            loaded[name, precision] = families.adapter(name).load(config, torch.device("cpu"))
        return loaded[name, precision]

    return load


@pytest.fixture(scope="module")
def pipelines(tiny_dir):
    """Return the function (family) -> its pipeline, loaded by diffusers and touched by nobody."""
    loaded = {}

    def load(name: str):
        if name not in loaded:
            cls = getattr(diffusers, families.adapter(name).pipeline_class)
            loaded[name] = cls.from_pretrained(tiny_dir(name))
        return loaded[name]

    return load


@pytest.fixture
def subject(name, models) -> Loaded:
    """Return the family's adapter in fp32, for square images."""
    return Loaded(name, models(name), FAMILIES[name].sizes[0])


def test_every_adapter_is_in_the_table():
    assert sorted(FAMILIES) == registry.names(families.MODELS)


@every_family
@pytest.mark.parametrize("place", [0, 1], ids=["square", "wide"])
@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
def test_noise_0_is_the_unpatched_pipeline(name, guided, place, models, pipelines):
    subject = Loaded(name, models(name), FAMILIES[name].sizes[place])
    scale, x, images = subject.scale if guided else 1.0, subject.noise(), subject.references(2)
    call = {"size": subject.size, "num_steps": NUM_STEPS, "guidance_scale": scale}
    pipeline = pipelines(name)
    final = subject.sampled(x, scale)
    wanted = families.unpatched(name, pipeline, PROMPTS, x, images, **call)
    torch.testing.assert_close(final, wanted, **SAME)
    torch.testing.assert_close(subject.model.stock(PROMPTS, x, images, **call), wanted, **SAME)
    pixels = families.unpatched(name, pipeline, PROMPTS, x, images, **call, output_type="pt")
    with torch.no_grad():
        torch.testing.assert_close(subject.model.decode(final), pixels, **SAME)
    assert (_rms(final - x) > 0.1).all(), "the steps must have moved the latents"
    call["guidance_scale"] = scale + 2
    other = families.unpatched(name, pipeline, PROMPTS[::-1], x, images, **call)
    assert (_rms(other - wanted) > 10 * SAME["atol"]).all()


def _effects(subject: Loaded) -> dict[str, float]:
    """Return by how much another input changes the velocity: RMS of the least changed sample."""
    x, sigma, cond = subject.noise(), torch.full((2,), 0.7), subject.cond()
    velocity = subject.velocity(x, sigma, cond)
    others = {
        "prompt": subject.velocity(x, sigma, subject.cond(PROMPTS[::-1])),
        "guidance": subject.velocity(x, sigma, cond, 1.0),
        "sigma": subject.velocity(x, sigma - 0.2, cond),
    }
    if subject.family.references:
        images = subject.references(2, first=2)
        others["reference"] = subject.velocity(x, sigma, subject.cond(images=images))
    return {key: _rms(other - velocity).min().item() for key, other in others.items()}


@every_family
def test_every_input_changes_the_velocity(subject):
    effects, least = _effects(subject), subject.family.effects
    assert effects.keys() == least.keys()
    assert all(effects[key] > least[key] for key in effects), effects


@every_family
def test_a_condition_is_its_own_samples_and_sliceable(subject):
    x, sigma = subject.noise(), torch.tensor([0.9, 0.4])
    prompts, images = [*PROMPTS, "x"], subject.references(3)
    several = subject.cond(prompts, images)
    assert len(several) == 3
    singles = [subject.cond([prompt], images and [images[i]]) for i, prompt in enumerate(prompts)]
    glued = Cond.cat([singles[1], singles[0]])
    for place in range(3):
        sliced = several.index(slice(place, place + 1))
        assert sliced.tensors.keys() == singles[place].tensors.keys()
        for key, tensor in sliced.tensors.items():
            assert torch.equal(tensor, singles[place][key]), key
    picked = subject.velocity(x, sigma, several.index(torch.tensor([1, 0])))
    assert torch.equal(picked, subject.velocity(x, sigma, glued))
    assert (_rms(picked - subject.velocity(x, sigma, several.index(slice(0, 2)))) > 1e-3).all()
    alone = [subject.velocity(x[i : i + 1], sigma[i : i + 1], singles[1 - i]) for i in range(2)]
    torch.testing.assert_close(torch.cat(alone), picked, **SAME)


# Times the measured effect (tests/families.py), for CPUs that sum in another order. In bf16 the
# result's last bit may go then: 2**-8 of up to 4 standard deviations.
BATCH_MARGIN, LAST_BIT = 2.5, 4 * 2**-8


@every_family
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_velocity_hardly_depends_on_its_batch(name, precision, models):
    num = 8
    subject = Loaded(name, models(name, precision), FAMILIES[name].sizes[1])
    x, sigma, cond = subject.noise(num), torch.linspace(0.95, 0.05, num), subject.cond(PROMPTS * 4)
    whole = subject.velocity(x, sigma, cond)
    rows = [slice(i, i + 1) for i in range(num)]
    parts = torch.cat([subject.velocity(x[r], sigma[r], cond.index(r)) for r in rows])
    effect = ((parts - whole).abs().max() / whole.std()).item()
    measured = subject.family.batch_effect
    assert effect <= (BATCH_MARGIN * measured if precision == "no" else LAST_BIT), effect
    assert whole.std() > 0.05
    assert (_rms(whole[:2] - whole[2:4]) > 1e-2).all(), "the noise and the sigma must matter"


@every_family
def test_sigmas_are_the_pipelines_and_its_scheduler_is_left_alone(subject):
    scheduler = subject.model.pipeline.scheduler
    subject.model.stock(
        PROMPTS[:1], subject.noise(1), subject.references(1),
        size=subject.size, num_steps=5, guidance_scale=1.0,
    )  # fmt: skip
    used = scheduler.sigmas.clone()
    other = subject.model.sigmas(4, subject.size)
    assert torch.equal(scheduler.sigmas, used)
    sigmas = subject.model.sigmas(5, subject.size)
    assert torch.equal(sigmas, used.float())
    assert sigmas.dtype == torch.float32
    for each, num in ((sigmas, 5), (other, 4)):
        assert each.shape == (num + 1,)
        assert (each[0], each[-1]) == (1, 0)
        assert (each.diff() < 0).all()


@every_family
def test_latents_of_images_decode_to_what_the_autoencoder_makes_of_them(subject):
    vae, (height, width) = subject.model.pipeline.vae, FAMILIES[subject.name].sizes[1]
    frames, clips = FAMILIES[subject.name].num_frames, vae.encoder.conv_in.weight.ndim == 5
    images = torch.rand(2, frames, 3, height, width, generator=seeds.generator(0, 0))
    is_video = subject.model.task == "text-to-video"
    with torch.no_grad():
        x = subject.model.encode_images(images if is_video else images[:, 0])
        back = subject.model.decode(x)
        pixels = (2 * images - 1).transpose(1, 2)  # (b, 3, f, h, w)
        z = vae.encode(pixels if clips else pixels[:, :, 0]).latent_dist.mode()
        wanted = (vae.decode(z).sample / 2 + 0.5).clamp(0, 1)
    wanted = wanted.transpose(1, 2) if is_video else wanted.reshape(back.shape)
    torch.testing.assert_close(back, wanted, **SAME)
    assert x.shape == (2, *subject.model.latent_shape((height, width)))
    assert x.dtype == back.dtype == torch.float32
    assert (_rms(back[1:] - back[:1]) > 5e-4).all(), "two images must differ"


@every_family
def test_prompts_are_encoded_the_same_after_the_encoders_left_the_device(subject):
    before = subject.cond()
    subject.model.offload_text_encoders()
    after, other = subject.cond(), subject.cond(PROMPTS[::-1])
    assert all(torch.equal(after[key], before[key]) for key in before.tensors)
    assert not all(torch.equal(other[key], before[key]) for key in before.tensors)
    parts = [getattr(subject.model.pipeline, part) for part in subject.model.text_encoders]
    assert {p.device.type for part in parts if part for p in part.parameters()} == {"cpu"}


@every_family
@pytest.mark.parametrize("use_lora", [True, False], ids=["adapter", "full"])
def test_frozen_parts_are_in_half_precision_and_the_autoencoder_is_not(name, use_lora, tiny_dir):
    config = families.settings(name, tiny_dir(name), mixed_precision="bf16", use_lora=use_lora)
    model = families.adapter(name).load(config, torch.device("cpu"))
    assert model.dtype == (torch.bfloat16 if use_lora else torch.float32)
    assert model.pipeline.vae.dtype == torch.float32
    encoders = [getattr(model.pipeline, part) for part in model.text_encoders]
    assert {part.dtype for part in encoders} == {torch.bfloat16}
    for part in (model.transformer, model.pipeline.vae, *encoders):
        assert not part.training
        assert not any(p.requires_grad for p in part.parameters())
    subject = Loaded(name, model, FAMILIES[name].sizes[0])
    velocity = subject.velocity(subject.noise(), torch.full((2,), 0.5), subject.cond())
    assert velocity.dtype == torch.float32
    assert velocity.isfinite().all()


@every_family
def test_every_lora_target_names_modules_of_the_transformer(subject):
    modules = [key for key, _ in subject.model.transformer.named_modules()]
    absent = {
        target
        for target in subject.model.lora_targets
        if not any(key == target or key.endswith(f".{target}") for key in modules)
    }
    assert absent == subject.family.absent_targets
    blocks = {type(m).__name__ for m in subject.model.transformer.modules()}
    assert set(subject.model.block_class.split(",")) <= blocks


@pytest.fixture
def build(name, tiny_dir, fresh_accelerator):
    """Return a function that builds a policy as a run does, its adapter moved off 0."""

    def policy(**changes) -> Policy:
        config = families.settings(name, tiny_dir(name), **changes)
        accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=True)
        model = families.adapter(name).load(config, accelerator.device)
        built = Policy(model, config, accelerator)
        with torch.no_grad():
            for place, parameter in enumerate(built.parameters):
                noise = seeds.normal(parameter.shape, 1, seeds.ADAPTER_INIT, member=place)
                parameter.add_(0.05 * noise)
        return built

    return policy


@every_family
def test_the_reference_is_the_base_model_to_the_bit(name, build, models):
    policy, subject = build(), Loaded(name, models(name), FAMILIES[name].sizes[0])
    x, sigma, cond = subject.noise(), torch.tensor([0.9, 0.4]), subject.cond()
    wanted = subject.velocity(x, sigma, cond)
    with torch.no_grad():
        found = policy.velocity(x, sigma, cond, subject.scale, weights="reference")
        assert torch.equal(found, wanted)
        assert (_rms(policy.velocity(x, sigma, cond, subject.scale) - wanted) > 1e-3).all()


@every_family
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_ratio_of_an_unchanged_policy_is_exactly_1(name, build, checkpointing, precision):
    policy = build(**{"mixed_precision": precision, "train.gradient_checkpointing": checkpointing})
    subject = Loaded(name, policy.model, FAMILIES[name].sizes[0])
    cond, x, scale, window = subject.cond(), subject.noise(), subject.scale, (0, 2)
    noises = torch.stack([seeds.normal(x.shape, 0, seeds.STEP_NOISE, t=t) for t in window], 1)

    def velocity(x, sigma, *, replay):
        return policy.velocity(x, sigma, cond, scale, replay=replay)

    def log_ratios(kind: sde.SDE, kept) -> torch.Tensor:
        """Return those of the trained steps, as an update computes them."""
        ratios = []
        for place, t in enumerate(window):
            at, (sigma, sigma_next) = (
                kept.latents[:, place],
                kept.sigmas[[t, t + 1], None].expand(2, 2),
            )
            v = policy.velocity(at, sigma, cond, scale)
            assert v.requires_grad
            step = kind.step(at, v, sigma, sigma_next, noise_level=0.7, sigma_max=kept.sigmas[1])
            new = sde.log_prob(step, kept.next_latents[:, place], normalised=kind.normalised)
            ratios.append(new - kept.log_probs[:, place])
        return torch.stack(ratios).detach()

    for kind in sde.SDES.values():
        kept = sample_trajectory(
            velocity, x, subject.model.sigmas(4, subject.size), sde=kind, noise_level=0.7,
            stochastic=window, trained=window, noises=noises,
        )  # fmt: skip
        assert torch.equal(log_ratios(kind, kept), torch.zeros(2, 2))
        before = [p.detach().clone() for p in policy.parameters]
        policy.assign([1.1 * p for p in before])
        assert (log_ratios(kind, kept).abs() > 1e-6).all(), "another policy has another ratio"
        policy.assign(before)


@every_family
def test_levels_to_learn_at_are_those_of_the_sampling_schedule(subject):
    """A rollout's sigmas lie among them, however many there are and whatever shifts them."""
    num_steps, size = 10, (512, 512)
    levels = subject.model.noise_levels(1000, num_steps, size)
    assert levels.shape == (1000,)
    assert levels[0] == 1
    assert levels[-1] > 0
    assert (levels.diff() < 0).all()
    sigmas = subject.model.sigmas(num_steps, size)[:-1]
    # Half of both are noisier; schedulers differ in where they end (at most 0.07 of it).
    assert abs(levels.median() - sigmas.median()) < 0.1
