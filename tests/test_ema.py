"""The average of the weights follows its published decay, one optimizer step at a time."""

import math

import pytest
import torch

from flow_grpo.ema import Ema


def test_the_average_is_the_recursion_written_out():
    weights = [torch.tensor([1.0])]
    ema = Ema(weights, decay=0.5)
    expected = 1.0
    for update, value in enumerate((2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)):
        decay = min((1 + update) / (10 + update), 0.5)  # 1/10, 2/11, ... , 8/17, then 0.5
        expected = decay * expected + (1 - decay) * value
        ema.update([torch.tensor([value])], update)
        assert ema.tensors[0].item() == pytest.approx(expected, rel=1e-6)


def test_the_first_average_is_nearly_the_first_weights():
    ema = Ema([torch.tensor([0.0])], decay=0.987)
    ema.update([torch.tensor([10.0])], 0)
    assert ema.tensors[0].item() == pytest.approx(9.0)  # 0.1 * 0 + 0.9 * 10


def test_the_decay_once_per_step_is_the_published_one_every_eighth():
    assert math.isclose(0.987**8, 0.9, abs_tol=1e-3)


def test_the_average_keeps_its_own_memory_and_no_graph():
    weights = [torch.ones(2, requires_grad=True)]
    ema = Ema(weights, decay=0.9)
    with torch.no_grad():
        weights[0].mul_(5)
    assert ema.tensors[0].tolist() == [1.0, 1.0]
    ema.update(weights, 100)
    assert ema.tensors[0].tolist() == pytest.approx([1.4, 1.4])  # 0.9 * 1 + 0.1 * 5
    assert not ema.tensors[0].requires_grad


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay):
    with pytest.raises(ValueError, match=r"ema_decay \(.*\) must be in \[0, 1\)"):
        Ema([torch.ones(1)], decay=decay)
