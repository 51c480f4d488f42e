"""What multi-turn rollouts cost: ours, beside a full recompute of the history every turn, TRL, and the decode floor.

Every variant writes the same episodes: 4 problems × 8 rollouts, a number of tool turns that each return an image of its
own, then an answer. The tokens are forced by a logits processor and asserted to be equal, images and their tokens
included; the tool is a plain crop in this process, so that only the rollout itself is timed.
- ours       pyvision_mini.rollout.rollout
- recompute  a plain loop over HF generate: the whole history, all its images, every turn
- trl        GRPOTrainer._generate: its multi-turn loop (transformers generation, environment_factory); scoring left out
- floor      the forward passes of ours with nothing around them: vision tower, prefill, decode steps, head

    pip install -r requirements.txt -r bench/requirements.txt
    OMP_NUM_THREADS=1 python bench/rollout.py | tee docs/logs/rollout.txt        # writes docs/logs/rollout.jsonl too
    OMP_NUM_THREADS=1 python bench/rollout.py profile | tee docs/logs/rollout_profile.txt      # of ours, 3 turns, 16 tokens an image
"""

import cProfile
import json
import os
import platform
import pstats
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import GenerationConfig, LogitsProcessor  # noqa: E402

from pyvision_mini.config import Config  # noqa: E402
from pyvision_mini.policy import Policy, fit_image, load_policy  # noqa: E402
from pyvision_mini.prompts import IM_END, TEMPLATES, observation_segments, prompt_segments  # noqa: E402
from pyvision_mini.rollout import _empty_cache, _History, rollout  # noqa: E402
from pyvision_mini.sandbox import SandboxPool  # noqa: E402
from pyvision_mini.trajectory import Group, Problem, ToolResult  # noqa: E402

PHOTO = Image.effect_noise((672, 672), 60).convert("RGB")
# Renders what our segments say; TRL refuses templates that leave the call or its arguments out.
CHAT_TEMPLATE = """{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}\
{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n",
    "fields": {"tool_calls": {
        "open": "```python\n", "close_pattern": r"```\s*", "repeats": True, "content": "text",
        "transform": {"type": "function", "function": {"name": "python", "arguments": {"code": "{content}"}}}},
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}}}


def load(vocabulary: int = 0) -> Policy:
    """The embedded policy, on request with more ids than it has words for: always the same weights."""
    policy = load_policy()
    if vocabulary:
        torch.manual_seed(0)
        policy.model.resize_token_embeddings(vocabulary, mean_resizing=False)
    return policy


class Episodes:
    """What is forced: `turns[t][i]` are the ids row i writes in turn t. Lengths differ by row, alike in every turn."""

    def __init__(self, n_problems: int, group: int, n_turns: int, image_tokens: int, vocabulary: int = 0):
        self.policy, self.vocabulary, pixels = load(vocabulary), vocabulary, image_tokens * 784
        self.problems = [Problem(str(k), "What color is the dot?", "red", images=(PHOTO.rotate(90 * k),))
                         for k in range(n_problems)]
        self.n_problems, self.group, self.n_rows = n_problems, group, n_problems * group
        self.cfg = Config(group_size=max(2, group), max_turns=n_turns, min_pixels=pixels, max_pixels=pixels, max_images=99,
                          max_prompt_tokens=10**6, max_turn_tokens=256, max_response_tokens=10**6)
        self.turns = [[self.policy.encode([self._text(turn, i), IM_END]) for i in range(self.n_rows)]
                      for turn in range(n_turns + 1)]
        self.n_sampled = sum(len(ids) for turn in self.turns for ids in turn)
        self.force(self.policy)

    def _text(self, turn: int, i: int) -> str:
        if turn == self.cfg.max_turns:
            return "<answer>\n\\boxed{red}\n</answer>"
        k = turn * self.n_rows + i               # no image is seen twice: ours would encode it once
        x, y = 100 + k % 236, 100 + k // 236
        thought = "I look at the top left. " * ((i + 5 * turn) % self.n_rows * 4 // self.n_rows)
        return f"{thought}\n```python\nimage_clue_0.crop(({x}, {y}, {x + 336}, {y + 336})).show()\n```"

    def force(self, policy: Policy) -> None:
        """Make policy.model.generate write these episodes, whoever calls it."""
        policy.model.generate = partial(self._generate, policy.model.generate)

    def _generate(self, generate, *args, logits_processor=(), **kwargs):
        if self.rows is None:                    # a turn of all rows
            texts = self.turns[len(self.starts)]
            places = [(len(self.starts), i) for i in range(len(texts))]
        else:                                    # ours samples rows together that are in different turns
            places = [(len(row.traj.turns), self.order.setdefault(id(row), len(self.order))) for row in self.rows]
            texts = [self.turns[turn][i][row.n_written:] for (turn, i), row in zip(places, self.rows)]
        self.starts.append((time.perf_counter(), ATTENTION[0]))
        width, end = max(map(len, texts)), self.policy.stop_ids[0]
        forced = Forced(torch.tensor([ids + [end] * (width - len(ids)) for ids in texts]))
        out = generate(*args, logits_processor=[*logits_processor, forced], **kwargs)
        self.shares.append(Counter(turn for (turn, _), ids in zip(places, texts) for _ in ids[:forced.n_steps]))
        return out

    @contextmanager
    def timed(self):
        """Around one run → `times`: all of it, and each turn from its generate to the next one's, attention by itself.

        A generate of rows in different turns counts for each by its share of the tokens sampled.
        """
        self.starts, self.shares, self.rows, self.order = [], [], None, {}
        started, cpu = time.perf_counter(), time.process_time()
        yield
        ends = [*self.starts[1:], (time.perf_counter(), ATTENTION[0])]
        turns = {f"{kind}_{k}": 0.0 for kind in ("turn", "attention") for k in range(1, len(self.turns) + 1)}
        for begin, end, shares in zip(self.starts, ends, self.shares):
            for turn, n in shares.items():
                for i, kind in enumerate(("turn", "attention")):
                    turns[f"{kind}_{turn + 1}"] += (end[i] - begin[i]) * n / sum(shares.values())
        self.times = {"seconds": ends[-1][0] - started, "cpu": time.process_time() - cpu, **turns}


ATTENTION, _attention = [0.0], F.scaled_dot_product_attention


def timed_attention(*args, **kwargs) -> torch.Tensor:
    """What every model here calls instead of scaled_dot_product_attention: it adds up the seconds."""
    started = time.perf_counter()
    out = _attention(*args, **kwargs)
    ATTENTION[0] += time.perf_counter() - started
    return out


class Forced(LogitsProcessor):
    """Leaves one token per row and step."""

    def __init__(self, ids_BN: torch.Tensor):
        self.columns, self.n_steps = ids_BN.split(1, dim=1), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.n_steps += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, self.columns[self.n_steps - 1], 0.0)


# --- the tool, and the variants ----------------------------------------------------------------------------------------


class Cropper:
    """The sandbox's interface without a sandbox: one session a rollout, its code is always a crop."""

    def open(self, images: list[Image.Image], videos: tuple = ()) -> "Cropper":
        session = Cropper()
        session.image = images[0]
        return session

    def run(self, code: str) -> ToolResult:
        box = re.search(r"crop\(\((\d+), (\d+), (\d+), (\d+)\)\)", code).groups()
        return ToolResult("ok", images=[self.image.crop(tuple(map(int, box)))])

    def close(self) -> None:
        pass


