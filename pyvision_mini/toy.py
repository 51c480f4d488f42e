"""The embedded tasks: generated problems, the same for the same seed.

Image: needle search, like V* in small. A 672-pixel image holds one dot whose colour is asked for. With a ring of the
complementary colour around it the mean is grey, and shrunk to what the model sees (112 pixels, 16 tokens) both are a
few pixels wide, too little for a policy this small; in a crop of one quadrant the dot shows. So it has to look, up to four times.
Video: a short clip of which the prompt shows nothing. Either the dot shows in one quarter of the frames and the question
is in which, so searching pays; or its colour changes every quarter and the question names a second, so one look is enough.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from pyvision_mini.images import to_rgb
from pyvision_mini.prompts import describe_video
from pyvision_mini.trajectory import Problem

SPLITS = {"train": 0, "val": 1, "test": 2, "lessons": 3}
COLORS = {"red": (228, 28, 28), "green": (28, 228, 28), "blue": (28, 28, 228),
          "cyan": (28, 228, 228), "magenta": (228, 28, 228), "yellow": (228, 228, 28)}
QUARTERS = ["quarter 1", "quarter 2", "quarter 3", "quarter 4"]
SIZE, HALF, DOT, RING = 672, 336, 10, 14         # pixels of the image, its quadrants, the dot's and the ring's radius
QUADRANTS = {"top left": (0, 0, HALF, HALF), "top right": (HALF, 0, SIZE, HALF),
             "bottom left": (0, HALF, HALF, SIZE), "bottom right": (HALF, HALF, SIZE, SIZE)}
FRAME, SHRINK = 224, 1.5                         # a clip's frame shows the dot as a quadrant does: 336 / 224


@dataclass
class Clip:
    """A problem with a video, and what a teacher has to know about it (bench/cold_start.py)."""

    problem: Problem
    frames: list[Image.Image]        # what is on screen in each quarter
    target: int                      # the quarter that is asked for
    second: str                      # the second that the question names, "" if it asks in which quarter
    about: str                       # what the prompt says about the video


def _draw(rng: np.random.Generator, size: int, scale: float, dots: list[str | None], corner: tuple[int, int],
          side: int) -> list[Image.Image]:
    """Grey images that share their noise, one per entry of `dots`: a ringed dot of that colour, or none, at one place."""
    radius, ring = DOT / scale, RING / scale
    noise = rng.integers(0, 4, size=(size, size), dtype=np.uint8)          # palette entries 0..3: four greys
    x, y = rng.uniform(ring + 4, side - ring - 4, size=2) + corner
    rows, columns = np.ogrid[int(y - ring):int(y + ring) + 2, int(x - ring):int(x + ring) + 2]
    distance = np.hypot(rows + 0.5 - y, columns + 0.5 - x)
    images = []
    for dot in dots:
        pixels = noise.copy()
        rgb = COLORS.get(dot, (128, 128, 128))
        if dot:
            around = pixels[int(y - ring):int(y + ring) + 2, int(x - ring):int(x + ring) + 2]
            around[distance < ring], around[distance < radius] = 4, 5
        image = Image.fromarray(pixels, mode="P")                          # a third of the memory of RGB
        image.putpalette([v for grey in (124, 127, 129, 132) for v in (grey,) * 3] + [256 - v for v in rgb] + list(rgb))
        image.info["center"] = (x, y)
        images.append(image)
    return images


def needle(rng: np.random.Generator, name: str = "") -> tuple[Problem, str]:
    """One needle image, and the quadrant that the dot lies wholly inside of."""
    color, quadrant = str(rng.choice(list(COLORS))), str(rng.choice(list(QUADRANTS)))
    image, = _draw(rng, SIZE, 1.0, [color], QUADRANTS[quadrant][:2], HALF)
    return Problem(name, "What color is the dot?", color, images=(image,), source="needle"), quadrant


def clip(rng: np.random.Generator, name: str, folder: Path | None) -> Clip:
    """16 to 64 frames, 8 to 30 a second, a third of the clips with a variable frame rate, written once to `folder`.

    The lessons need no file: None, and the videos are left out.
    """
    n, fps = int(rng.integers(4, 17)) * 4, float(rng.uniform(8, 30))
    steps = np.full(n, 1000 / fps) * (rng.uniform(0.3, 1.7, size=n) if rng.random() < 1 / 3 else 1)
    starts = np.concatenate([[0], steps.cumsum()[:-1]]).round().astype(int)  # milliseconds
    when, target = rng.random() < 0.5, int(rng.integers(4))
    colors = [str(c) for c in rng.permutation(list(COLORS))[:4]]
    dots = colors if when else [colors[0] if k == target else None for k in range(4)]
    frames = [to_rgb(image) for image in _draw(rng, FRAME, SHRINK, dots, (0, 0), FRAME)]
    videos = []
    if folder is not None:
        content = b"".join([starts.tobytes(), *(frame.tobytes() for frame in frames)])
        path = folder / f"{hashlib.sha1(content).hexdigest()[:16]}.mp4"    # a name that tells nobody anything
        videos = [path]
        if not path.is_file():
            _write_clip(path, [frames[4 * i // n] for i in range(n)], starts)
    seconds = (starts[-1] + steps[-1]) / 1000
    second = f"{starts[n * (2 * target + 1) // 8] / 1000 + 0.02:.2f}" if when else ""
    question = f"What color is the dot at second {second}?" if when else "In which quarter of the video is the dot?"
    problem = Problem(name, question, dots[target] if when else QUARTERS[target], videos=tuple(videos),
                      source="when" if when else "quarter")
    return Clip(problem, frames, target, second, describe_video(0, seconds, n, n / seconds, FRAME, FRAME))


def _write_clip(path: Path, frames: list[Image.Image], starts: np.ndarray) -> None:
    """H.264 with a time stamp per frame; complete under its name at once, also when several ranks write it."""
    import av

    partial = path.with_suffix(f".{os.getpid()}.mp4")
    with av.open(str(partial), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"crf": "18", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        stream.codec_context.time_base = stream.time_base = milliseconds = Fraction(1, 1000)
        for image, start in zip(frames, starts):
            frame = av.VideoFrame.from_image(image)
            frame.pts, frame.time_base = int(start), milliseconds
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    partial.replace(path)


def stream(split: str, seed: int, i: int) -> np.random.Generator:
    """What the i-th problem is drawn with."""
    return np.random.default_rng([SPLITS[split], seed, i])   # no two splits share a stream


def image_problems(n: int, seed: int, split: str = "train") -> list[Problem]:
    """n problems, the same for the same (seed, split)."""
    return [needle(stream(split, seed, i), f"needle-{split}-{seed}-{i}")[0] for i in range(n)]


def video_problems(n: int, seed: int, split: str = "train") -> list[Problem]:
    """n problems, the same for the same (seed, split); their clips are kept in the temporary folder."""
    folder = clip_folder()
    return [clip(stream(split, seed, i), f"clip-{split}-{seed}-{i}", folder).problem for i in tqdm(
        range(n), desc="clips", leave=False)]


def clip_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"pyvision_mini_clips_{os.getuid()}"
    folder.mkdir(mode=0o755, exist_ok=True)
    return folder
