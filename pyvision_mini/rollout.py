"""Problems → Groups of sampled trajectories: HF `generate` with one KV cache for the whole trajectory, then the sandbox.

The prompt is computed once per problem and its cache shared by the group. In each later turn only what is new (the
last sampled token, the observation) is computed. Where a few rows write far longer than the others, `generate` returns
before they have ended: the others' code runs, and they begin their next turn beside the ones still writing.
Axes: B rows of the batch, T columns of the history (cache included), N newest columns, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from transformers import Cache, DynamicLayer, GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import is_flash_attn_2_available

from pyvision_mini.config import Config
from pyvision_mini.images import load_image
from pyvision_mini.policy import Policy, SeenImage, mrope_positions, sampling_logits
from pyvision_mini.prompts import (CODE_STOP, TEMPLATES, describe_video, observation_segments, parse_action,
                                   prompt_segments)
from pyvision_mini.sandbox import SandboxError, SandboxPool, SandboxSession
from pyvision_mini.trajectory import EndReason, Group, Problem, ToolResult, Trajectory, Turn

CALL_THREADS = 32  # calls in flight; the pool's slots decide how many of them run at once
WAIT_STEPS = 16    # decode steps that computing a turn's observations and starting `generate` anew are taken to cost
CODE_STOP_TOKENS = 8  # hold any "</code>", which has 7 bytes, and what one token may bring after it


def mix_seed(*parts: int) -> int:
    """One 63-bit seed from several numbers, e.g. (seed, step, round, rank). Zeros at the end change nothing."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass
class _Row:
    """A live trajectory with what it needs to go on."""

    traj: Trajectory
    originals: list[Image.Image]             # full resolution, for the runtime
    given: set[bytes]                        # digests of the prompt's images as the model sees them
    session: SandboxSession | None = None
    pos_3L: np.ndarray = field(default_factory=lambda: np.zeros((3, 0), dtype=np.int64))    # M-RoPE positions
    n_new: int = 1                           # its last tokens that are not in the cache
    n_written: int = 0                       # tokens sampled so far of the turn it is writing
    stopped: bool | None = None              # how that turn ended: by a stop or by its limit; None: it goes on
    seconds: float = 0.0                     # generation time of that turn

    def extend(self, policy: Policy, ids: list[int], images: list[SeenImage] = (), logps: list[float] | None = None) -> None:
        """Append sampled tokens (with their log-probs) or observed ones (with their images) and their positions."""
        traj = self.traj
        traj.extend(ids, trained=logps is not None, logps=logps)
        traj.images += [image.image for image in images]
        traj.grids += [image.grid for image in images]
        traj.features += [image.features for image in images]
        traj.n_image_tokens += ids.count(policy.image_id)
        start = self.pos_3L.max() + 1 if self.pos_3L.size else 0
        pos_3N = mrope_positions(ids, [image.grid for image in images], policy.image_id) + start
        self.pos_3L = np.concatenate([self.pos_3L, pos_3N], axis=1)

    def end(self, reason: EndReason) -> None:
        self.traj.end = reason
        if self.session is not None:
            with suppress(SandboxError):         # it is gone already
                self.session.close()
            self.session = None


def describe(problem: Problem, pool: SandboxPool) -> str | None:
    """Fill `problem.about` with what the prompt says of its videos → why one cannot be read, or None.

    Clips are opened in the sandbox only, under its time limit: a broken or hanging file costs one skipped row.
    """
    if problem.about or not problem.videos:
        return None
    try:
        with closing(pool.open(videos=problem.videos)) as session:
            clips = [_measure(session, problem, k) for k in range(len(problem.videos))]
    except (ValueError, SandboxError) as error:
        return str(error)
    problem.about = "; ".join(describe_video(k, *clip) for k, clip in enumerate(clips))
    return None


