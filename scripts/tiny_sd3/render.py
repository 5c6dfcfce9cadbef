"""Draw words on plain signs: glyphs by Pillow, composed as one alpha mask per image."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tiny_sd3.words import COLORS, LETTERS

SIZE = 64  # pixels a side
FONT_SIZE, STROKE = 64, 1  # letters are drawn large and bold, then squeezed into their box
CELL = 16  # pixels from one letter's centre to the next: two patches of the transformer
GLYPH_WIDTH, GLYPH_HEIGHT, TOP = 13, 24, 20  # of the widest letter
LIGHT, DARK = (250, 250, 250), (15, 15, 20)


def glyphs() -> np.ndarray:
    """Render the 26 capital letters in boxes; (26, GLYPH_HEIGHT, CELL) uint8 alpha.

    All are equally high; the widest is GLYPH_WIDTH wide, the others in proportion.
    """
    font = ImageFont.load_default(FONT_SIZE)
    boxes = [font.getbbox(letter, stroke_width=STROKE) for letter in LETTERS]
    widest = max(right - left for left, _, right, _ in boxes)
    drawn = []
    for letter, (left, top, right, bottom) in zip(LETTERS, boxes, strict=True):
        large = Image.new("L", (right - left, bottom - top))
        ImageDraw.Draw(large).text((-left, -top), letter, fill=255, font=font, stroke_width=STROKE)
        width = max(4, round(GLYPH_WIDTH * ((right - left) / widest) ** 0.5))
        box = Image.new("L", (CELL, GLYPH_HEIGHT))
        box.paste(large.resize((width, GLYPH_HEIGHT)), ((CELL - width) // 2, 0))
        drawn.append(np.asarray(box))
    return np.stack(drawn)


def masks(words: list[str]) -> np.ndarray:
    """Render words at fixed spacing in the middle of the image; (n, SIZE, SIZE) uint8 alpha."""
    alphabet = glyphs()
    canvas = np.zeros((len(words), SIZE, SIZE), dtype=np.uint8)
    for length in {len(word) for word in words}:
        rows = np.array([i for i, word in enumerate(words) if len(word) == length])
        codes = np.array([[LETTERS.index(letter) for letter in words[i]] for i in rows])
        for place in range(length):
            left = (SIZE - CELL * length) // 2 + CELL * place
            canvas[rows, TOP : TOP + GLYPH_HEIGHT, left : left + CELL] = alphabet[codes[:, place]]
    return canvas


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
