"""Videos live in the runtime only: time stamps, odd clips, broken files, memory, and the prompt that describes them."""

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from pyvision_mini.config import Config, direct_config
from pyvision_mini.data import ProblemStream
from pyvision_mini.prompts import TEMPLATES, prompt_segments
from pyvision_mini.rollout import describe, frame_indices, rollout, with_uniform_frames
from pyvision_mini.trajectory import EndReason, Problem

ROOT = Path(__file__).parent.parent


def clip(path, starts, sound=False):
    """A 64x48 clip whose frame i is a grey of 5·i, shown from starts[i] milliseconds on."""
    with av.open(str(path), "w") as container:
        if sound:
            stream = container.add_stream("aac", rate=16000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 16000
        else:
            stream = container.add_stream("libx264", rate=30, options={"crf": "10", "preset": "ultrafast"})
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            stream.codec_context.time_base = stream.time_base = milliseconds = Fraction(1, 1000)
        for i, start in enumerate(starts):
            if not sound:
                frame = av.VideoFrame.from_image(Image.new("RGB", (64, 48), (5 * i % 250,) * 3))
                frame.pts, frame.time_base = start, milliseconds
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def problem(*videos, **more):
    return Problem("p", "What happens?", "1", videos=tuple(videos), **more)


def test_times_come_from_time_stamps_not_from_the_average_frame_rate(tmp_path, pool):
    starts = [20 * i for i in range(21)] + [400 + 1000 * i for i in range(1, 20)]      # frame 20 at 0.40 s
    session = pool.open(videos=[clip(tmp_path / "a.mp4", starts)])
    text = session.run("t = frame_times(video_clue_0)\nprint(round(float(t[20]), 2), round(20 / video_clue_0.get_avg_fps(), 1))\n"
                       "print(*[round(float(np.asarray(frame_at(video_clue_0, s)).mean()) / 5) for s in (0.0, 0.39, 0.41, 1.39, 1.41, 99)])").text
    session.close()
    real, naive = map(float, text.splitlines()[0].split())
    assert real == 0.4 and naive > 3
    assert text.splitlines()[1] == "0 19 20 20 21 39"                                  # clamped to the last frame


@pytest.mark.parametrize("n_frames", [1, 2, 7, 300])
@pytest.mark.parametrize("n", [1, 8, 64])
def test_sampled_indices_are_sorted_different_and_inside_the_clip(n_frames, n):
    indices = frame_indices(n_frames, n)
    assert len(indices) == min(n, n_frames) and indices == sorted(set(indices))
    assert indices[0] == 0 and indices[-1] <= n_frames - 1
    if 1 < n <= n_frames:
        assert indices[-1] == n_frames - 1


def test_a_clip_of_one_frame_works_when_asked_for_32(tmp_path, pool):
    one = problem(clip(tmp_path / "one.mp4", [0]))
    frames = with_uniform_frames(one, pool, n=32)
    assert len(frames.images) == 1 and frames.videos == () and frames.images[0].size == (64, 48)


def test_uniform_frames_come_by_number_or_by_rate(tmp_path, pool):
    five_seconds = problem(clip(tmp_path / "a.mp4", range(0, 5000, 100)))
    assert len(with_uniform_frames(five_seconds, pool, n=9).images) == 9
    assert len(with_uniform_frames(five_seconds, pool, fps=1).images) == 5
    greys = [round(np.asarray(image).mean() / 5) for image in with_uniform_frames(five_seconds, pool, n=3).images]
    assert greys == [0, 24, 49]                                                        # round(24.5) is even


@pytest.mark.parametrize("what", ["truncated", "empty", "text", "missing", "audio only"])
def test_a_broken_file_is_one_short_reason_that_names_it_and_a_counted_skip(what, tmp_path, pool):
    path = tmp_path / "broken.mp4"
    if what == "truncated":
        path.write_bytes(clip(tmp_path / "a.mp4", range(0, 900, 30)).read_bytes()[:300])
    elif what in ("empty", "text"):
        path.write_text("" if what == "empty" else "no video")
    elif what == "audio only":
        clip(path, range(20), sound=True)
    broken, good = problem(path), Problem("good", "?", "1", videos=(clip(tmp_path / "good.mp4", range(0, 600, 30)),))
    reason = describe(broken, pool)
    assert str(path) in reason and len(reason) < 500 and "\n" not in reason
    assert with_uniform_frames(broken, pool, n=4) is broken                      # the rollout fails on it and says why
    stream = ProblemStream([broken, good], find_faults=lambda drawn: [describe(p, pool) for p in drawn])
    assert [p.id for p in stream.next_batch(3)] == ["good"] * 3 and list(stream.skipped) == ["p"]


def test_a_broken_clip_met_in_a_rollout_ends_its_group_only(tmp_path, pool, policy):
    (tmp_path / "broken.mp4").write_text("no video")
    good = problem(clip(tmp_path / "good.mp4", range(0, 600, 30)))
    cfg = Config(max_turns=0, max_turn_tokens=4)
    first, second = rollout(policy, [problem(tmp_path / "broken.mp4"), good], cfg, pool, n_samples=2)
    assert [t.end for t in first.trajectories] == [EndReason.TOOL_FAILURE] * 2
    assert all(t.end != EndReason.TOOL_FAILURE and len(t.ids) > 10 for t in second.trajectories)


def test_the_prompt_describes_every_clip_and_shows_no_frame(tmp_path, pool):
    two = problem(clip(tmp_path / "a.mp4", range(0, 2000, 50)), clip(tmp_path / "b.mp4", range(0, 500, 50)),
                  images=(Image.new("RGB", (60, 60)),))
    assert describe(two, pool) is None
    # The last frame lasts 1/30 s as written by the encoder: 39 · 0.05 + 0.033 s, 9 · 0.05 + 0.033 s.
    assert two.about == "video_clue_0: 2.0 s, 40 frames, 20.2 fps, 64x48; video_clue_1: 0.5 s, 10 frames, 20.7 fps, 64x48"
    text = "".join(prompt_segments(two, TEMPLATES["paper"], two.about))
    assert two.about in text and "cannot see the video" in text
    assert text.count("<|image_pad|>") == 1 and "<image_clue_0>" in text               # the image, and no frame


def test_memory_stays_flat_over_300_clips(tmp_path, pool):
    path = clip(tmp_path / "a.mp4", range(0, 600, 30))

    def open_one():
        session = pool.open(videos=[path])
        assert session.run("video_clue_0[5].asnumpy().mean()").status == "ok"
        session.close()

    def used():
        rss = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in (os.getpid(), pool._zygote.pid)]
        return sum(rss) / 2**20, len(os.listdir("/proc/self/fd"))

    for _ in range(20):
        open_one()
    before = used()
    for _ in range(300):
        open_one()
    after = used()
    assert after[0] - before[0] < 50 and after[1] <= before[1]