def _measure(session: SandboxSession, problem: Problem, k: int) -> tuple[float, int, float, int, int]:
    """(seconds, frames, frames per second, width, height) of a clip. Raises ValueError that names the file."""
    result = session.run(f"v = video_clue_{k}; print(v.get_frame_timestamp(len(v) - 1)[1], len(v), *v[0].shape[:2])")
    try:
        seconds, n_frames, height, width = map(float, result.text.split())
        return seconds, int(n_frames), n_frames / seconds, int(width), int(height)
    except (ValueError, ZeroDivisionError):
        why = (result.text.strip().splitlines() or ["no frames"])[-1][:200]
        raise ValueError(f"cannot read video {problem.videos[k]}: {why}") from None


def frame_indices(n_frames: int, n: int) -> list[int]:
    """At most n sorted, evenly spread, different indices into a clip of n_frames, the first and the last included."""
    return sorted({round(i) for i in np.linspace(0, n_frames - 1, min(max(n, 1), n_frames)).tolist()})


def with_uniform_frames(problem: Problem, pool: SandboxPool, n: int = 0, fps: float = 0.0) -> Problem:
    """The baseline's problem: evenly sampled frames in the prompt instead of the videos. Give n, or frames per second.

    A clip that cannot be read leaves the problem as it is: the rollout fails on it, too, and says why. Sampled by our own
    sandbox, not by qwen-vl-utils: that refuses clips of one frame, and reads in the trainer, where a hanging file hangs
    the run.
    """
    frames: list[Image.Image] = []
    try:
        with closing(pool.open(videos=problem.videos)) as session:
            for k in range(len(problem.videos)):
                seconds, n_frames, *_ = _measure(session, problem, k)
                indices = frame_indices(n_frames, n or round(seconds * fps))
                for i in range(0, len(indices), 4):
                    code = f"for i in {indices[i:i + 4]}: Image.fromarray(video_clue_{k}[i].asnumpy()).show()"
                    result = session.run(code)
                    if result.status != "ok":
                        return problem
                    frames += result.images
    except (ValueError, SandboxError):
        return problem
    return replace(problem, images=(*problem.images, *frames), videos=(), about="")


def rollout(policy: Policy, problems: list[Problem], cfg: Config, pool: SandboxPool, seed: int = 0,
            n_samples: int | None = None, tick: Callable[[str, float], None] = lambda kind, n: None) -> list[Group]:
    """Sample `n_samples` (default cfg.group_size) trajectories per problem; rewards are not set yet.

    Reproducible for a seed, and leaves the global RNG, the model's mode and its generation config as they were.
    `tick(kind, n)` reports progress as it happens: "trajectories" ended, sandbox "calls" done, "tokens" sampled, and
    seconds spent in "generate" and "sandbox". What it raises ends the rollout.
    """
    n_samples = n_samples or cfg.group_size
    groups = [Group(problem, []) for problem in problems]
    jobs = [group for group in groups for _ in range(n_samples)]
    devices = [policy.device] if policy.device.type == "cuda" else []
    seen: dict[bytes, SeenImage] = {}
    with torch.random.fork_rng(devices), torch.no_grad(), _sampling(policy, cfg):
        torch.manual_seed(seed)
        for start in range(0, len(jobs), cfg.rollout_rows):
            batch = jobs[start:start + cfg.rollout_rows]
            rows = _open_rows(policy, batch, cfg, pool, seen)
            tick("trajectories", sum(row.traj.end is not None for row in rows))
            try:
                _run_batch(policy, [row for row in rows if row.traj.end is None], cfg, pool, seen, tick)
            finally:
                for row in rows:
                    row.end(row.traj.end)
            for group, row in zip(batch, rows):
                group.trajectories.append(row.traj)
    return groups


@contextmanager
def _sampling(policy: Policy, cfg: Config):
    """Eval mode, and a generation config that says everything: generate fills unset fields from the checkpoint's."""
    model = policy.model
    before = model.training, model.generation_config
    model.eval()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=cfg.top_k, top_p=1.0, repetition_penalty=1.0, num_beams=1, use_cache=True,
        pad_token_id=policy.stop_ids[1], eos_token_id=list(policy.stop_ids), return_dict_in_generate=True)
    try:
        yield
    finally:
        model.train(before[0])
        model.generation_config = before[1]


