"""One conversion to upright RGB for every image: the prompt's, the runtime's and the ones tools return.

Imports numpy and PIL only: the sandbox child uses this file too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

MAX_ASPECT = 200  # Qwen2-VL's smart_resize refuses more


def to_rgb(image: Image.Image) -> Image.Image:
    """Any PIL image → a new upright RGB image (EXIF applied, transparency over white, deep greys scaled, not clipped)."""
    image = ImageOps.exif_transpose(image)
    if image.mode in ("F", "I") or image.mode.startswith("I;"):
        return Image.fromarray(_to_uint8(np.asarray(image), deep=image.mode.startswith("I;"))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image        # exif_transpose has copied it


def _to_uint8(pixels: np.ndarray, deep: bool) -> np.ndarray:
    """Grey levels of unknown depth → 0..255. `deep`: 16 bit for certain; else the smallest usual range that holds them."""
    pixels = np.nan_to_num(pixels.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    top = pixels.max(initial=0.0)
    is_unit = top <= 1.0 and (pixels % 1).any()
    scale = 65535.0 if deep else 1.0 if is_unit else 255.0 if top <= 255 else 65535.0 if top <= 65535 else top
    return np.round(np.clip(pixels / scale, 0, 1) * 255).astype(np.uint8)


def load_image(source: str | Path | Image.Image) -> Image.Image:
    """Path or PIL image → RGB. Raises ValueError that names the file when it cannot be read."""
    if isinstance(source, Image.Image):
        return to_rgb(source)
    try:
        with Image.open(source) as image:
            return to_rgb(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot read image {source}: {str(error)[:200]}") from None


def size_problem(width: int, height: int) -> str | None:
    """Why an image of this size cannot be shown to the model, or None."""
    if width < 1 or height < 1:
        return f"the image is empty: {width}x{height} pixels"
    if max(width, height) > MAX_ASPECT * min(width, height):
        return f"the image is too narrow: {width}x{height} pixels, its sides differ by more than {MAX_ASPECT} times"
    return None
