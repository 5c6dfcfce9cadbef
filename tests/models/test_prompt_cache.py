"""Conditions are sliceable, and each prompt is encoded once."""

import torch
from PIL import Image

from flow_grpo.models.base import Cond
from flow_grpo.prompt_cache import PromptCache

NAMES = {(255, 0, 0): "red", (0, 0, 255): "blue"}


class Encoder:
    """Encode a prompt as its length, and remember what it was asked."""

    def __init__(self):
        self.asked, self.pictures = [], []

    def encode(self, module, prompts, images=None, *, size, negative):
        self.asked.append((*prompts, negative))
        for pictures in images or ():
            self.pictures.append(tuple(NAMES[picture.getpixel((0, 0))] for picture in pictures))
        return Cond(
            {
                "embeds": torch.tensor([[float(len(p))] * 3 for p in prompts]),
                "negative_embeds": torch.zeros(len(prompts), 3),
            }
        )


def _cache(max_size: int = 9) -> tuple[Encoder, PromptCache]:
    encoder = Encoder()
    return encoder, PromptCache(encoder, None, size=(8, 8), negative="no", max_size=max_size)


def test_a_condition_is_sliced_by_sample_with_repeats():
    cond = Cond({"a": torch.arange(6).view(3, 2), "b": torch.arange(3)})
    assert len(cond) == 3
    assert cond.index(torch.tensor([2, 0, 2]))["b"].tolist() == [2, 0, 2]
    assert cond.index(slice(1, 3))["a"].tolist() == [[2, 3], [4, 5]]
    assert cond["a"].shape == (3, 2)


def test_concatenation_undoes_slicing():
    cond = Cond({"a": torch.randn(4, 2), "b": torch.randn(4, 3, 5)})
    whole = Cond.cat([cond.index(slice(0, 1)), cond.index(slice(1, 4))])
    assert all(torch.equal(whole[name], cond[name]) for name in ("a", "b"))


def test_conditions_come_in_the_order_of_the_prompts():
    _, cache = _cache()
    cond = cache(["xxx", "x", "xxx", "xx"], "cpu")
    assert cond["embeds"][:, 0].tolist() == [3, 1, 3, 2]


def test_each_unique_prompt_is_encoded_once_and_alone():
    encoder, cache = _cache()
    cache(["a", "bb", "a"], "cpu")
    cache(["bb", "a"], "cpu")
    assert encoder.asked == [("a", "no"), ("bb", "no")]
    assert cache.num_encoded == 2


def test_the_prompt_unused_for_longest_is_dropped_first():
    encoder, cache = _cache(max_size=2)
    cache(["a", "b"], "cpu")
    cache(["a"], "cpu")
    cache(["c"], "cpu")  # drops b
    cache(["a"], "cpu")
    assert [text for text, _ in encoder.asked] == ["a", "b", "c"]
    cache(["b"], "cpu")
    assert [text for text, _ in encoder.asked] == ["a", "b", "c", "b"]


def test_a_batch_may_hold_more_prompts_than_the_cache():
    _, cache = _cache(max_size=1)
    assert cache(["a", "bb", "ccc"], "cpu")["embeds"][:, 0].tolist() == [1, 2, 3]


def test_filling_makes_room_for_everything():
    encoder, cache = _cache(max_size=1)
    cache.fill(["a", "bb"])
    cache.fill(["ccc", "a"])
    cache(["a", "bb", "ccc"], "cpu")
    assert cache.num_encoded == 3
    assert len(encoder.asked) == 3


def test_the_negative_is_kept_in_memory_once():
    _, cache = _cache()
    cache(["a", "bb", "ccc"], "cpu")
    places = {cond["negative_embeds"].data_ptr() for cond in cache._conds.values()}
    assert len(places) == 1
    assert len({cond["embeds"].data_ptr() for cond in cache._conds.values()}) == 3


def test_a_prompt_is_encoded_once_for_each_sequence_of_image_contents(tmp_path):
    encoder, cache = _cache()
    a, b, c = (tmp_path / f"{name}.png" for name in "abc")
    for path, color in ((a, "red"), (b, "red"), (c, "blue")):
        Image.new("RGB", (2, 2), color).save(path)
    cache(["x"] * 5, "cpu", [(a,), (b,), (a, c), (c, a), (b, c)])
    assert cache.num_encoded == 3
    assert encoder.pictures == [("red",), ("red", "blue"), ("blue", "red")]
    cache(["y", "x"], "cpu", [(a,), (c, b)])
    assert cache.num_encoded == 4
