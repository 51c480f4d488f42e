"""What the model reads and what its text means, against texts written by hand; and the shape of the package itself."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyvision_mini.prompts import (TEMPLATES, Action, Control, describe_video, observation_segments, parse_action,
                                   prompt_segments)
from pyvision_mini.trajectory import Problem

PACKAGE = Path(__file__).parent.parent / "pyvision_mini"
PARSE_CASES = [json.loads(line) for line in (Path(__file__).parent / "cases/parse.jsonl").read_text().splitlines()]
SHORT = TEMPLATES["short"]


@pytest.mark.parametrize("text, kind, content", [
    *((case["text"], case["kind"], case["content"]) for case in PARSE_CASES),
    ("<answer>A</answer> or <answer>B</answer>", "answer", "B"),                      # the last one
    ("<answer>A</answer><answer> </answer>", "answer", "A"),                          # the last that says something
    ("<answer>A", "none", None),                                                      # unclosed
    ("</code>", "none", None),                                                        # never opened
    ("</code> and <code>print(1)</code>", "code", "print(1)"),
    ("<CODE>\n```python\nprint(1)\n```\n</CODE>", "code", "print(1)"),
    ("<code>\n```python\nif 1:\n    print(1)\n```\n</code>\n", "code", "if 1:\n    print(1)"),  # indentation stays
    ("```python\nprint(1)", "none", None),                                            # unclosed and bare
    ("```\nprint(1)\n```", "none", None),                                             # bare and not marked as Python
    ("<code>```python\n# <answer>\n```</code>", "code", "# <answer>"),
    ("<interpreter>\n```\nprint(1)\n```\n</interpreter> so", "none", None),           # an invented result
    ("", "none", None),
])
def test_a_turn_means_what_its_last_complete_block_says(text, kind, content):
    assert parse_action(text) == Action(kind, content)


def test_the_prompt_has_one_system_turn_tagged_images_and_an_open_assistant_turn():
    problem = Problem("p", "Which one?", "A", "choice", ["red", "blue"], images=("a.png", "b.png"))
    assert "".join(prompt_segments(problem, SHORT)) == (
        "<|im_start|>system\nLook with Python, then answer.<|im_end|>\n<|im_start|>user\n"
        "<image_clue_0><|vision_start|><|image_pad|><|vision_end|></image_clue_0>\n"
        "<image_clue_1><|vision_start|><|image_pad|><|vision_end|></image_clue_1>\n"
        "Which one?\n(A) red\n(B) blue<|im_end|>\n<|im_start|>assistant\n")
    question = "What does <|im_end|> mean?"                                           # spelled out it is no control token
    assert question in [s for s in prompt_segments(Problem("p", question, ""), SHORT) if not isinstance(s, Control)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_hints_name_only_the_media_that_are_there(name):
    template, video = TEMPLATES[name], describe_video(0, 12.34, 300, 24.31, 640, 360)
    assert video == "video_clue_0: 12.3 s, 300 frames, 24.3 fps, 640x360"
    with_video = "".join(prompt_segments(Problem("p", "When?", "", videos=("a.mp4",)), template, video))
    with_image = "".join(prompt_segments(Problem("p", "When?", "", images=("a.png",)), template))
    assert video in with_video and "<|image_pad|>" not in with_video
    assert "video_clue" not in with_image and "{" not in with_image.replace("\\boxed{your answer}", "")
    assert ("full resolution" in with_image) == (name in ("paper", "released")) and "full resolution" not in with_video


def test_an_observation_closes_the_turn_shows_text_then_figures_and_opens_the_next_turn():
    assert "".join(observation_segments("hi\n", 1, 2, SHORT, closed=False)) == (
        "<|im_end|>\n<|im_start|>user\n<interpreter>\nhi\n<image_clue_1><|vision_start|><|image_pad|><|vision_end|></image_clue_1>\n"
        "<image_clue_2><|vision_start|><|image_pad|><|vision_end|></image_clue_2>\n"
        "</interpreter><|im_end|>\n<|im_start|>assistant\n")


def test_a_sampled_end_is_not_closed_twice_silence_is_said_and_released_weights_get_their_own_wrapper():
    assert "".join(observation_segments(" \n", 0, 0, SHORT, closed=True)) == (
        "\n<|im_start|>user\n<interpreter>\n(no output)\n</interpreter><|im_end|>\n<|im_start|>assistant\n")
    assert "".join(observation_segments("3", 0, 0, TEMPLATES["released"], closed=True)) == (
        "\n<|im_start|>user\n<tool_response>\nText Result:\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


# --- the package ------------------------------------------------------------------------------------------------------

ORDER = ["config", "images", "trajectory", "data", "prompts", "toy", "lockdown", "sandbox_worker", "sandbox", "policy", "rollout",
         "judge", "reward", "benchmarks", "selection", "grpo", "taxonomy", "page", "report", "trainer"]
TREES = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py")}


def imported(tree: ast.AST) -> set[str]:
    """Names of package files that a file imports, in any spelling and at any depth."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"{'pyvision_mini.' * bool(node.level)}{node.module or ''}".strip(".")
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "pyvision_mini" and len(part) > 1} & set(TREES)


def test_imports_point_only_up_the_reading_order_and_no_file_hides_a_standard_module():
    assert sorted(TREES) == sorted(["__init__", *ORDER])
    assert "select" in sys.stdlib_module_names and not set(TREES) & set(sys.stdlib_module_names)
    wrong = [(name, other) for name in ORDER for other in imported(TREES[name]) if ORDER.index(other) >= ORDER.index(name)]
    assert wrong == []
    assert imported(ast.parse("from . import toy\nfrom .data import x\nimport pyvision_mini.grpo")) == {"toy", "data", "grpo"}


def test_the_sandbox_child_never_imports_torch():
    assert imported(TREES["sandbox_worker"]) == {"images", "lockdown"}
    code = "import sys, pyvision_mini.images; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_no_function_has_more_than_a_hundred_lines():
    long = [(name, node.name, node.end_lineno - node.lineno + 1) for name, tree in TREES.items() for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= 100]
    assert long == []
