"""PyVision-Image: RL on images. `python train_image.py` trains the embedded policy; `--help` lists every flag."""
# ruff: noqa: E402

import signal
import time

STARTED = time.time()
signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C before the run can save anything: no traceback, just the end

from pyvision_mini.config import cli, parse_config
from pyvision_mini.data import load_splits
from pyvision_mini.toy import image_problems
from pyvision_mini.trainer import train


@cli
def main() -> None:
    # Dropping what is too long would be a free exit for the tiny policy; --model brings the paper's settings back.
    cfg = parse_config(train_too_long=True)
    train(cfg, "image", *load_splits(cfg, image_problems), STARTED)


if __name__ == "__main__":
    main()
