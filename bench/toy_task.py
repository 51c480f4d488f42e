"""Is the embedded image task what it should be? Four measurements; `python bench/toy_task.py | tee docs/logs/toy_task.txt`.

1. A model like the policy, trained from scratch to name the dot's colour on the overview alone: near chance (1/6).
2. The shipped policy on the right crop: at least 97 %.
3. Tokens per image: 16.
4. Held-out accuracy against the number of tool turns allowed, of --model (a checkpoint after RL): it grows.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from cold_start import Lessons, Scene, answer_step, image_scene, picture_accuracy
from tqdm import tqdm
from transformers import Qwen2_5_VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pyvision_mini.config import Config
from pyvision_mini.policy import Policy, load_policy
from pyvision_mini.report import trajectory_row
from pyvision_mini.rollout import mix_seed
from pyvision_mini.sandbox import SandboxPool
from pyvision_mini.toy import COLORS, image_problems
from pyvision_mini.trainer import Scorer, evaluate


def overview_only(scene: Scene) -> Scene:
    """The scene as if the overview were the picture that tells the answer."""
    image = scene.problem.images[0]
    return replace(scene, places=[replace(scene.places[0], shown=image, tells=True)])


def train_on_overviews(steps: int, batch: int = 64, seed: int = 0) -> float:
    """Held-out accuracy of a fresh model after `steps` batches, with the cold start's optimizer and schedule."""
    shipped = load_policy()
    torch.manual_seed(seed)
    policy = Policy(Qwen2_5_VLForConditionalGeneration(shipped.model.config), shipped.processor)
    policy.model.requires_grad_(True)
    lessons, scorer = Lessons(policy), Scorer(policy, 1.0, checkpointing=False)
    optimizer = torch.optim.AdamW(policy.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, total_steps=steps, pct_start=0.05)
    for step in tqdm(range(steps), desc="overview"):
        scenes = [image_scene(np.random.default_rng([40, seed, step, i])) for i in range(batch)]
        optimizer.zero_grad()
        lessons.backward(scorer, [lessons.trajectory(s.problem, [answer_step(s.problem.answer)], template="direct")
                                  for s in scenes])
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return picture_accuracy(policy, lessons, [overview_only(image_scene(np.random.default_rng([41, seed, i])))
                                              for i in range(300)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="batches of 64 overviews for the first measurement")
    parser.add_argument("--model", default="", help="checkpoint for the last measurement; empty: the shipped policy")
    args = parser.parse_args()
    steps = args.steps
    torch.set_num_threads(1)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread")
    policy = load_policy()
    lessons = Lessons(policy)
    scenes = [image_scene(np.random.default_rng([42, i])) for i in range(300)]
    crop = picture_accuracy(policy, lessons, scenes)
    print(f"shipped policy, right crop given, 300 images: {crop:.3f}")
    print(f"shipped policy, overview given, 300 images: {picture_accuracy(policy, lessons, [overview_only(s) for s in scenes]):.3f}")
    grids = {seen.grid for s in scenes[:20] for seen in policy.see(
        [s.problem.images[0].convert("RGB"), s.places[0].shown.convert("RGB")], {}, 56 * 56, 112 * 112)}
    print(f"tokens per image: {sorted(t * h * w // 4 for t, h, w in grids)}")
    trained, held_out = load_policy(args.model), image_problems(200, 0, "val")
    with SandboxPool(workers=1) as pool:
        for turns in range(5):
            cfg = replace(Config(), max_turns=turns)
            groups = evaluate(trained, held_out, cfg, pool, mix_seed(0), tick=lambda kind, n: None)
            rows = [trajectory_row(group.trajectories[0]) for group in groups]
            print(f"{args.model or 'shipped policy'}, at most {turns} tool turns: accuracy "
                  f"{np.mean([row['accuracy'] for row in rows]):.3f}, {np.mean([row['calls'] for row in rows]):.2f} calls")
    print(f"from scratch on the overview alone, {steps * 64} images, 300 held out: {train_on_overviews(steps):.3f} "
          f"(chance {1 / len(COLORS):.3f})")


if __name__ == "__main__":
    main()