def sample(episodes: Episodes, pool=Cropper()) -> list[Group]:
    generate = _History.generate

    def noted(history: _History, rows: list, *args) -> None:
        episodes.rows = rows
        generate(history, rows, *args)

    with episodes.timed(), patch.object(_History, "generate", noted):
        return rollout(episodes.policy, episodes.problems, episodes.cfg, pool, n_samples=episodes.group)


def ours(episodes: Episodes, pool=Cropper()) -> list[list[int]]:
    return [traj.ids for group in sample(episodes, pool) for traj in group.trajectories]


@torch.no_grad()
def recompute(episodes: Episodes) -> list[list[int]]:
    """Nothing is kept between turns: ids are padded anew and every image goes through the vision tower again."""
    policy, cfg, texts = episodes.policy, episodes.cfg, TEMPLATES[episodes.cfg.template]
    processor, model = policy.processor.image_processor, policy.model.eval()
    fit = partial(fit_image, min_pixels=cfg.min_pixels, max_pixels=cfg.max_pixels)
    config = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, eos_token_id=list(policy.stop_ids), max_new_tokens=256,
                              pad_token_id=policy.stop_ids[1])
    with episodes.timed():
        problems = [problem for problem in episodes.problems for _ in range(episodes.group)]
        sessions = [Cropper().open(problem.images) for problem in problems]
        images = [[fit(problem.images[0])] for problem in problems]
        grid = [(1, images[0][0].height // 14, images[0][0].width // 14)]
        rows = [policy.encode(prompt_segments(problem, texts), grid) for problem in problems]
        for turn in range(cfg.max_turns + 1):
            width = max(map(len, rows))
            ids_BT = torch.tensor([[policy.stop_ids[1]] * (width - len(ids)) + ids for ids in rows])
            mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows])
            pixels = processor(images=[image for seen in images for image in seen], do_resize=False, return_tensors="pt")
            new_BN = model.generate(input_ids=ids_BT, attention_mask=mask_BT, generation_config=config,
                                    mm_token_type_ids=(ids_BT == policy.image_id).int(), **pixels)[:, width:]
            for ids, session, seen, new in zip(rows, sessions, images, new_BN.tolist()):
                ids += new[:new.index(policy.stop_ids[0]) + 1]
                if turn < cfg.max_turns:
                    seen.append(fit(session.run(policy.decode(new)).images[0]))
                    ids += policy.encode(observation_segments("", len(seen) - 1, 1, texts, closed=True), grid)
    return rows


