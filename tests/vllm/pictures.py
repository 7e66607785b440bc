"""A picture, as models of these tests see it, and as a client of a server sends it."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

PIXELS = 32


def picture() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 255, (PIXELS, PIXELS, 3), np.uint8)
    return Image.fromarray(noise)


def picture_url() -> str:
    """The picture itself, as a URL."""
    file = io.BytesIO()
    picture().save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
