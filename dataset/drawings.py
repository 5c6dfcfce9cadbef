"""Draw scenes of equal objects with simple shapes: the pictures that counting_edit changes."""

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw

SIZE = 256  # height and width, pixels
FINER = 4  # drawn so many times larger, then averaged

# Of each class: what is drawn in a square from (0, 0), top left, to (1, 1), in order. "body" is the
# colour of the scene's objects. Curves are (left, top, right, bottom); arcs start at 3 o'clock,
# clockwise, degrees; widths are parts of the square.
CLASSES = {
    "apple": (
        ("line", (0.50, 0.28, 0.56, 0.06), "#5b3a1e", 0.05),
        ("polygon", (0.56, 0.16, 0.70, 0.04, 0.84, 0.10, 0.70, 0.20), "#3f8f3a"),
        ("ellipse", (0.08, 0.22, 0.62, 0.96), "body"),
        ("ellipse", (0.38, 0.22, 0.92, 0.96), "body"),
        ("ellipse", (0.18, 0.34, 0.32, 0.52), "#ffffff"),
    ),
    "banana": (
        ("arc", (0.06, -0.42, 0.94, 0.86), "body", 0.22, 20, 165),
        ("rectangle", (0.84, 0.36, 0.94, 0.46), "#5b3a1e"),
    ),
    "boat": (
        ("rectangle", (0.46, 0.06, 0.52, 0.66), "#5b3a1e"),
        ("polygon", (0.56, 0.10, 0.92, 0.58, 0.56, 0.58), "#ffffff"),
        ("polygon", (0.42, 0.18, 0.42, 0.58, 0.14, 0.58), "#ffffff"),
        ("polygon", (0.04, 0.66, 0.96, 0.66, 0.80, 0.92, 0.20, 0.92), "body"),
    ),
    "book": (
        ("rectangle", (0.14, 0.06, 0.88, 0.94), "#ffffff"),
        ("rectangle", (0.08, 0.04, 0.80, 0.92), "body"),
        ("rectangle", (0.08, 0.04, 0.18, 0.92), "#333333"),
        ("rectangle", (0.30, 0.22, 0.68, 0.30), "#ffffff"),
        ("rectangle", (0.30, 0.38, 0.58, 0.44), "#ffffff"),
    ),
    "bottle": (
        ("rectangle", (0.42, 0.08, 0.58, 0.36), "body"),
        ("rectangle", (0.40, 0.02, 0.60, 0.10), "#333333"),
        ("ellipse", (0.28, 0.26, 0.72, 0.58), "body"),
        ("rectangle", (0.28, 0.42, 0.72, 0.98), "body"),
        ("rectangle", (0.28, 0.56, 0.72, 0.80), "#ffffff"),
    ),
    "carrot": (
        ("line", (0.50, 0.30, 0.28, 0.04), "#3f8f3a", 0.07),
        ("line", (0.50, 0.30, 0.50, 0.02), "#3f8f3a", 0.07),
        ("line", (0.50, 0.30, 0.72, 0.04), "#3f8f3a", 0.07),
        ("ellipse", (0.30, 0.22, 0.70, 0.46), "body"),
        ("polygon", (0.30, 0.34, 0.70, 0.34, 0.50, 0.98), "body"),
        ("line", (0.36, 0.48, 0.52, 0.48), "#8a4b12", 0.02),
        ("line", (0.46, 0.64, 0.56, 0.64), "#8a4b12", 0.02),
    ),
    "clock": (
        ("ellipse", (0.04, 0.04, 0.96, 0.96), "body"),
        ("ellipse", (0.12, 0.12, 0.88, 0.88), "#ffffff"),
        ("line", (0.50, 0.50, 0.50, 0.20), "#333333", 0.05),
        ("line", (0.50, 0.50, 0.70, 0.62), "#333333", 0.06),
        ("ellipse", (0.45, 0.45, 0.55, 0.55), "#333333"),
    ),
    "cup": (
        ("arc", (0.56, 0.30, 0.98, 0.74), "body", 0.08, 0, 360),
        ("polygon", (0.08, 0.14, 0.76, 0.14, 0.66, 0.92, 0.18, 0.92), "body"),
        ("ellipse", (0.08, 0.06, 0.76, 0.22), "#333333"),
    ),
    "donut": (
        ("arc", (0.04, 0.06, 0.96, 0.98), "#b9783f", 0.32, 0, 360),
        ("arc", (0.08, 0.06, 0.92, 0.90), "body", 0.24, 0, 360),
        ("line", (0.18, 0.40, 0.26, 0.32), "#ffffff", 0.04),
        ("line", (0.46, 0.16, 0.56, 0.18), "#ffffff", 0.04),
        ("line", (0.74, 0.34, 0.82, 0.44), "#ffffff", 0.04),
        ("line", (0.40, 0.80, 0.52, 0.76), "#ffffff", 0.04),
    ),
    "kite": (
        ("line", (0.50, 0.70, 0.40, 0.82, 0.58, 0.90, 0.46, 0.99), "#333333", 0.03),
        ("polygon", (0.50, 0.02, 0.86, 0.30, 0.50, 0.74, 0.14, 0.30), "body"),
        ("polygon", (0.50, 0.02, 0.86, 0.30, 0.50, 0.30), "#ffffff"),
        ("polygon", (0.14, 0.30, 0.50, 0.30, 0.50, 0.74), "#ffffff"),
    ),
    "stop sign": (
        ("rectangle", (0.46, 0.60, 0.54, 1.00), "#777777"),
        (
            "polygon",
            (0.34, 0.02, 0.66, 0.02, 0.88, 0.24, 0.88, 0.50, 0.66, 0.72, 0.34, 0.72, 0.12, 0.50)
            + (0.12, 0.24),
            "#c4201d",
        ),
        ("rectangle", (0.22, 0.30, 0.78, 0.44), "#ffffff"),
    ),
    "umbrella": (
        ("line", (0.50, 0.04, 0.50, 0.86), "#333333", 0.04),
        ("arc", (0.34, 0.76, 0.52, 0.96), "#333333", 0.04, 0, 180),
        ("pieslice", (0.02, 0.06, 0.98, 1.02), "body", 180, 360),
        ("pieslice", (0.34, 0.06, 0.66, 1.02), "#ffffff", 180, 360),
    ),
}
BODIES = {"apple": ("#c4201d", "#6aa935"), "banana": ("#f2cf2f",), "carrot": ("#ee7d1e",)}
OTHER_BODIES = ("#2f6fb5", "#c2452d", "#2f8f6b", "#7d4aa8", "#d98c1f")
GROUNDS = ("#dfe8ee", "#f1e4cf", "#d9ead3", "#ead9e6", "#cfd8dc")
CELLS = [(column, row) for row in range(3) for column in range(3)]