class Environment:
    """The same tool as TRL wants it: public methods are tools, an image comes inside a content list."""

    def reset(self, original: Image.Image, cfg: Config, **row) -> None:
        self._session, self._cfg, self._n = Cropper().open([original]), cfg, 0

    def python(self, code: str) -> list:
        """Run code.

        Args:
            code: Python.
        """
        self._n += 1
        image = fit_image(self._session.run(code).images[0], self._cfg.min_pixels, self._cfg.max_pixels)
        tag = f"image_clue_{self._n}>"
        return [{"type": "text", "text": f"<interpreter>\n<{tag}"}, {"type": "image", "image": image},
                {"type": "text", "text": f"</{tag}\n</interpreter>"}]


class Trainer(trl.GRPOTrainer):
    """GRPOTrainer on a model of its own, made to write the same episodes. Its rollout is _generate: that is timed."""

    def __init__(self, episodes: Episodes, folder: str, **args):
        self.episodes, self.policy, n = episodes, load(episodes.vocabulary), episodes.n_rows
        processor, tokenizer, cfg = self.policy.processor, self.policy.tokenizer, episodes.cfg
        self.policy.model.config.text_config.max_position_embeddings = 10**6     # TRL takes it as a limit; RoPE has none
        processor.chat_template = tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.response_template, tokenizer.eos_token = RESPONSE_TEMPLATE, IM_END
        user = [{"type": "text", "text": "<image_clue_0>"}, {"type": "image"},
                {"type": "text", "text": f"</image_clue_0>\n{episodes.problems[0].question}"}]
        prompt = [{"role": "system", "content": TEMPLATES[cfg.template].system}, {"role": "user", "content": user}]
        self.inputs = [{"prompt": prompt, "images": [fit_image(problem.images[0], cfg.min_pixels, cfg.max_pixels)], "cfg": cfg,
                        "original": problem.images[0]} for problem in episodes.problems for _ in range(episodes.group)]
        args = {"per_device_train_batch_size": n, "generation_batch_size": n, "num_generations": episodes.group} | args
        super().__init__(
            self.policy.model, lambda **_: [float(i % 3 == 0) for i in range(n)], processing_class=processor,
            args=trl.GRPOConfig(folder, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, scale_rewards="none",
                                max_completion_length=10**5, **args),
            train_dataset=Dataset.from_list([{"prompt": "not used"}] * n), environment_factory=Environment)
        episodes.force(self.policy)

    def _generate(self, prompts: list):
        with self.episodes.timed():
            result = super()._generate(prompts)
        self.rows = [prompt + completion for prompt, completion in zip(*result[:2])]
        return result

    def run(self) -> list[list[int]]:
        self._generate_and_score_completions(self.inputs)
        return self.rows


# --- prefill tokens, the floor, the tables -----------------------------------------------------------------------------


def recorded(policy: Policy, run: Callable) -> tuple[list[list[int]], list[tuple]]:
    """One run → its rows, and what its model and its vision tower were called with, the columns cached before included."""
    calls: list[tuple] = []

    def note(module, args, kwargs) -> None:
        calls.append((module, args, kwargs, kwargs["cache"].get_seq_length() if kwargs.get("cache") else 0))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True)
             for module in (policy.model.model, policy.model.model.visual)]
    rows = run()
    for hook in hooks:
        hook.remove()
    return rows, calls


def columns(call: tuple) -> tuple[int, int]:
    """Rows and new columns of a call of the language model; (0, 0) of the vision tower."""
    return tuple(call[2]["input_ids"].shape) if "input_ids" in call[2] else (0, 0)


