"""A policy: a Qwen2.5-VL checkpoint with its processor, and the four things rollout and update both need from it.

Ids from segments, images as the model sees them, features of the frozen vision tower, and M-RoPE positions.
Axes: L tokens of one row, P patches, D hidden width. One image of t·h·w patches is t·h·w/4 tokens.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from qwen_vl_utils.vision_process import smart_resize
from safetensors import SafetensorError
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

from pyvision_mini.config import UserError
from pyvision_mini.prompts import END_OF_TEXT, IM_END, IMAGE, SUPPRESSED, Control

disable_progress_bar()  # of loading and saving weights: ours are enough
EMBEDDED = Path(__file__).parent / "assets"
PATCH = 28  # pixels per image token: 14-pixel patches, merged 2×2


@dataclass(frozen=True)
class SeenImage:
    """An image as the model sees it."""

    image: Image.Image
    grid: tuple[int, int, int]      # (t, h, w) in patches
    features: torch.Tensor          # [t·h·w/4, D]
    digest: bytes                   # of the pixels: equal images are encoded once


class Policy:
    """Model, processor and tokenizer. Raises UserError when the folder lacks a control token of the family."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, processor):
        self.model, self.processor, self.tokenizer = model, processor, processor.tokenizer
        # The vision tower stays frozen, as in the authors' release: its features are computed once, at rollout.
        model.model.visual.requires_grad_(False)
        self.image_id = self.control_id(IMAGE)
        self.suppressed = tuple(self.control_id(c) for c in SUPPRESSED)
        self.stop_ids = (self.control_id(IM_END), self.control_id(END_OF_TEXT))
        # Remembered: of an observation only what was printed is new.
        self._encode = lru_cache(256)(partial(self.tokenizer.encode, add_special_tokens=False, split_special_tokens=True))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def control_id(self, control: Control) -> int:
        token = self.tokenizer.convert_tokens_to_ids(str(control))
        if token is None or self.tokenizer.convert_ids_to_tokens(token) != control:
            raise UserError(f"the tokenizer has no {control} token: --model must be a Qwen2.5-VL checkpoint folder")
        return token

    @cached_property
    def closing_ids(self) -> set[int]:
        """Ids whose text contains '>': only these can complete a `</code>`, so only rows that end in one are decoded."""
        texts = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        return {i for i, text in enumerate(texts) if ">" in text} - set(self.stop_ids)

    def encode(self, segments: list[str], grids: list[tuple[int, int, int]] = ()) -> list[int]:
        """Segments → ids. Plain text never yields a control id; each IMAGE takes the next grid's number of pads."""
        ids, text, grids = [], "", iter(grids)
        for segment in [*segments, None]:
            if segment is not None and not isinstance(segment, Control):
                text += segment                      # joined first: token borders are those of the chat template
                continue
            if text:
                ids += self._encode(text)
                text = ""
            if segment == IMAGE:
                t, h, w = next(grids)
                ids += [self.image_id] * (t * h * w // 4)
            elif segment is not None:
                ids.append(self.control_id(segment))
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @torch.no_grad()
    def see(self, images: list[Image.Image], seen: dict[bytes, SeenImage], min_pixels: int,
            max_pixels: int) -> list[SeenImage]:
        """RGB images → what the model sees, new ones encoded in one forward; `seen` is extended."""
        fitted = [fit_image(image, min_pixels, max_pixels) for image in images]
        digests = [hashlib.sha1(repr(image.size).encode() + image.tobytes()).digest() for image in fitted]
        new = {d: image for d, image in zip(digests, fitted) if d not in seen}
        if new:
            batch = self.processor.image_processor(images=list(new.values()), do_resize=False, return_tensors="pt")
            grid = batch["image_grid_thw"].to(self.device)
            features = self.model.get_image_features(batch["pixel_values"].to(self.device), grid, return_dict=True)
            for (d, image), g, f in zip(new.items(), grid.tolist(), features.pooler_output):
                seen[d] = SeenImage(image, tuple(g), f, d)
        return [seen[d] for d in digests]


def sampling_logits(logits_NV: torch.Tensor, temperature: float, suppressed: tuple[int, ...],
                    give_up: bool = False) -> torch.Tensor:
    """The fp32 logits that tokens are drawn from: divided by the temperature, suppressed ids at −inf.

    `give_up`: the caller needs logits_NV no more, which saves a copy. The suppressed ids' gradient, 0 in any function of
    the distribution, is left to what comes after.
    """
    out_NV = logits_NV.float()
    if temperature != 1.0:
        out_NV = out_NV / temperature
    if len(suppressed):
        if out_NV is logits_NV and not give_up:
            out_NV = out_NV.clone()
        with torch.no_grad():
            out_NV.index_fill_(-1, torch.tensor(suppressed, device=out_NV.device), -torch.inf)
    return out_NV


def fit_image(image: Image.Image, min_pixels: int, max_pixels: int) -> Image.Image:
    """Scale to multiples of 28 pixels within the pixel limits, as the family's processor would (idempotent)."""
    sides = smart_resize(image.height, image.width, factor=PATCH, min_pixels=min_pixels, max_pixels=max_pixels)
    short = max(PATCH, min(sides))               # of thin images it makes a side of 0, or more pixels than allowed
    long = min(max(sides), max_pixels // short // PATCH * PATCH)
    size = (long, short) if image.width > image.height else (short, long)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def mrope_positions(ids: list[int], grids: list[tuple[int, int, int]], image_id: int) -> np.ndarray:
    """Token row → int64 [3, L] positions in time, height and width (Qwen2-VL, arXiv 2409.12191, section 2.1).

    Text advances all three by one a token. An image's tokens share one time and spread over height and width; the
    text after it goes on from the largest of the three.
    """
    row, is_image = np.empty((3, len(ids)), dtype=np.int64), np.asarray(ids) == image_id
    start, position, grids = 0, 0, iter(grids)
    while start < len(ids):
        if is_image[start]:
            t, h, w = next(grids)
            h, w = h // 2, w // 2
            end = start + t * h * w
            row[:, start:end] = np.indices((t, h, w)).reshape(3, -1) + position
            position += max(h, w)
        else:
            following = is_image[start:].argmax()
            end = start + following if following else len(ids)
            row[:, start:end] = np.arange(position, position + end - start)
            position += end - start
        start = end
    return row


def load_policy(path: str | Path | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Policy:
    """Load a checkpoint folder (None: the embedded tiny policy). Raises UserError if it is no Qwen2.5-VL."""
    path = Path(path or EMBEDDED)
    if not path.is_dir():
        raise UserError(f"--model {path}: no such folder; download a checkpoint first (hf download Qwen/Qwen2.5-VL-3B-"
                        "Instruct --local-dir DIR) and give its folder")
    try:
        kind = json.loads((path / "config.json").read_text()).get("model_type")
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: no readable config.json there ({error.__class__.__name__})") from None
    if kind != "qwen2_5_vl":
        raise UserError(f"--model {path}: its model_type is {kind!r}; only Qwen2.5-VL checkpoints (qwen2_5_vl) work")
    try:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=dtype, attn_implementation="sdpa",
                                                                   local_files_only=True)
        processor = AutoProcessor.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"--model {path}: cannot be loaded: {str(error).splitlines()[0][:200]}") from None
    return Policy(model.to(device), processor)
