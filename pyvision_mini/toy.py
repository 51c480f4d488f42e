"""The embedded tasks and their tiny policy: generated problems, a mediocre scripted teacher, the cold-start recipe.

Image: needle search, like V* in small. A 672-pixel image holds one dot whose colour is asked for. A ring of the
complementary colour makes the dot average out when the image is shrunk to what the model sees (112 pixels, 16 tokens); in a
crop of one quadrant it shows. So the policy has to look, and may need up to four looks.
Video: a short clip of which the prompt shows nothing. Either the dot shows in one quarter of the frames and the question
is in which, so searching pays; or its colour changes every quarter and the question names a second, so one look is enough.

`python -m pyvision_mini.toy` trains the shipped checkpoint from scratch into pyvision_mini/assets.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from pyvision_mini.config import Config
from pyvision_mini.images import to_rgb
from pyvision_mini.policy import EMBEDDED, Policy, fit_image, load_policy
from pyvision_mini.prompts import IM_END, TEMPLATES, describe_video, observation_segments, prompt_segments
from pyvision_mini.sandbox import SandboxPool, SandboxSession
from pyvision_mini.trainer import Scorer, collate, micro_batches
from pyvision_mini.trajectory import Problem, Trajectory

SPLITS = {"train": 0, "val": 1, "test": 2, "lessons": 3}
COLORS = {"red": (228, 28, 28), "green": (28, 228, 28), "blue": (28, 28, 228),
          "cyan": (28, 228, 228), "magenta": (228, 28, 228), "yellow": (228, 228, 28)}
QUARTERS = ["quarter 1", "quarter 2", "quarter 3", "quarter 4"]
SIZE, HALF, DOT, RING = 672, 336, 10, 14         # pixels of the image, its quadrants, the dot's and the ring's radius
QUADRANTS = {"top left": (0, 0, HALF, HALF), "top right": (HALF, 0, SIZE, HALF),
             "bottom left": (0, HALF, HALF, SIZE), "bottom right": (HALF, HALF, SIZE, SIZE)}
FRAME, SHRINK = 224, 1.5                         # a clip's frame shows the dot as a quadrant does: 336 / 224


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


def image_scene(rng: np.random.Generator, name: str = "") -> Scene:
    """One needle image; the dot lies wholly inside one quadrant."""
    color, quadrant = str(rng.choice(list(COLORS))), str(rng.choice(list(QUADRANTS)))
    image, = _draw(rng, SIZE, 1.0, [color], QUADRANTS[quadrant][:2], HALF)
    problem = Problem(name, "What color is the dot?", color, images=(image,), source="needle")
    places = [Place(f"the {q}", f"image_clue_0.crop({box}).show()", image.crop(box), q == quadrant) for q, box in QUADRANTS.items()]
    wrong = [code for box in QUADRANTS.values() for code in (f"image_clue_0.crop{box}.show()", f"image.crop({box}).show()")]
    return Scene(problem, places, list(COLORS), wrong, [Place("the image", "image_clue_0.show()", image, False)])


def video_scene(rng: np.random.Generator, name: str, folder: Path | None) -> Scene:
    """One clip (16 to 64 frames, 8 to 30 a second, a third of them with a variable frame rate), written once to `folder`.

    The lessons need no file: None, and the videos are left out.
    """
    n, fps = int(rng.integers(4, 17)) * 4, float(rng.uniform(8, 30))
    steps = np.full(n, 1000 / fps) * (rng.uniform(0.3, 1.7, size=n) if rng.random() < 1 / 3 else 1)
    starts = np.concatenate([[0], steps.cumsum()[:-1]]).round().astype(int)  # milliseconds
    when, target = rng.random() < 0.5, int(rng.integers(4))
    colors = [str(c) for c in rng.permutation(list(COLORS))[:4]]
    dots = colors if when else [colors[0] if k == target else None for k in range(4)]
    frames = [to_rgb(image) for image in _draw(rng, FRAME, SHRINK, dots, (0, 0), FRAME)]
    videos = [] if folder is None else [folder / f"{hashlib.sha1(name.encode()).hexdigest()[:16]}.mp4"]  # it says nothing
    for path in videos:
        if not path.is_file():
            _write_clip(path, [frames[4 * i // n] for i in range(n)], starts)
    at = [f"video_clue_0[len(video_clue_0) * {2 * k + 1} // 8]" for k in range(4)]
    places = [Place(QUARTERS[k], f"Image.fromarray({at[k]}.asnumpy()).show()", frames[k], k == target) for k in range(4)]
    question, answer, guesses = "In which quarter of the video is the dot?", QUARTERS[target], QUARTERS
    wrong = [f"{frame}.show()" for frame in at]
    if when:
        second = f"{starts[n * (2 * target + 1) // 8] / 1000 + 0.02:.2f}"
        question, answer, guesses = f"What color is the dot at second {second}?", dots[target], list(COLORS)
        # Several times the same place: the teacher goes there about every second time.
        places += [Place(f"second {second}", f"frame_at(video_clue_0, {second}).show()", frames[target], True)] * 4
        wrong = [f"video_clue_0.frame_at({second}).show()"]
    average = n / ((starts[-1] + steps[-1]) / 1000)
    return Scene(Problem(name, question, answer, videos=tuple(videos), source="when" if when else "quarter"), places, guesses,
                 wrong, about=describe_video(0, n / average, n, average, FRAME, FRAME),
                 direct=[frames[target]] if when else frames)


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


def _rng(split: str, seed: int, i: int) -> np.random.Generator:
    return np.random.default_rng([SPLITS[split], seed, i])   # no two splits share a stream


def image_problems(n: int, seed: int, split: str = "train") -> list[Problem]:
    """n problems, the same for the same (seed, split)."""
    return [image_scene(_rng(split, seed, i), f"needle-{split}-{seed}-{i}").problem for i in range(n)]


def video_problems(n: int, seed: int, split: str = "train") -> list[Problem]:
    """n problems, the same for the same (seed, split); their clips are kept in the temporary folder."""
    folder = clip_folder()
    return [video_scene(_rng(split, seed, i), f"clip-{split}-{seed}-{i}", folder).problem for i in tqdm(
        range(n), desc="clips", leave=False)]


def clip_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"pyvision_mini_clips_{os.getuid()}"
    folder.mkdir(mode=0o755, exist_ok=True)
    return folder


# --- the teacher ------------------------------------------------------------------------------------------------------


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
    rng = _rng("lessons", 0, i)
    return video_scene(rng, "", None) if rng.random() < share else image_scene(rng)


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
    """Train the shipped checkpoint from scratch: about 25 minutes on one core."""
    torch.set_num_threads(1)                     # the batches are too small for more
    policy = build_policy(lesson_corpus(), EMBEDDED)
    example = video_scene(_rng("lessons", 1, 0), "example", clip_folder()).problem
    with SandboxPool(workers=1) as pool:         # wrong code gets the real sandbox's answers
        session = pool.open(images=image_scene(_rng("lessons", 1, 1)).problem.images, videos=example.videos)
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