@torch.no_grad()
def floor(episodes: Episodes, calls: list[tuple]) -> dict[str, float]:
    """The forward passes of ours once more, with nothing around them → seconds of vision, prefill, decode."""
    model = episodes.policy.model.eval()
    cache = _empty_cache(episodes.policy)
    seconds, B = {"vision": 0.0, "prefill": 0.0, "decode": 0.0}, 0
    for module, args, kwargs, T in calls:
        n_rows, n_new = columns((module, args, kwargs))
        if T and (n_rows, T) != (B, cache.get_seq_length()):     # the group's copies of a prompt; a new turn, without holes
            for layer in cache.layers:
                layer.pick(torch.arange(n_rows) * B // n_rows, torch.arange(T).expand(n_rows, -1))
        B = n_rows or B
        started = time.perf_counter()
        if n_new:
            model.lm_head(module(**kwargs | {"cache": cache}).last_hidden_state[:, -1:])
        else:
            module(*args, **kwargs)
        seconds["decode" if n_new == 1 else "prefill" if n_new else "vision"] += time.perf_counter() - started
    return seconds


def compare(n_problems: int, group: int, n_turns: int, image_tokens: int, repeats: int, log) -> dict[str, dict]:
    """Every variant once to check its tokens, then `repeats` times in turn → medians by variant, printed and logged."""
    episodes = Episodes(n_problems, group, n_turns, image_tokens)
    with tempfile.TemporaryDirectory() as folder, SandboxPool() as pool:
        variants = {name: (episodes.policy, partial(run, episodes)) for name, run in (("ours", ours), ("recompute", recompute))}
        if group > 1:                            # TRL refuses a group of one
            trainer = Trainer(episodes, folder)
            variants["trl"] = trainer.policy, trainer.run
        if n_turns == 3:
            variants["ours+sandbox"] = episodes.policy, partial(ours, episodes, pool)
        expected, calls = recorded(*variants["ours"])
        found = {"floor": {"prefill_tokens": sum(b * n for b, n in map(columns, calls) if n > 1)}}
        for name, (policy, run) in variants.items():
            rows, seen = recorded(policy, run)
            assert rows == expected, f"{name} wrote other tokens than ours"
            found[name] = {"prefill_tokens": sum(b * n for b, n in map(columns, seen) if n > 1)}
        samples: dict[str, list[dict]] = {name: [] for name in found}
        for _ in range(repeats):
            for name in found:
                if name == "floor":
                    parts = floor(episodes, calls)
                    samples[name].append({"seconds": sum(parts.values()), **parts})
                else:
                    variants[name][1]()
                    samples[name].append(episodes.times)
    setting = f"{n_problems} problems x {group} rollouts, {n_turns} tool turns, {image_tokens} tokens an image"
    print(f"\n{setting}: {episodes.n_sampled} sampled tokens, median of {repeats}", flush=True)
    for name, runs in samples.items():
        result = found[name] | {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        result["tokens_per_s"] = episodes.n_sampled / result["seconds"]
        found[name] = result
        log.write(json.dumps({"setting": setting, "variant": name} | {k: round(v, 4) for k, v in result.items()}) + "\n")
    for name, r in found.items():
        turns = {kind: " ".join(f"{r[key]:.2f}" for key in r if key.startswith(kind)) for kind in ("turn", "attention")}
        parts = ("vision {vision:.2f}, prefill {prefill:.2f}, decode {decode:.2f}" if name == "floor" else
                 "turns {0[turn]} (attention {0[attention]})").format(turns, **r)
        print(f"  {name:<13}{r['tokens_per_s']:7.0f} tok/s {r['seconds']:7.2f} s {r['prefill_tokens']:8d} prefilled   {parts}", flush=True)
    ratios = {name: r["seconds"] / found["ours"]["seconds"] for name, r in found.items()}
    print("  seconds, ours = 1: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), flush=True)
    return found


def machine() -> str:
    return (f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, trl {trl.__version__}, 1 thread, fp32, embedded policy")


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    F.scaled_dot_product_attention = timed_attention
    print(machine())
    settings = [(4, 8, n, 16, 5) for n in (3, 8, 1)] + [(4, g, 3, 16, 3) for g in (1, 16)]
    settings += [(4, 8, 3, 64, 3), (4, 8, 8, 64, 3), (1, 8, 3, 256, 3), (1, 8, 3, 1024, 3)]
    with (Path(__file__).parent.parent / "docs/logs/rollout.jsonl").open("w") as log:
        for setting in settings:
            compare(*setting, log)


def profile() -> None:
    torch.set_num_threads(1)
    episodes = Episodes(4, 8, 3, 16)
    ours(episodes)
    with cProfile.Profile() as profiler:
        ours(episodes)
    stats = pstats.Stats(profiler).strip_dirs()
    stats.sort_stats("cumulative").print_stats(r"generate|_sample|_prefill|Qwen2_5_VL|modeling_qwen2_5_vl.py:\d+\(forward\)|_call_impl|"
                                               r"multinomial|logits_process|rollout|policy|resize|softmax|cat\}", 45)


if __name__ == "__main__":
    profile() if sys.argv[1:] == ["profile"] else main()
