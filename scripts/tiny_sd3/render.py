"""Draw words on plain signs: glyphs by Pillow, composed as one alpha mask per image."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tiny_sd3.words import COLORS, LETTERS

SIZE = 64  # pixels a side
FONT_SIZE = 16
CELL = 12  # pixels from one letter's centre to the next
GLYPH_WIDTH, GLYPH_HEIGHT, TOP = 18, 24, 20
LIGHT, DARK = (250, 250, 250), (15, 15, 20)


def glyphs() -> np.ndarray:
    """Render the 26 capital letters, each centred; (26, GLYPH_HEIGHT, GLYPH_WIDTH) uint8 alpha."""
    font = ImageFont.load_default(FONT_SIZE)
    drawn = []
    for letter in LETTERS:
        image = Image.new("L", (GLYPH_WIDTH, GLYPH_HEIGHT))
        ImageDraw.Draw(image).text(
            (GLYPH_WIDTH / 2, GLYPH_HEIGHT / 2), letter, fill=255, font=font, anchor="mm"
        )
        drawn.append(np.asarray(image))
    return np.stack(drawn)


def masks(words: list[str]) -> np.ndarray:
    """Render words at fixed spacing in the middle of the image; (n, SIZE, SIZE) uint8 alpha."""
    alphabet = glyphs()
    canvas = np.zeros((len(words), SIZE, SIZE + 2 * GLYPH_WIDTH), dtype=np.uint8)
    for length in {len(word) for word in words}:
        rows = np.array([i for i, word in enumerate(words) if len(word) == length])
        codes = np.array([[LETTERS.index(letter) for letter in words[i]] for i in rows])
        for place in range(length):
            center = SIZE // 2 + CELL * place - CELL * (length - 1) // 2
            left = GLYPH_WIDTH + center - GLYPH_WIDTH // 2
            area = np.s_[rows, TOP : TOP + GLYPH_HEIGHT, left : left + GLYPH_WIDTH]
            canvas[area] = np.maximum(canvas[area], alphabet[codes[:, place]])
    return canvas[:, :, GLYPH_WIDTH:-GLYPH_WIDTH]


def palettes() -> np.ndarray:
    """Return (background, text) of every colour; (len(COLORS), 2, 3) uint8. Text contrasts."""
    pairs = []
    for background in COLORS.values():
        luminance = np.dot(background, (0.299, 0.587, 0.114))
        pairs.append((background, DARK if luminance > 128 else LIGHT))
    return np.array(pairs, dtype=np.uint8)


def compose(mask, palette):
    """Blend text over background.

    mask (n, h, w) and palette (n, 2, 3) are numpy or torch floats; (n, 3, h, w); all in 0..255.
    """
    alpha = mask[:, None] / 255.0
    background, text = palette[:, 0, :, None, None], palette[:, 1, :, None, None]
    return background + (text - background) * alpha
