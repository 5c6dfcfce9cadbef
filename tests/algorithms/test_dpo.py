"""DPO's pairs and loss by hand, and on one batch through the trainer's own rows."""

import math

import pytest
import torch
import toy

from config.base import locked_config
from flow_grpo import collecting, updating
from flow_grpo.algorithms.base import Scores
from flow_grpo.algorithms.dpo import Dpo
from flow_grpo.progress import progress_bar
from flow_grpo.sde import diffuse


def algorithm(**train) -> Dpo:
    config = locked_config()
    for name, value in train.items():
        config.train[name] = value
    return Dpo(config)


def scores(total, group_size=4) -> Scores:
    total = torch.tensor(total, dtype=torch.float64)
    valid = total.isfinite()
    states = {"r": torch.where(valid, 0, 2).to(torch.uint8)}
    groups = torch.arange(len(total)) // group_size
    return Scores({"r": total}, {"r": torch.ones_like(total)}, states, total, valid, groups)


def rows(found: Scores, **train):
    dpo = algorithm(**train)
    generator = torch.Generator().manual_seed(0)
    sigmas = torch.linspace(1, 0, 1001)[:-1]
    advantages = dpo.advantages(found)
    return dpo.rows(advantages, found, num_steps=0, sigmas=sigmas, generator=generator)


NAN = math.nan


def test_a_pair_is_the_best_and_the_worst_of_a_group_and_equal_groups_have_none():
    found = scores([1.0, 3.0, 2.0, 0.0, 5.0, 5.0, 5.0, 5.0, 7.0, 7.0, 8.0, 7.0])
    picked = rows(found, draws_per_sample=2)
    assert picked.samples.tolist() == [[1, 3], [1, 3], [10, 8], [10, 8]]
    assert picked.columns["draw"].tolist() == [0, 1, 0, 1]
    assert algorithm().advantages(found).nan_to_num(9).tolist() == [
        9, 1, 9, -1, 9, 9, 9, 9, -1, 9, 1, 9,
    ]  # fmt: skip


def test_a_failed_sample_is_in_no_pair():
    assert rows(scores([NAN, 3.0, 2.0, 1.0, NAN, NAN, NAN, 4.0])).samples.tolist() == [[1, 3]]
    assert len(rows(scores([NAN, NAN, 2.0, NAN])).samples) == 0


def test_the_noise_levels_are_logit_normal_over_the_schedule():
    found = scores([1.0, 0.0] * 2000, group_size=2)
    place = 1 - rows(found, draws_per_sample=5).columns["sigma"]  # the schedule is linear
    logit = torch.logit(place.clamp(5e-4, 1 - 5e-4))
    # 10000 draws of Normal(0, 1): standard errors 0.010 and 0.007; levels are rounded to 1/1000.
    assert logit.mean().abs() < 0.04
    assert logit.std().item() == pytest.approx(1.0, abs=0.03)


def batch(policy_shape=toy.SHAPE, num=3, seed=0):
    """Return `num` pairs of images that share noise and level."""
    generator = torch.Generator().manual_seed(seed)
    x_0 = torch.randn(2 * num, *policy_shape, generator=generator)
    noise = torch.randn(num, *policy_shape, generator=generator)
    sigma = torch.linspace(0.2, 0.8, num)
    advantages = [1.0] * num + [-1.0] * num
    return toy.row_batch(
        advantages, kept={"final": x_0}, noise=noise, sigma=sigma, weight=torch.ones(num)
    )


def test_at_the_reference_the_loss_is_log_2_whatever_beta_is():
    velocity = torch.full(toy.SHAPE, 0.3)
    for beta in (1.0, 100.0, 5000.0):
        loss, metrics = algorithm(dpo_beta=beta).loss(
            toy.TensorPolicy(velocity, old=velocity), batch()
        )
        assert loss.item() == pytest.approx(3 * math.log(2), abs=1e-6)
        assert metrics["loss"].tolist() == pytest.approx([math.log(2)] * 3, abs=1e-6)
        assert metrics["winner_change"].tolist() == metrics["loser_change"].tolist() == [0.0] * 3


