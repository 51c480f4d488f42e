"""How the shipped policy was made: a tiny Qwen2.5-VL learns from a scripted, deliberately mediocre teacher.

`python bench/cold_start.py` trains it from scratch into pyvision_mini/assets, in about 25 minutes on one core.
"""
# ruff: noqa: E402

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pyvision_mini.config import Config
from pyvision_mini.images import to_rgb
from pyvision_mini.policy import EMBEDDED, Policy, fit_image, load_policy
from pyvision_mini.prompts import IM_END, TEMPLATES, observation_segments, prompt_segments
from pyvision_mini.sandbox import SandboxPool, SandboxSession
from pyvision_mini.toy import COLORS, HALF, QUADRANTS, QUARTERS, RING, clip, clip_folder, needle, stream
from pyvision_mini.trainer import Scorer, collate, micro_batches
from pyvision_mini.trajectory import Problem, Trajectory

# --- the teacher ------------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """Somewhere the teacher can look: the code, what it shows, and whether that tells the answer."""

    name: str
    code: str
    shown: Image.Image | None                    # None: the code fails
    tells: bool


@dataclass
class Scene:
    """A problem with what the teacher knows about it."""

    problem: Problem
    places: list[Place]
    guesses: list[str]
    wrong: list[str]                             # code with a mistake
    no_op: list[Place] = field(default_factory=list)
    about: str = ""                              # what the prompt says about a clip
    direct: list[Image.Image] = field(default_factory=list)  # for a prompt that shows pictures and allows no code


def image_scene(rng: np.random.Generator) -> Scene:
    problem, quadrant = needle(rng)
    image, = problem.images
    places = [Place(f"the {q}", f"image_clue_0.crop({box}).show()", image.crop(box), q == quadrant) for q, box in QUADRANTS.items()]
    wrong = [code for box in QUADRANTS.values() for code in (f"image_clue_0.crop{box}.show()", f"image.crop({box}).show()")]
    return Scene(problem, places, list(COLORS), wrong, [Place("the image", "image_clue_0.show()", image, False)])


def video_scene(rng: np.random.Generator, folder: Path | None = None) -> Scene:
    made = clip(rng, "", folder)
    at = [f"video_clue_0[len(video_clue_0) * {2 * k + 1} // 8]" for k in range(4)]
    places = [Place(QUARTERS[k], f"Image.fromarray({at[k]}.asnumpy()).show()", made.frames[k], k == made.target) for k in range(4)]
    if not made.second:
        return Scene(made.problem, places, QUARTERS, [f"{frame}.show()" for frame in at], about=made.about, direct=made.frames)
    shown, second = made.frames[made.target], made.second
    # Several times the same place: the teacher goes there about every second time.
    places += [Place(f"second {second}", f"frame_at(video_clue_0, {second}).show()", shown, True)] * 4
    return Scene(made.problem, places, list(COLORS), [f"video_clue_0.frame_at({second}).show()"], about=made.about, direct=[shown])


@dataclass
class Step:
    """One teacher turn; `code` None: the answer. `shown` None: the code fails."""

    text: str
    code: str | None = None
    shown: Image.Image | None = None


def teach(scene: Scene, rng: np.random.Generator, max_turns: int = 4) -> list[Step]:
    """A deliberately mediocre search: guesses early, repeats itself, shows what it has seen, writes wrong code.

    RL has to unlearn the guessing, the repeats and the errors; nothing it needs is missing.
    """
    steps: list[Step] = []
    looked: list[Place] = []
    while len(steps) < max_turns and rng.random() > 0.15:
        new = [place for place in scene.places if place not in looked] or scene.places
        place, draw = new[rng.integers(len(new))], rng.random()
        if draw < 0.1 and scene.no_op:
            place = scene.no_op[0]
        elif draw < 0.3 and looked:
            place = looked[rng.integers(len(looked))]
        steps.append(look_step(place))
        if rng.random() < 0.15:
            steps[-1] = look_step(replace(place, code=str(rng.choice(scene.wrong)), shown=None))
        elif place in scene.places:
            looked.append(place)
            if place.tells and rng.random() < 0.95:
                break
    knows = any(place.tells for place in looked) and rng.random() < 0.97
    return [*steps, answer_step(scene.problem.answer if knows else str(rng.choice(scene.guesses)))]


