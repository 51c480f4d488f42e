"""PyVision-Video: RL on videos that live only in the runtime. `python train_video.py` trains the embedded policy."""
# ruff: noqa: E402

import signal
import time

STARTED = time.time()
signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C before the run can save anything: no traceback, just the end

from pyvision_mini.config import cli, parse_config
from pyvision_mini.data import load_splits
from pyvision_mini.rollout import with_uniform_frames
from pyvision_mini.toy import video_problems
from pyvision_mini.trainer import train


@cli
def main() -> None:
    # Dropping what is too long would be a free exit for the tiny policy, and one optimizer step a batch teaches it too little
    # in ten minutes. --model brings the paper's settings back.
    cfg = parse_config(train_too_long=True, steps=50, updates_per_batch=2)
    train(cfg, "video", *load_splits(cfg, video_problems), STARTED, baselines={
        "uniform, 1 frame/s": lambda problem, pool: with_uniform_frames(problem, pool, fps=1),
        "uniform, 4 frames": lambda problem, pool: with_uniform_frames(problem, pool, n=4),
        "uniform, 8 frames": lambda problem, pool: with_uniform_frames(problem, pool, n=8)})


if __name__ == "__main__":
    main()
