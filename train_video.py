"""PyVision-Video: RL on videos that live only in the runtime. `python train_video.py` trains the embedded policy."""

import time

STARTED = time.time()

from pyvision_mini.config import Config, cli, parse_config  # noqa: E402
from pyvision_mini.data import read_problems  # noqa: E402
from pyvision_mini.rollout import with_uniform_frames  # noqa: E402
from pyvision_mini.toy import video_problems  # noqa: E402
from pyvision_mini.trainer import train  # noqa: E402


def problems(cfg: Config) -> tuple[list, list]:
    """(training, held-out) problems: the user's files, or generated clips."""
    if not cfg.data:
        return video_problems(384, cfg.seed, "train"), video_problems(cfg.eval_n, 0, "val")
    return read_problems(cfg.data), read_problems(cfg.eval_data)[:cfg.eval_n] if cfg.eval_data else []


@cli
def main() -> None:
    # Dropping what is too long would be a free exit for the tiny policy; --model brings the paper's settings back.
    cfg = parse_config(train_too_long=True)
    train(cfg, "video", *problems(cfg), STARTED, baselines={
        "uniform, 1 frame/s": lambda problem, pool: with_uniform_frames(problem, pool, fps=1),
        "uniform, 4 frames": lambda problem, pool: with_uniform_frames(problem, pool, n=4),
        "uniform, 8 frames": lambda problem, pool: with_uniform_frames(problem, pool, n=8)})


if __name__ == "__main__":
    main()