def look_step(place: Place) -> Step:
    return Step(f"Look at {place.name}.\n<code>\n```python\n{place.code}\n```\n</code>", place.code, place.shown)


def answer_step(answer: str) -> Step:
    return Step(f"<answer>\n\\boxed{{{answer}}}\n</answer>")


def direct_lesson(scene: Scene, rng: np.random.Generator, side: int = HALF) -> tuple[Problem, list[Step]]:
    """First lesson: the right picture is given, answer at once. In crops below HALF pixels the dot appears larger."""
    problem = scene.problem
    if problem.images:
        shown = next(place.shown for place in scene.places if place.tells)
        if side < HALF:
            left, top = (int(c - rng.uniform(RING + 2, side - RING - 2)) for c in problem.images[0].info["center"])
            shown = problem.images[0].crop((left, top, left + side, top + side))
        images = [shown]
    else:
        images = scene.direct
    return Problem("direct", problem.question, problem.answer, images=tuple(images)), [answer_step(problem.answer)]


def one_look_lesson(scene: Scene) -> list[Step]:
    """Second lesson: look where the answer is, then give it. Short, so that what is copied weighs much in the loss."""
    return [look_step([place for place in scene.places if place.tells][-1]), answer_step(scene.problem.answer)]


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

    def __init__(self, policy: Policy, session: SandboxSession | None = None, cfg: Config = Config()):
        self.policy, self.session, self.cfg = policy, session, cfg

    def trajectory(self, problem: Problem, steps: list[Step], about: str = "", template: str = "short") -> Trajectory:
        traj, texts = Trajectory(problem), TEMPLATES[template]
        self._observe(traj, prompt_segments(problem, texts, about), list(problem.images))
        for step in steps:
            ids = self.policy.encode([step.text] if step.code else [step.text, IM_END])
            traj.extend(ids, trained=True, logps=[0.0] * len(ids))
            if step.code:
                shown, text = ([step.shown], "") if step.shown else ([], self.session.run(step.code).text)
                self._observe(traj, observation_segments(text, len(traj.images), len(shown), texts, False), shown)
        return traj

    def _observe(self, traj: Trajectory, segments: list[str], images: list[Image.Image]) -> None:
        images = [fit_image(to_rgb(image), self.cfg.min_pixels, self.cfg.max_pixels) for image in images]
        grids = [(1, image.height // 14, image.width // 14) for image in images]
        traj.extend(self.policy.encode(segments, grids), trained=False)
        traj.images += images
        traj.grids += grids

    def backward(self, scorer: Scorer, trajs: list[Trajectory]) -> float:
        """Gradients of the mean negative log-prob of the teacher's tokens, the vision tower's too → the mean."""
        total, n_tokens = 0.0, sum(sum(traj.action_mask) for traj in trajs)
        for pairs in micro_batches([(traj, 0.0) for traj in trajs], budget=8192):
            trajs = [traj for traj, _ in pairs]
            images = [image for traj in trajs for image in traj.images]
            features = torch.zeros(0, 128)
            if images:
                pixels = self.policy.processor.image_processor(images=images, do_resize=False, return_tensors="pt")
                features = torch.cat(self.policy.model.get_image_features(
                    pixels["pixel_values"], pixels["image_grid_thw"], return_dict=True).pooler_output)
            loss = -scorer(collate(self.policy, trajs, features))[0].sum() / n_tokens
            loss.backward()
            total += loss.item()
        return total


# The two parts: steps, learning rate, share of videos. Pictures answered at once; then conversations too.
PARTS = ((600, 1.5e-3, 0.0), (600, 8e-4, 0.5))


def lesson_scene(i: int, share: float) -> Scene:
    """The i-th scene of the lessons. Never a second time: a policy learns a small set of clips by heart, and not to look."""
    rng = stream("lessons", 0, i)
    return video_scene(rng) if rng.random() < share else image_scene(rng)


def lesson_corpus(n: int = 400) -> list[str]:
    """What the tokenizer is trained on: the teacher's turns, prompts and observations."""
    texts, rng = TEMPLATES["short"], np.random.default_rng(0)
    corpus = []
    for scene in (lesson_scene(10**9 + i, 0.5) for i in range(n)):
        corpus += [*(step.text for step in teach(scene, rng)), *scene.wrong[:1]]
        corpus += [s for s in prompt_segments(scene.problem, texts, scene.about) if type(s) is str]
        corpus += [s for s in observation_segments("TypeError: AttributeError: object has no attribute NameError: name is not "
                                                   "defined", 1, 1, texts, False) if type(s) is str]
    return corpus


def train_part(lessons: Lessons, part: int, seed: int = 0) -> None:
    """Cross-entropy on the teacher's tokens, in place. Each part warms up, and cools down to zero."""
    (n_steps, peak, share), policy, started = PARTS[part], lessons.policy, time.time()
    policy.model.requires_grad_(True)
    scorer, rng = Scorer(policy, 1.0, checkpointing=False), np.random.default_rng([seed, part])
    optimizer = torch.optim.AdamW(policy.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=n_steps, pct_start=0.05)
    side, smooth = 84, 1.0
    for step in (bar := tqdm(range(n_steps), desc=f"cold start, part {part + 1} of {len(PARTS)}")):
        scenes = [lesson_scene((part * 1000 + step) * 64 + i, share) for i in range(64 if part == 0 else 32)]
        if part == 0:                            # the dot is large at first and shrinks while its colour is named
            side = min(HALF, side + 2 * (smooth < 0.12))
        n_direct, n_short = (64, 64) if part == 0 else (6, 16)
        trajs = [lessons.trajectory(*direct_lesson(scene, rng, side if part == 0 else HALF), scene.about, "direct")
                 for scene in scenes[:n_direct]]
        trajs += [lessons.trajectory(scene.problem, one_look_lesson(scene) if i < n_short else teach(scene, rng), scene.about)
                  for i, scene in enumerate(scenes) if i >= n_direct]
        optimizer.zero_grad()
        loss = lessons.backward(scorer, trajs)
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        smooth = 0.9 * smooth + 0.1 * loss
        bar.set_postfix(loss=f"{smooth:.4f}")
        if (step + 1) % 100 == 0:
            held_out = [[lesson_scene(2 * 10**9 + i, share) for i in range(96)] for share in (0.0, 1.0)]
            right = [f"{picture_accuracy(policy, lessons, scenes):.2f}" for scenes in held_out]
            tqdm.write(f"part {part + 1}, step {step + 1}: loss {smooth:.4f}, right pictures named: image {right[0]}, "
                       f"video {right[1]}, {time.time() - started:.0f} s")


def main() -> None:
    torch.set_num_threads(1)                     # the batches are too small for more
    policy = build_policy(lesson_corpus(), EMBEDDED)
    example = video_scene(stream("lessons", 1, 0), clip_folder()).problem
    with SandboxPool(workers=1) as pool:         # wrong code gets the real sandbox's answers
        session = pool.open(images=image_scene(stream("lessons", 1, 1)).problem.images, videos=example.videos)
        for part in range(len(PARTS)):
            train_part(Lessons(policy, session), part)
            policy.model.save_pretrained(EMBEDDED)
    (EMBEDDED / "model.safetensors").chmod(0o644)


@torch.no_grad()
def picture_accuracy(policy: Policy, lessons: Lessons, scenes: list[Scene]) -> float:
    """Share of scenes whose right picture, given at once, gets the right answer as the most probable of the guesses."""
    scorer, right = Scorer(policy, 1.0, checkpointing=False), 0
    for scene in scenes:
        problem, _ = direct_lesson(scene, np.random.default_rng(0))
        trajs = [lessons.trajectory(problem, [answer_step(guess)], scene.about, "direct") for guess in scene.guesses]
        shown = [seen.features for seen in policy.see(trajs[0].images, {}, 56 * 56, 112 * 112)]
        for traj in trajs:
            traj.features = shown
        logp_BT, _ = scorer(collate(policy, trajs))
        right += scene.guesses[int(logp_BT.sum(1).argmax())] == problem.answer
    return right / len(scenes)


if __name__ == "__main__":
    main()