def _open_rows(policy: Policy, batch: list[Group], cfg: Config, pool: SandboxPool,
               seen: dict[bytes, SeenImage]) -> list[_Row]:
    """One row per entry of `batch`; prompts that break a limit end here, whole and untouched, unreadable ones empty."""
    rows, prompts = [], {}
    for group in batch:
        if id(group) not in prompts:
            try:
                if reason := describe(group.problem, pool):
                    raise ValueError(reason)
                originals = [load_image(image) for image in group.problem.images]
                images = policy.see(originals, seen, cfg.min_pixels, cfg.max_pixels)
                segments = prompt_segments(group.problem, TEMPLATES[cfg.template], group.problem.about)
                ids = policy.encode(segments, [image.grid for image in images])
                why = ""
            except (OSError, ValueError) as error:
                originals, images, ids, why = [], [], [], str(error)
            prompts[id(group)] = originals, images, ids, why
        originals, images, ids, why = prompts[id(group)]
        rows.append(_Row(Trajectory(group.problem, n_prompt=len(ids), failure=why), originals,
                         {image.digest for image in images}))
        rows[-1].extend(policy, ids, images)
        if not ids:
            rows[-1].end(EndReason.TOOL_FAILURE)
        elif len(ids) > cfg.max_prompt_tokens or len(images) > cfg.max_images:
            rows[-1].end(EndReason.PROMPT_TOO_LONG)
    return rows


def _run_batch(policy: Policy, rows: list[_Row], cfg: Config, pool: SandboxPool, seen: dict[bytes, SeenImage],
               tick: Callable[[str, float], None]) -> None:
    """All turns of the rows: generate, act, observe, drop the finished rows, go on with the same cache."""
    history = _History(policy, rows) if rows else None
    while rows:
        started = time.perf_counter()
        history.generate(rows, cfg, tick)
        seconds = time.perf_counter() - started
        tick("generate", seconds)
        for row in rows:
            row.seconds += seconds
        calls = [row for row in rows if row.stopped is not None and _act(policy, row, cfg.max_turns)]
        with ThreadPoolExecutor(max_workers=CALL_THREADS) as threads:
            for _ in threads.map(lambda row: _call(row, pool), calls):
                tick("calls", 1)
        tick("sandbox", time.perf_counter() - started - seconds)
        _observe(policy, calls, cfg, seen)
        n_live, rows = len(rows), [row for row in rows if row.traj.end is None]
        tick("trajectories", n_live - len(rows))


def _act(policy: Policy, row: _Row, max_turns: int) -> bool:
    """Close the turn that was sampled and say whether its code is to be run; any other turn ends the trajectory."""
    text = policy.decode(row.traj.ids[-row.n_written:])
    action = parse_action(text)
    row.traj.turns.append(Turn(text, action.kind, action.content, n_tokens=row.n_written, seconds=row.seconds))
    if not row.stopped:                          # cut by its token limit: whatever it holds is not what was meant
        row.end(EndReason.TOO_LONG)
    elif action.kind == "answer":
        row.end(EndReason.ANSWERED)
    elif action.kind == "none":
        row.end(EndReason.NO_ACTION)
    elif len(row.traj.turns) > max_turns:
        row.end(EndReason.OUT_OF_TURNS)
    row.n_written, row.seconds = 0, 0.0
    return row.traj.end is None


def _call(row: _Row, pool: SandboxPool) -> None:
    """Run the turn's code in the row's own runtime, opened at its first call."""
    turn = row.traj.turns[-1]
    try:
        if row.session is None:
            row.session = pool.open(images=row.originals, videos=row.traj.problem.videos)
        turn.result = row.session.run(turn.content)
    except SandboxError as error:                # ours, not the model's: never trained on
        turn.result = ToolResult("killed", f"sandbox failure: {error}")
        row.traj.failure = str(error)
        row.end(EndReason.TOOL_FAILURE)


