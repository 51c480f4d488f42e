"""The embedded task and its tiny policy: generated problems, a mediocre scripted teacher, the cold-start recipe.

Needle search, like V* in small: a 672-pixel image holds one dot whose colour is asked for. A ring of the complementary
colour around the dot makes it vanish when the image is shrunk to what the model sees (112 pixels, 16 tokens); in a crop
of one quadrant it shows. So the policy has to look, and may need up to four looks.

`python -m pyvision_mini.toy` trains the shipped checkpoint from scratch: pyvision_mini/assets.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from pyvision_mini.config import Config
from pyvision_mini.images import to_rgb
from pyvision_mini.policy import EMBEDDED, Policy, fit_image, load_policy
from pyvision_mini.prompts import IM_END, TEMPLATES, observation_segments, prompt_segments
from pyvision_mini.sandbox import SandboxPool
from pyvision_mini.trajectory import Problem, Trajectory
from pyvision_mini.trainer import Scorer, collate

SPLITS = {"train": 0, "val": 1, "test": 2}
COLORS = {"red": (228, 28, 28), "green": (28, 228, 28), "blue": (28, 28, 228),
          "cyan": (28, 228, 228), "magenta": (228, 28, 228), "yellow": (228, 228, 28)}
SIZE, HALF, DOT, RING = 672, 336, 12, 17
QUADRANTS = {"top left": (0, 0, HALF, HALF), "top right": (HALF, 0, SIZE, HALF),
             "bottom left": (0, HALF, HALF, SIZE), "bottom right": (HALF, HALF, SIZE, SIZE)}
IMAGE_QUESTION = "What color is the dot?"


@dataclass
class Needle:
    """One drawn image with what the teacher knows about it."""

    image: Image.Image   # mode P, 672×672
    color: str
    quadrant: str
    center: tuple[float, float]


def draw_needle(rng: np.random.Generator) -> Needle:
    """A grey image with a little noise and one ringed dot, wholly inside one quadrant."""
    color, quadrant = str(rng.choice(list(COLORS))), str(rng.choice(list(QUADRANTS)))
    left, top = QUADRANTS[quadrant][:2]
    x, y = rng.uniform(RING + 4, HALF - RING - 4, size=2) + (left, top)
    pixels = rng.integers(0, 4, size=(SIZE, SIZE), dtype=np.uint8)         # palette entries 0..3: four greys
    top, left = int(y) - RING - 1, int(x) - RING - 1
    rows, columns = np.ogrid[top:top + 2 * RING + 3, left:left + 2 * RING + 3]
    distance = np.hypot(rows + 0.5 - y, columns + 0.5 - x)
    around = pixels[top:top + 2 * RING + 3, left:left + 2 * RING + 3]
    around[distance < RING] = 4
    around[distance < DOT] = 5
    rgb = COLORS[color]
    palette = [v for grey in (124, 127, 129, 132) for v in (grey,) * 3] + [256 - v for v in rgb] + list(rgb)
    image = Image.fromarray(pixels, mode="P")                              # a third of the memory of RGB
    image.putpalette(palette)
    return Needle(image, color, quadrant, (x, y))


def image_problems(n: int, seed: int, split: str = "train") -> list[Problem]:
    """n problems, the same for the same (seed, split); no two splits share a seed."""
    problems = []
    for i in range(n):
        needle = draw_needle(np.random.default_rng([SPLITS[split], seed, i]))
        problems.append(Problem(f"needle-{split}-{seed}-{i}", IMAGE_QUESTION, needle.color, images=(needle.image,),
                                source="needle"))
    return problems


# --- the teacher ------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One teacher turn. `code` None: the answer. `shows`: the part of the image the code shows, None: it fails."""

    text: str
    code: str | None = None
    shows: tuple[int, int, int, int] | None = None


def _look(say: str, code: str, shows: tuple[int, int, int, int] | None = None) -> Step:
    return Step(f"{say}\n<code>\n```python\n{code}\n```\n</code>", code, shows)


def teach(needle: Needle, rng: np.random.Generator, max_turns: int = 4) -> list[Step]:
    """A deliberately mediocre search: guesses early, repeats itself, shows the whole image, writes wrong code.

    RL has to unlearn the guessing, the repeats and the errors; nothing it needs is missing.
    """
    steps, looked, found = [], [], False
    for _ in range(max_turns):
        if found or rng.random() < 0.15:
            break
        name = str(rng.choice([q for q in QUADRANTS if q not in looked] or list(QUADRANTS)))
        draw = rng.random()
        if looked and draw < 0.20:
            name = str(rng.choice(looked))
        if 0.20 <= draw < 0.30:
            steps.append(_look("Look at the image.", "image_clue_0.show()", (0, 0, SIZE, SIZE)))
            continue
        box = str(QUADRANTS[name])
        if 0.30 <= draw < 0.45:
            wrong = f"image_clue_0.crop{box}.show()" if rng.random() < 0.5 else f"image.crop({box}).show()"
            steps.append(_look(f"Look at the {name}.", wrong))
            continue
        steps.append(_look(f"Look at the {name}.", f"image_clue_0.crop({box}).show()", QUADRANTS[name]))
        looked.append(name)
        found = name == needle.quadrant and rng.random() < 0.95
    answer = needle.color if needle.quadrant in looked and rng.random() < 0.97 else str(rng.choice(list(COLORS)))
    return [*steps, Step(f"<answer>\n\\boxed{{{answer}}}\n</answer>")]


