"""docs/recipes.md runs: its blocks are taken from the page and applied, one recipe to one copy of the package."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = {section.splitlines()[0]: re.findall(r"^```(\w+)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
           for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
SMALL = ("--steps 1 --group_size 4 --problems_per_round 4 --groups_per_step 2 --max_rounds 1 --eval_n 2 --out run "
         "--max_response_tokens 400").split()
RUN = """
import json, runpy, sys
from pyvision_mini import trainer
{first}
seen, row = [], trainer.report.trajectory_row
trainer.report.trajectory_row = lambda traj: seen.append((traj.problem.id, traj.problem.question)) or row(traj)
sys.argv = {argv}
runpy.run_path(sys.argv[0], run_name="__main__")
json.dump(seen, open("seen.json", "w"))
"""


@pytest.fixture()
def repository(tmp_path):
    """A copy of what a recipe may change."""
    shutil.copytree(ROOT / "pyvision_mini", tmp_path / "pyvision_mini", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train_image.py", tmp_path)
    return tmp_path


def apply(diff, repository):
    """Each file of the diff, named by a comment: what it removes and its context must be there exactly once."""
    for name, lines in re.findall(r"^# (\S+\.py)\n((?:[ +-].*\n|\n)*)", diff, re.MULTILINE):
        old, new = (re.sub(f"^[ {sign}]|^[^ {sign}].*\n", "", lines, flags=re.MULTILINE) for sign in "-+")
        text = (repository / name).read_text()
        assert text.count(old) == 1, f"{name} has this {text.count(old)} times:\n{old}"
        (repository / name).write_text(text.replace(old, new))


def train(repository, command, *flags, first=""):
    """Run the recipe's own command line at tiny size, `first` before it → what was printed, the step, (id, question) of each
    trajectory. One process for both: most of a test's time is the import of torch."""
    program, *argv = shlex.split(command)
    assert program == "python"
    done = subprocess.run([sys.executable, "-c", RUN.format(first=first, argv=[*argv, *SMALL, *flags])], cwd=repository,
                          capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    step, = map(json.loads, (repository / "run/metrics.jsonl").read_text().splitlines())
    return done.stdout, step, json.loads((repository / "seen.json").read_text())


def test_every_recipe_is_here_and_has_at_most_ten_lines():
    assert list(RECIPES) == ["Change the reward", "Add a task", "Add a tool to the runtime", "Swap the model"]
    for name, blocks in RECIPES.items():
        lines = [line for kind, text in blocks for line in text.splitlines() if line.strip("+- ")
                 and (kind == "python" or kind == "diff" and line[0] in "+-")]
        assert 0 < len(lines) <= 10, (name, len(lines))


def test_change_the_reward(repository):
    (_, diff), (_, command) = RECIPES["Change the reward"]
    apply(diff, repository)
    _, step, _ = train(repository, command, "--seed", "1")
    assert step["error_calls"] > 0 and step["trained_tokens"] > 0
    assert step["reward"] == pytest.approx(step["accuracy"] - 0.1 * step["error_calls"])


def test_add_a_task(repository):
    (_, code), (_, command) = RECIPES["Add a task"]
    (repository / "walls.py").write_text(code)
    printed, step, seen = train(repository, command, "--group_size", "8")
    assert "problems: 384 to train on, 2 held out" in printed and step["trained_tokens"] > 0
    assert {question for _, question in seen} == {"What color is the wall?"}
    assert {name.split("-")[0] for name, _ in seen} == {"train", "val"} and len(seen) == 2 + 32 + 2


def test_add_a_tool_to_the_runtime(repository):
    (_, diff), = RECIPES["Add a tool to the runtime"]
    apply(diff, repository)
    printed, step, _ = train(repository, "python train_image.py", "--template", "paper", "--max_prompt_tokens", "2000",
                             "--group_size", "2", "--problems_per_round", "2", first="""
from PIL import Image
from pyvision_mini.prompts import TEMPLATES
from pyvision_mini.sandbox import SandboxPool
with SandboxPool(workers=1) as pool:
    result = pool.open(images=[Image.new("RGB", (90, 60), "red")]).run("zoom(image_clue_0, (0, 0, 30, 40), times=3)")
print(result.status, result.images[0].size, result.images[0].getpixel((0, 0)), "zoom(" in TEMPLATES["paper"].system)""")
    assert printed.startswith("ok (90, 120) (255, 0, 0) True\n")
    assert step["response_tokens"] > 0


def test_swap_the_model(repository):
    (_, code), (_, command) = RECIPES["Swap the model"]
    (repository / "make.py").write_text(code)
    Image.new("RGB", (60, 60), "red").save(repository / "a.png")
    rows = [{"id": k, "question": "What color is it?", "answer": "red", "image": "a.png"} for k in range(4)]
    (repository / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    printed, step, _ = train(repository, command, "--max_turn_tokens", "20", "--max_pixels", "12544",
                             first="runpy.run_path('make.py')")
    assert "policy: small, 0.7 M parameters" in printed and "problems: 4 to train on" in printed
    # Random weights answer nothing, so no group teaches anything: the step is counted and leaves the weights alone.
    assert step["groups_kept"] == step["trained_tokens"] == step["loss"] == 0 and step["dropped"]
    saved = json.loads((repository / "run/checkpoints/step-000001/model/config.json").read_text())
    assert saved["text_config"]["num_hidden_layers"] == 2