def _observe(policy: Policy, rows: list[_Row], cfg: Config, seen: dict[bytes, SeenImage]) -> None:
    """Turn results into observation ids, or end the trajectory when they do not fit: never a part of an image."""
    rows = [row for row in rows if row.traj.end is None]
    results = [row.traj.turns[-1].result for row in rows]
    # One forward for all new images of the turn; rows that looked at the same place share the features.
    flat = policy.see([image for result in results for image in result.images], seen, cfg.min_pixels, cfg.max_pixels)
    for row, result in zip(rows, results):
        images, flat = flat[:len(result.images)], flat[len(result.images):]
        traj, turn = row.traj, row.traj.turns[-1]
        turn.no_op = bool(images) and not result.text.strip() and all(image.digest in row.given for image in images)
        closed = traj.ids[-1] == policy.stop_ids[0]
        segments = observation_segments(result.text, len(traj.images), len(images), TEMPLATES[cfg.template], closed)
        ids = policy.encode(segments, [image.grid for image in images])
        n_response = len(traj.ids) - traj.n_prompt + len(ids)
        if cfg.end_on_error and result.status != "ok":
            row.end(EndReason.CODE_ERROR)
        elif n_response >= cfg.max_response_tokens or len(traj.images) + len(images) > cfg.max_images:
            row.end(EndReason.TOO_LONG)
        else:
            row.extend(policy, ids, images)
            row.n_new += len(ids)                # beside the last sampled token, which never went through the model
            turn.n_observation_tokens = len(ids)