def crop_lesson(needle: Needle, rng: np.random.Generator, side: int = HALF) -> tuple[Problem, list[Step]]:
    """First lesson: a crop that holds the dot is given, name its colour. Below HALF pixels the dot appears larger."""
    box = QUADRANTS[needle.quadrant]
    if side < HALF:
        left, top = (int(c - rng.uniform(RING + 2, side - RING - 2)) for c in needle.center)
        box = (left, top, left + side, top + side)
    crop = to_rgb(needle.image).crop(box)
    return (Problem("lesson", IMAGE_QUESTION, needle.color, images=(crop,)),
            [Step(f"<answer>\n\\boxed{{{needle.color}}}\n</answer>")])


# --- the tiny model ---------------------------------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
            "<|image_pad|>", "<|video_pad|>"]


def build_policy(corpus: list[str], folder: Path, seed: int = 0, vocab_size: int = 512) -> Policy:
    """A Qwen2.5-VL of about one million random weights with a BPE of the corpus, written to and loaded from `folder`."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor, Qwen2Tokenizer,
                              Qwen2VLImageProcessor, Qwen2VLVideoProcessor)

    blank = Qwen2Tokenizer()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(SPECIALS), special_tokens=[], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe = blank.backend_tokenizer
    bpe.train_from_iterator(corpus, trainer)
    model_json = json.loads(bpe.to_str())["model"]
    vocab = {token: i for i, token in enumerate(sorted(model_json["vocab"], key=model_json["vocab"].get))}
    vocab |= {token: len(vocab) + i for i, token in enumerate(SPECIALS)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[tuple(m) for m in model_json["merges"]],
                               additional_special_tokens=SPECIALS)
    token = tokenizer.convert_tokens_to_ids
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=token("<|im_end|>"),
                         hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
                         initializer_range=0.06, tie_word_embeddings=True,
                         rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 6, 6])),
        vision_config=dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=128,
                           window_size=112, fullatt_block_indexes=[1], initializer_range=0.06),
        bos_token_id=None, eos_token_id=token("<|im_end|>"), pad_token_id=token("<|endoftext|>"),
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True))
    processor = Qwen2_5_VLProcessor(image_processor=Qwen2VLImageProcessor(), tokenizer=tokenizer,
                                    video_processor=Qwen2VLVideoProcessor(), chat_template=CHAT_TEMPLATE)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return load_policy(folder)


# --- the recipe -------------------------------------------------------------------------------------------------------


class Lessons:
    """Teacher conversations as trajectories whose action mask is what the teacher wrote."""

    def __init__(self, policy: Policy, pool: SandboxPool | None, cfg: Config):
        self.policy, self.cfg, self.pool = policy, cfg, pool
        self.template = TEMPLATES[cfg.template]
        self.errors: dict[str, str] = {}         # wrong code → what the real sandbox answers

    def trajectory(self, problem: Problem, steps: list[Step]) -> Trajectory:
        image = to_rgb(problem.images[0])
        traj = Trajectory(problem)
        self._observe(traj, prompt_segments(problem, self.template), [image])
        for step in steps:
            ids = self.policy.encode([step.text] if step.code else [step.text, IM_END])
            traj.extend(ids, trained=True, logps=[0.0] * len(ids))
            if step.code:
                shown = [image.crop(step.shows)] if step.shows else []
                text = "" if step.shows else self._error(step.code, image)
                self._observe(traj, observation_segments(text, len(traj.images), len(shown), self.template, False), shown)
        return traj

    def _observe(self, traj: Trajectory, segments: list[str], images: list[Image.Image]) -> None:
        images = [fit_image(image, self.cfg.min_pixels, self.cfg.max_pixels) for image in images]
        grids = [(1, image.height // 14, image.width // 14) for image in images]
        traj.extend(self.policy.encode(segments, grids), trained=False)
        traj.images += images
        traj.grids += grids

    def _error(self, code: str, image: Image.Image) -> str:
        if code not in self.errors:
            session = self.pool.open(images=[image])
            self.errors[code] = session.run(code).text
            session.close()
        return self.errors[code]


def _loss(policy: Policy, scorer: Scorer, trajs: list[Trajectory]) -> torch.Tensor:
    """Mean negative log-prob of the teacher's tokens, with gradients into the vision tower."""
    images = [image for traj in trajs for image in traj.images]
    pixels = policy.processor.image_processor(images=images, do_resize=False, return_tensors="pt")
    features = policy.model.get_image_features(pixels["pixel_values"], pixels["image_grid_thw"], return_dict=True)
    batch = collate(policy, trajs, torch.cat(features.pooler_output))
    logp_BT, _ = scorer(batch)
    return -logp_BT.sum() / batch.action_BT.sum()


@torch.no_grad()
def crop_accuracy(policy: Policy, lessons: Lessons, n: int = 192, seed: int = 7) -> float:
    """Share of held-out right crops whose colour gets the highest probability of the six."""
    scorer, right = Scorer(policy, 1.0, checkpointing=False), 0
    needles = [draw_needle(np.random.default_rng([SPLITS["test"], seed, i])) for i in range(n)]
    for needle in needles:
        trajs = []
        for color in COLORS:
            problem, steps = crop_lesson(needle, np.random.default_rng(0))
            trajs.append(lessons.trajectory(problem, [Step(steps[0].text.replace(needle.color, color))]))
        pixels = policy.processor.image_processor(images=trajs[0].images, do_resize=False, return_tensors="pt")
        f = policy.model.get_image_features(pixels["pixel_values"], pixels["image_grid_thw"], return_dict=True)
        logp_BT, _ = scorer(collate(policy, trajs, torch.cat(f.pooler_output * len(trajs))))
        right += list(COLORS)[int(logp_BT.sum(1).argmax())] == needle.color
    return right / n