def train_video(folder, *flags, ranks=1):
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *start, str(ROOT / "train_video.py"), "--steps", "2", "--out", str(folder / "run"), "--group_size", "4",
         "--problems_per_round", "4", "--groups_per_step", "2", "--max_rounds", "1", "--eval_n", "4", *flags],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_train_video_runs_on_two_ranks_and_compares_with_uniform_frames(tmp_path):
    out, done = tmp_path / "run", train_video(tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "uniform, 4 frames" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["baselines"]["uniform, 4 frames"]["visual_tokens"] == 64.0          # 4 frames of 16 tokens
    done = train_video(tmp_path, "--resume", ranks=2)                                  # of a run that has ended
    assert done.returncode == 0 and "held out, " not in done.stdout and "uniform, 4 frames" in done.stdout, done.stderr[-3000:]


def test_train_video_without_held_out_problems_has_nothing_to_compare(tmp_path):
    done = train_video(tmp_path, "--eval_n", "0")
    assert done.returncode == 0 and "step 2 | acc" in done.stdout and "uniform" not in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("model", ["", "m"])
def test_answers_without_a_tool_are_asked_for_in_the_form_that_is_graded(model):
    cfg = direct_config(Config(model=model, max_images=1))
    assert (cfg.max_turns, cfg.max_images) == (0, 999)
    # The tiny policy was taught the form; any other model has to be told.
    assert ("\n<answer>\n\\boxed{your answer}\n</answer>" in TEMPLATES[cfg.template].system) == bool(model)
