"""A flow model in closed form: data Normal(mean, STD^2) whose mean is trained, one per prompt.

A run with it is a real `session.Run` that learns within a second. Its images hold the latents, so
that `Nearness` can ask for any mean it likes.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from config.base import locked_config
from flow_grpo import collecting, evaluation, session, updating
from flow_grpo.algorithms.base import RowBatch
from flow_grpo.models.base import Cond, FlowModel
from flow_grpo.progress import progress_bar
from flow_grpo.rewards.base import Samples, Scores

SHAPE = (2, 1, 1)  # of a latent
STD = 0.5  # of the data
# Where the reward is highest, by prompt: confusing two prompts teaches nothing.
TARGETS = {"0": (1.0, -1.0), "1": (-1.0, 1.0)}


class Gaussian(nn.Module):
    """Answer with the velocity whose flow turns noise into Normal(mean, STD^2)."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(len(TARGETS), *SHAPE))

    def forward(self, x: Tensor, sigma: Tensor, place: Tensor) -> Tensor:
        """Return noise - x_0 as expected given x."""
        mean, sigma = self.mean[place], sigma.reshape(-1, 1, 1, 1)
        clear = 1 - sigma
        share = clear * STD**2 / (clear**2 * STD**2 + sigma**2)
        x_0 = mean + share * (x - clear * mean)
        return (x - x_0) / sigma


class Toy(FlowModel):
    """Adapt `Gaussian`; there is nothing to load."""

    pipeline_class, family, lora_targets, block_class = "Toy", "toy", (), "Gaussian"
    pipeline, dtype, size_unit = None, torch.float32, 1

    def __init__(self):
        self._transformer = Gaussian()

    @classmethod
    def load(cls, config, device):
        return cls()

    @property
    def transformer(self):
        return self._transformer

    def encode_text(self, text, images, size):
        return {"place": torch.tensor([int(text or 0)])}

    def latent_shape(self, size):
        return SHAPE

    def sigmas(self, num_steps, size):
        return torch.linspace(1, 0, num_steps + 1)

    def forward(self, module, x, sigma, cond, guidance_scale):
        assert guidance_scale == 1.0
        return module(x, sigma, cond["place"])

    def encode_images(self, images):
        return images[:, :2].logit()

    def decode(self, x):
        return torch.cat([x, torch.zeros_like(x[:, :1])], 1).sigmoid()

    def offload_text_encoders(self):
        pass


class Nearness:
    """Score minus the mean squared distance between an image's latents and its prompt's target."""

    scope, runs = "sample", "inline"

    def __init__(self, device: str = "cpu"):
        self.device = device

    def __call__(self, samples: Samples) -> Scores:
        targets = torch.tensor([TARGETS[prompt] for prompt in samples.prompts])
        values = -(samples.images[:, :2, 0, 0].logit() - targets).square().mean(1)
        num = len(values)
        return Scores(values, torch.zeros(num, dtype=torch.uint8), [""] * num, {})


class OneFails(Nearness):
    """`Nearness` that has nothing to say about the first image of every call."""

    def __call__(self, samples: Samples) -> Scores:
        scores = super().__call__(samples)
        scores.values[0] = torch.nan
        return scores


def config(folder: Path, algorithm: str = "grpo", **settings):
    """Return a configuration of `Toy`; `train__clip_range=0.2` sets train.clip_range.

    Args:
        folder: where its prompts may be written.
        algorithm: file in flow_grpo/algorithms.
        settings: what differs.
    """
    for split, times in (("train", 1), ("test", 64)):
        (folder / f"{split}.txt").write_text("\n".join([*TARGETS] * times))
    config = locked_config()
    config.algorithm, config.run_name = algorithm, "toy"
    config.logdir = str(folder / "runs")
    config.dataset = config.pretrained.model = str(folder)
    config.reward_fn = {"toy:Nearness": 1.0}
    config.mixed_precision, config.use_lora, config.trackers = "no", False, ()
    config.sample.num_steps = config.eval.num_steps = 6
    config.sample.guidance_scale = config.eval.guidance_scale = 1.0
    config.sample.groups_per_epoch, config.sample.group_size = 4, 12
    config.sample.batch_size = config.eval.batch_size = 48
    config.train.learning_rate, config.train.max_grad_norm = 0.05, 10.0
    config.train.ema = False
    if algorithm in ("grpo", "grpo_guard"):
        config.train.clip_range = 0.2
    for name, value in settings.items():
        *section, field = name.split("__")
        (config[section[0]] if section else config)[field] = value
    return config


def build(config) -> session.Run:
    """Return the run of a configuration, of as many processes as there are."""
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    plan = session.check_config(config, accelerator.num_processes)
    return session.build(Toy, config, accelerator, plan, None)


def train_epoch(run: session.Run) -> dict[str, float]:
    """Collect, score and update once, as the trainer does; return the metrics."""
    bar = progress_bar(run.accelerator, "rollout", 1)
    collected = collecting.collect(run, run.state.epoch, bar)
    scores, metrics = collecting.score(run, collected)
    metrics |= updating.update(run, collected, scores)
    run.state.epoch += 1
    return metrics


def evaluate(run: session.Run) -> tuple[float, float]:
    """Return the mean held-out reward and its standard error."""
    metrics, _ = evaluation.evaluate(run, lambda number: None)
    return metrics["eval/total"], metrics["eval/total_stderr"]


class TensorPolicy:
    """Answer with a tensor whatever is asked: `current` is trained, others by their name."""

    def __init__(self, current: Tensor, **others: Tensor):
        self.current = current.clone().requires_grad_()
        self._others = others

    def velocity(self, x, sigma, cond, guidance_scale, *, weights="current"):
        """Return the tensor of these weights, spread over x."""
        tensor = self.current if weights == "current" else self._others[weights]
        return tensor.expand_as(x)


def row_batch(advantages, **fields) -> RowBatch:
    """Return a batch of rows with these advantages; what is not given is of no interest."""
    advantages = torch.as_tensor(advantages, dtype=torch.float32)
    defaults = {
        "cond": Cond({"place": torch.zeros(len(advantages), dtype=torch.int64)}),
        "kept": {},
        "advantage": advantages,
        "weight": torch.ones(len(advantages)),
        "columns": {},
        "sigma": torch.full((len(advantages),), 0.5),
        "sigma_next": None,
        "sigma_max": torch.tensor(0.9),
        "noise": None,
    }
    return RowBatch(**(defaults | fields))
