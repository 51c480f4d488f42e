"""What the tests share: a tiny policy of random weights, built once, and one sandbox pool."""

import pytest
import torch
from cold_start import CHAT_TEMPLATE, build_policy

from pyvision_mini.prompts import TEMPLATES
from pyvision_mini.sandbox import SandboxPool

torch.set_num_threads(1)     # the batches are too small for more

CORPUS = ["Look.\n<code>\n```python\nprint(x)\n```\n</code>\n", "image_clue_0.crop((0, 0, 336, 336)).show()\n```\n</code>",
          "<answer>\n\\boxed{red}\n</answer>", "What color is the dot?", "<interpreter>\n</interpreter>", CHAT_TEMPLATE,
          *(text for template in TEMPLATES.values() for text in (template.system, *template.observation))]


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    return build_policy(CORPUS * 20, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def pool():
    with SandboxPool(workers=2, timeout_s=10, memory_mb=1024) as pool:
        yield pool