class _Layer(DynamicLayer):
    """Keys and values [B, heads, T, D] with room to grow: DynamicLayer copies all of them for every token sampled."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._hold(key_states[:, :, :0], value_states[:, :, :0])
        n, total = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if total > self.room.shape[3]:
            self._hold(self.keys, self.values, total)
        self.room[0, :, :, n:total], self.room[1, :, :, n:total] = key_states, value_states
        self.keys, self.values = self.room[:, :, :, :total]
        return self.keys, self.values

    def _hold(self, keys: torch.Tensor, values: torch.Tensor, total: int = 0) -> None:
        B, heads, n, D = keys.shape
        self.room = keys.new_empty(2, B, heads, max(n, total) * 9 // 8 + 64, D)
        self.room[0, :, :, :n], self.room[1, :, :, :n] = keys, values
        self.keys, self.values = self.room[:, :, :, :n]

    def pick(self, rows_B: torch.Tensor, columns_BT: torch.Tensor) -> None:
        """Keep these rows, and of each its own columns."""
        self._hold(*(old[rows_B[:, None], :, columns_BT].transpose(1, 2) for old in (self.keys, self.values)))


def _empty_cache(policy: Policy) -> Cache:
    return Cache([_Layer() for _ in policy.model.model.language_model.layers])


class _History:
    """The rows as generate sees them: tokens to the right, no holes, and a cache of all columns but the newest."""

    def __init__(self, policy: Policy, rows: list[_Row]):
        """Prefill each distinct prompt once, all but its last token."""
        self.policy = policy
        self.cache = _empty_cache(policy)
        prompts = list({id(row.traj.problem): row for row in rows}.values())
        starts = self._starts(prompts)
        index = {id(row.traj.problem): i for i, row in enumerate(prompts)}
        # Where a row stands: its row in the cache, and the column of its first token.
        self.places = {id(row): (i := index[id(row.traj.problem)], starts[i]) for row in rows}
        ids_BT, mask_BT, pos_4BT, vision = self._columns(prompts, max(len(row.traj.ids) for row in prompts))
        policy.model.model(input_ids=ids_BT[:, :-1], attention_mask=mask_BT[:, :-1], position_ids=pos_4BT[..., :-1],
                           cache=self.cache, use_cache=True, **vision)

    @staticmethod
    def _starts(rows: list[_Row]) -> list[int]:
        lengths = [len(row.traj.ids) for row in rows]
        return [max(lengths) - n for n in lengths]

    def _columns(self, rows: list[_Row], n_new: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        """The last n_new columns of the rows: ids_BN, mask_BT of all columns, positions_4BN, and the images in them.

        Positions are as transformers expects explicit ones: of the text, then time, height, width.
        """
        T = max(len(row.traj.ids) for row in rows)
        mask_BT, pos_4BN = np.zeros((len(rows), T), dtype=np.int64), np.zeros((4, len(rows), n_new), dtype=np.int64)
        ids_BN, features = np.full((len(rows), n_new), self.policy.stop_ids[1], dtype=np.int64), []
        for i, row in enumerate(rows):
            L, n = len(row.traj.ids), min(n_new, len(row.traj.ids))
            mask_BT[i, T - L:], ids_BN[i, n_new - n:] = 1, row.traj.ids[L - n:]
            pos_4BN[0, i, n_new - n:], pos_4BN[1:, i, n_new - n:] = np.arange(L - n, L), row.pos_3L[:, L - n:]
            if n_pads := int((ids_BN[i] == self.policy.image_id).sum()):
                features.append(torch.cat(row.traj.features)[-n_pads:])
        # Features instead of pixels: the tower ran once per distinct image, in policy.see.
        vision = {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=tuple(features))}}
        return *(torch.from_numpy(a).to(self.policy.device) for a in (ids_BN, mask_BT, pos_4BN)), vision if features else {}

    def generate(self, rows: list[_Row], cfg: Config, tick: Callable[[str, float], None]) -> None:
        """Sample until enough rows have ended their turn; extend all by what they wrote, the stop token included."""
        policy, starts = self.policy, self._starts(rows)
        # A turn that goes on shows the end of what it has written, which may be half of a </code>.
        n_new = max(CODE_STOP_TOKENS if row.n_written else row.n_new for row in rows)
        ids_BN, mask_BT, pos_4BN, vision = self._columns(rows, n_new)
        # The rows move so that their newest columns line up; a row with fewer new ones computes some again.
        rows_B, shift_B = torch.tensor([(self.places[id(row)][0], self.places[id(row)][1] - start)
                                        for row, start in zip(rows, starts)], device=policy.device).T
        columns_BT = torch.arange(mask_BT.shape[1] - n_new, device=policy.device) + shift_B[:, None]
        for layer in self.cache.layers:
            layer.pick(rows_B, columns_BT.clamp(min=0))
        self.places = {id(row): place for row, place in zip(rows, enumerate(starts))}
        limits = [min(cfg.max_turn_tokens - row.n_written, cfg.max_response_tokens - len(row.traj.ids) + row.traj.n_prompt)
                  for row in rows]
        begins = [max(n_new - row.n_written, 0) for row in rows]
        stop = _TurnStop(policy, n_new, begins, limits, tick)
        recorder = _Recorder(policy.suppressed, cfg.temperature)
        out = policy.model.generate(input_ids=ids_BN, attention_mask=mask_BT, position_ids=pos_4BN, cache=self.cache,
                                    max_new_tokens=max(limits), logits_processor=[recorder], stopping_criteria=[stop],
                                    **vision)
        new_BN = out.sequences[:, n_new:]
        for row, ids, logps, n, stopped in zip(rows, new_BN.tolist(), recorder.finish(new_BN).tolist(), stop.lengths,
                                               stop.stopped):
            row.stopped = stopped if n else None
            n = n or len(ids)                    # it goes on
            row.extend(policy, ids[:n], logps=logps[:n])
            row.n_new, row.n_written = 1, row.n_written + n


class _Recorder(LogitsProcessor):
    """Temperature and suppression as the update applies them, and the log-prob of every token sampled after it."""

    def __init__(self, suppressed: tuple[int, ...], temperature: float):
        self.suppressed, self.temperature = suppressed, temperature
        self.logps: list[torch.Tensor] = []
        self.last_BV: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._settle(input_ids[:, -1])
        self.last_BV = sampling_logits(scores, self.temperature, self.suppressed, give_up=True)
        return self.last_BV

    def _settle(self, sampled_B: torch.Tensor) -> None:
        if self.last_BV is not None:
            self.logps.append(self.last_BV.gather(1, sampled_B[:, None])[:, 0] - self.last_BV.logsumexp(-1))

    def finish(self, new_BN: torch.Tensor) -> torch.Tensor:
        self._settle(new_BN[:, -1])
        return torch.stack(self.logps, dim=1)


class _TurnStop(StoppingCriteria):
    """A row's turn ends at a stop id, right after its own </code>, or at its own token limit. The prompt never counts.

    All stop once the rows that ended theirs have idled for as many row-steps as another start costs all rows: a long
    turn holds up nobody, and whatever the lengths are, waiting and starting cost at most twice what the better one would.
    """

    def __init__(self, policy: Policy, width: int, begins: list[int], limits: list[int],
                 tick: Callable[[str, float], None]):
        """`begins`: the column in which the turn of each row begins, `width` if it has not begun."""
        self.policy, self.width, self.begins, self.limits, self.tick = policy, width, begins, limits, tick
        self.stopped = [False] * len(limits)
        self.lengths = [0] * len(limits)         # sampled here until the turn ended; 0: it goes on
        self.idled = 0                           # row-steps of rows that had ended

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        n, last = input_ids.shape[1] - self.width, input_ids[:, -1].tolist()     # plain lists: one wait for a GPU, not five
        running = [i for i, length in enumerate(self.lengths) if length == 0]
        self.idled += len(last) - len(running)
        self.tick("tokens", len(running))
        for i in running:
            self.stopped[i] = last[i] in self.policy.stop_ids
            if last[i] in self.policy.closing_ids:
                ids = input_ids[i, self.begins[i]:][-CODE_STOP_TOKENS:].tolist()     # few: the cost stays flat
                tail, before = self.policy.decode(ids), self.policy.decode(ids[:-1])
                self.stopped[i] = tail.lower().count(CODE_STOP) > before.lower().count(CODE_STOP)
            if self.stopped[i] or n >= self.limits[i]:
                self.lengths[i] = n
        waited = len(running) < len(last) and self.idled >= WAIT_STEPS * len(last)
        return torch.tensor([length > 0 or waited for length in self.lengths], device=input_ids.device)


def choose_attention(policy: Policy) -> str:
    """Switch to flash-attention where it is installed and agrees with sdpa on this model; say what was chosen and why."""
    if policy.device.type != "cuda":
        return "sdpa (flash-attention needs a GPU)"
    if not is_flash_attn_2_available():
        return "sdpa (flash-attn is not installed)"
    gap = attention_gap(policy, "flash_attention_2")
    if gap > 0.05:                               # bf16 log-probs of equal maths differ by about 0.01
        return f"sdpa (flash_attention_2 differs by {gap:.3f} in log-prob)"
    policy.model.set_attn_implementation("flash_attention_2")
    return f"flash_attention_2 (agrees with sdpa within {gap:.3f} in log-prob)"


@torch.no_grad()
def attention_gap(policy: Policy, implementation: str) -> float:
    """Mean log-prob difference to sdpa over two rows of different lengths whose second part is computed over a cache."""
    ids_BT = torch.arange(24, device=policy.device).expand(2, -1) + 1
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, :5] = 0
    pos_4BT = (mask_BT.cumsum(-1) - 1).clamp(min=0).expand(4, -1, -1)
    found = []
    try:
        for name in ("sdpa", implementation):
            policy.model.set_attn_implementation(name)
            cache = _empty_cache(policy)
            for columns in (slice(0, 16), slice(16, 24)):
                logits = policy.model(input_ids=ids_BT[:, columns], attention_mask=mask_BT[:, :columns.stop], cache=cache,
                                      position_ids=pos_4BT[..., columns], use_cache=True).logits
            found.append(logits.float().log_softmax(-1))
    finally:
        policy.model.set_attn_implementation("sdpa")
    return (found[0] - found[1]).abs().mean().item()
