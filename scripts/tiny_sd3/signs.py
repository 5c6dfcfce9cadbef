"""Hold the training set on the device: masks, colours and tokenised captions of signs."""

import itertools
import random

import numpy as np
import torch
from tiny_sd3 import render, words
from torch import Tensor


def misspell(word: str, rng: random.Random, wrong_captions: float, wrong_letters: float) -> str:
    """Return what a caption says of a word: now and then another word or other letters.

    The result is again a word of the pretraining split, so that no held-out word is ever seen.
    """
    whole = rng.random() < wrong_captions
    share = 1.0 if whole else wrong_letters
    if share == 0.0:
        return word
    while True:
        letters = [rng.choice(words.LETTERS) if rng.random() < share else c for c in word]
        if words.split_of("".join(letters)) == "pretrain":
            return "".join(letters)


class Signs:
    """num images of signs and their captions; everything is drawn from the seed."""

    def __init__(self, num: int, tokenizer, device, *, seed, wrong_captions=0.0, wrong_letters=0.0):
        rng = random.Random(seed)
        written = list(itertools.islice(words.draw_words("pretrain", seed=seed), num))
        colors = np.random.default_rng(seed).integers(len(words.COLORS), size=num)
        names = list(words.COLORS)
        captions = [
            words.prompt(misspell(word, rng, wrong_captions, wrong_letters), names[color])
            for word, color in zip(written, colors, strict=True)
        ]
        self.num = num
        self.masks = torch.from_numpy(render.masks(written)).to(device)
        self.colors = torch.from_numpy(colors).to(device)
        self.palettes = torch.from_numpy(render.palettes()).to(device).float()
        self.captions = token_ids(tokenizer, captions).to(device)
        self.no_caption = token_ids(tokenizer, [""]).to(device)

    def pixels(self, rows: Tensor) -> Tensor:
        """Return images (n, 3, size, size) in [-1, 1]."""
        palette = self.palettes[self.colors[rows]]
        return render.compose(self.masks[rows].float(), palette) / 127.5 - 1.0

    def captions_of(self, rows: Tensor, dropped: Tensor) -> Tensor:
        """Return token ids (n, tokens), those of the empty prompt where dropped (n,) is true."""
        return torch.where(dropped[:, None], self.no_caption, self.captions[rows])


def token_ids(tokenizer, prompts: list[str]) -> Tensor:
    """Tokenise as StableDiffusion3Pipeline does: padded to the tokenizer's full length."""
    length = tokenizer.model_max_length
    return tokenizer(
        prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