def scene(noun: str, count: int, draw) -> Image.Image:
    """Draw `count` objects of one class, each in a cell of its own, in drawn colours and places.

    draw: has the methods of generate.Draw.
    """
    ground, body = draw.one(GROUNDS), draw.one(BODIES.get(noun, OTHER_BODIES))
    image = Image.new("RGB", (SIZE * FINER, SIZE * FINER), ground)
    pen, cell = ImageDraw.Draw(image), SIZE * FINER // 3
    for column, row in draw.some(CELLS, count):
        side = cell * (70 + draw.index(25)) // 100
        left, top = (cell * at + draw.index(cell - side) for at in (column, row))
        for shape in CLASSES[noun]:
            _paint(pen, shape, left, top, side, body)
    return image.reduce(FINER)


def png(image: Image.Image) -> bytes:
    """Return an image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def same_picture(one: bytes, other: bytes) -> bool:
    """Say whether two files hold the same pixels, however they are compressed."""
    try:
        first, second = (Image.open(io.BytesIO(data)).convert("RGB") for data in (one, other))
    except (OSError, SyntaxError):
        return False
    return first.size == second.size and first.tobytes() == second.tobytes()


def _paint(pen, shape: Sequence, left: int, top: int, side: int, body: str) -> None:
    """Draw one entry of CLASSES into the square at (left, top)."""
    kind, places, color, *numbers = shape
    points = [round(place * side) + (left, top)[i % 2] for i, place in enumerate(places)]
    fill = body if color == "body" else color
    if kind == "arc":
        width, start, end = numbers
        pen.arc(points, start, end, fill=fill, width=round(width * side))
    elif kind == "pieslice":
        pen.pieslice(points, *numbers, fill=fill)
    elif kind == "line":
        pen.line(points, fill=fill, width=round(numbers[0] * side))
    else:
        getattr(pen, kind)(points, fill=fill)