def test_loss_and_metrics_are_the_formula_s():
    policy, rows = toy.TensorPolicy(torch.tensor(0.3), old=torch.tensor(-0.1)), batch()
    loss, metrics = algorithm(dpo_beta=2.0).loss(policy, rows)
    total = 0.0
    for i in range(3):
        target = [rows.noise[i] - rows.kept["final"][j] for j in (i, i + 3)]
        new, old = ([((v - t) ** 2).mean().item() for t in target] for v in (0.3, -0.1))
        inside = -1.0 * ((new[0] - old[0]) - (new[1] - old[1]))  # beta / 2 = 1
        total += math.log(1 + math.exp(-inside))
        assert metrics["implicit_accuracy"][i] == (inside > 0)
        assert metrics["winner_error"][i].item() == pytest.approx(new[0], rel=1e-5)
        assert metrics["loser_error"][i].item() == pytest.approx(new[1], rel=1e-5)
        assert metrics["winner_change"][i].item() == pytest.approx(new[0] - old[0], rel=1e-4)
    assert loss.item() == pytest.approx(total, rel=1e-5)


def test_both_images_of_a_pair_get_the_same_noise_and_level():
    seen = []

    class Spy(toy.TensorPolicy):
        def velocity(self, x, sigma, cond, guidance_scale, **weights):
            seen.append((x, sigma, guidance_scale))
            return super().velocity(x, sigma, cond, guidance_scale, **weights)

    rows = batch()
    zero = torch.zeros(toy.SHAPE)
    algorithm().loss(Spy(zero, old=zero), rows)
    both = torch.cat([rows.noise, rows.noise]), torch.cat([rows.sigma, rows.sigma])
    for x, sigma, guidance_scale in seen:
        assert torch.equal(x, diffuse(rows.kept["final"], *both))
        assert torch.equal(sigma, both[1])
        assert guidance_scale == 1.0  # flow matching is not guided
    assert len(seen) == 2


def test_the_gradient_raises_winners_and_lowers_losers():
    # d loss / d velocity at the reference: -1/2 d inside = beta / 4 (d e_w - d e_l), and
    # d e / d v = 2 mean(v - target): beta / 2 * mean(target_l - target_w) for one number v.
    policy, rows = toy.TensorPolicy(torch.tensor(0.0), old=torch.tensor(0.0)), batch(num=1)
    algorithm(dpo_beta=4.0).loss(policy, rows)[0].backward()
    winner, loser = (rows.noise[0] - x_0 for x_0 in rows.kept["final"])
    expected = 4.0 / 2 * (loser - winner).mean().item()
    assert policy.current.grad.item() == pytest.approx(expected, rel=1e-5)


def test_padding_counts_for_nothing():
    policy, rows = toy.TensorPolicy(torch.tensor(0.2), old=torch.tensor(0.0)), batch()
    whole, metrics = algorithm().loss(policy, rows)
    part, _ = algorithm().loss(policy, rows._replace(weight=torch.tensor([1.0, 0.0, 1.0])))
    expected = whole.item() - metrics["loss"][1].item()
    assert part.item() == pytest.approx(expected, rel=1e-5)


def test_one_update_lowers_the_loss_of_its_own_batch(tmp_path):
    config = toy.config(
        tmp_path, "dpo", train__updates_per_epoch=1, train__dpo_beta=5.0,
        train__learning_rate=0.01, train__draws_per_sample=4,
    )  # fmt: skip
    run = toy.build(config)
    collected = collecting.collect(run, 0, progress_bar(run.accelerator, "rollout", 1))
    found, _ = collecting.score(run, collected)
    metrics = [updating.update(run, collected, found) for _ in range(3)]  # the same rows again
    run.rewards.close()
    losses = [entry["train/loss"] for entry in metrics]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[0] > losses[1] > losses[2]
    accuracies = [entry["train/implicit_accuracy"] for entry in metrics]
    assert accuracies[0] == 0.0 < 0.5 < accuracies[1]


def test_online_weights_are_renewed_by_multiples_of_the_frequency_and_offline_never():
    assert [algorithm(old_update_freq=4).old_decay(u, u + 3) for u in range(6)] == [
        1, 0, 0, 0, 1, 0,
    ]  # fmt: skip  # 0-3, 1-4, 2-5, 3-6, 4-7, 5-8
    assert {algorithm().old_decay(u, u + 3) for u in range(100)} == {1.0}
