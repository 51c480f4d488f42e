"""PyVision-Image: RL on images. `python train_image.py` trains the embedded policy; `--help` lists every flag."""

import time

STARTED = time.time()

from pyvision_mini.config import Config, cli, parse_config  # noqa: E402
from pyvision_mini.data import read_problems  # noqa: E402
from pyvision_mini.toy import image_problems  # noqa: E402
from pyvision_mini.trainer import train  # noqa: E402


def problems(cfg: Config) -> tuple[list, list]:
    """(training, held-out) problems: the user's files, or generated ones."""
    if not cfg.data:
        return image_problems(256, cfg.seed, "train"), image_problems(cfg.eval_n, 0, "val")
    return read_problems(cfg.data), read_problems(cfg.eval_data)[:cfg.eval_n] if cfg.eval_data else []


@cli
def main() -> None:
    # Dropping what is too long would be a free exit for the tiny policy; --model brings the paper's settings back.
    cfg = parse_config(train_too_long=True)
    train(cfg, "image", *problems(cfg), STARTED)


if __name__ == "__main__":
    main()
