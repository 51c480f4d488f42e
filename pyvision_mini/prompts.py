"""Strings only: what the model reads (prompt, observation) and what its text means (code, answer, neither).

A conversation is a list of segments. A plain `str` is text, also when it happens to spell a control token; only a
`Control` is one. `IMAGE` stands for one image and becomes as many image-pad ids as the image has tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyvision_mini.trajectory import Problem


class Control(str):
    """A control token of the Qwen2.5-VL family, by its spelling."""


IM_START, IM_END, END_OF_TEXT = Control("<|im_start|>"), Control("<|im_end|>"), Control("<|endoftext|>")
VISION_START, IMAGE, VISION_END = Control("<|vision_start|>"), Control("<|image_pad|>"), Control("<|vision_end|>")
VIDEO = Control("<|video_pad|>")
SUPPRESSED = (IMAGE, VIDEO, VISION_START, VISION_END)  # an image-pad without an image would crash the next forward
CODE_STOP = "</code>"                                  # a turn ends right after it; its code runs


@dataclass(frozen=True)
class Template:
    """The texts around the media and the question. `video_hint` is filled with what the runtime holds."""

    system: str
    image_hint: str
    video_hint: str
    observation: tuple[str, str]  # wrapped around what the sandbox returned
    printed: str                  # before the printed text


_PAPER_SYSTEM = """You are a helpful assistant. Solve the problem step by step. You can write Python code to look at the \
media; it runs in a persistent Jupyter-like runtime and what it prints and shows comes back to you.

In each turn do one of two things:
1. Write code between <code> and </code>, as
<code>
```python
# your code
```
</code>
Variables stay alive between turns. np (numpy), plt (matplotlib.pyplot) and Image (PIL) are imported already. Use print() \
for text; use plt.show() or the show() method of a PIL image for pictures. What comes back stands between <interpreter> \
and </interpreter>; a shown picture is also stored in the runtime under the next free name image_clue_k.
2. Give the final answer as
<answer>
\\boxed{your answer}
</answer>"""

TEMPLATES = {
    "paper": Template(
        system=_PAPER_SYSTEM,
        image_hint="The runtime holds the images above in full resolution as PIL images under the names in their tags.",
        video_hint="You cannot see the video directly. The runtime holds it as a decord VideoReader: {videos}. "
                   "frame_at(video_clue_0, second) gives the PIL image on screen at that second, video_clue_0[i].asnumpy() "
                   "frame i, frame_times(video_clue_0) the seconds at which the frames start. Show the frames you need.",
        observation=("<interpreter>\n", "</interpreter>"), printed=""),
    "short": Template(
        system="Look with Python, then answer.", image_hint="", video_hint="{videos}",
        observation=("<interpreter>\n", "</interpreter>"), printed=""),
}
# For baselines without a tool; also what the tiny policy's first lessons use.
TEMPLATES["direct"] = Template("Answer at once.", "", "{videos}", ("", ""), "")
TEMPLATES["paper_direct"] = Template(
    "You are a helpful assistant. Solve the problem step by step. Give the final answer as" + _PAPER_SYSTEM[
        _PAPER_SYSTEM.index("\n<answer>"):], "", "The video is not shown: {videos}", ("", ""), "")
# The authors' released weights saw <tool_response> and "Text Result:" around what a tool returned.
TEMPLATES["released"] = Template(
    system=_PAPER_SYSTEM, image_hint=TEMPLATES["paper"].image_hint, video_hint=TEMPLATES["paper"].video_hint,
    observation=("<tool_response>\n", "</tool_response>"), printed="Text Result:\n")


def describe_video(k: int, seconds: float, n_frames: int, fps: float, width: int, height: int) -> str:
    """What the prompt says about a clip the model cannot see."""
    return f"video_clue_{k}: {seconds:.1f} s, {n_frames} frames, {fps:.1f} fps, {width}x{height}"


def prompt_segments(problem: Problem, template: Template, videos: str = "") -> list[str]:
    """Problem → system turn, user turn with its images and question, opened assistant turn. `videos` describes clips."""
    user: list[str] = []
    for k in range(len(problem.images)):
        user += [f"<image_clue_{k}>", VISION_START, IMAGE, VISION_END, f"</image_clue_{k}>\n"]
    hints = [template.image_hint] * bool(problem.images) + [template.video_hint.format(videos=videos)] * bool(videos)
    lines = [hint for hint in hints if hint] + [problem.question]
    if problem.choices:
        lines += [f"({chr(65 + k)}) {choice}" for k, choice in enumerate(problem.choices)]
    return [IM_START, "system\n" + template.system, IM_END, "\n",
            IM_START, "user\n", *user, "\n".join(lines), IM_END, "\n", IM_START, "assistant\n"]


def observation_segments(text: str, first_image: int, n_images: int, template: Template, closed: bool) -> list[str]:
    """What a call returned → the user turn the model reads, and the next assistant turn opened.

    `first_image` numbers the figures' tags. `closed`: the assistant turn already ended with a sampled <|im_end|>;
    after </code> it has to be closed here.
    """
    opening, ending = template.observation
    body = template.printed + text.rstrip() + "\n" if text.strip() else ""
    segments: list[str] = ([] if closed else [IM_END]) + ["\n", IM_START, "user\n" + opening + body]
    for k in range(first_image, first_image + n_images):
        segments += [f"<image_clue_{k}>", VISION_START, IMAGE, VISION_END, f"</image_clue_{k}>\n"]
    if not body and not n_images:
        segments.append("(no output)\n")
    return segments + [ending, IM_END, "\n", IM_START, "assistant\n"]


@dataclass(frozen=True)
class Action:
    """What one turn does."""

    kind: str            # "code" | "answer" | "none"
    content: str | None


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.IGNORECASE | re.MULTILINE)
_OPENING = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\n|```(?:python|py)[ \t]*\n", re.IGNORECASE | re.MULTILINE)


def parse_action(text: str) -> Action:
    """The last non-empty <answer> answers; else the last code block runs; else the turn has no action."""
    text = text.replace("\r\n", "\n")
    answers = [a.strip() for a in _ANSWER.findall(text) if a.strip()]
    if answers:
        return Action("answer", answers[-1])
    tagged = _CODE.findall(text)
    code = _code_in_tag(tagged[-1]) if tagged else (_FENCED.findall(text) or [""])[-1].rstrip()
    return Action("code", code) if code.strip() else Action("none", None)


def _code_in_tag(body: str) -> str:
    """The last fenced block of a <code> body. Its end is the last fence: a fence inside a string does not end it."""
    openings = list(_OPENING.finditer(body))
    if openings:
        body = body[openings[-1].end():]
    elif "```" in body:
        body = body[body.index("```") + 3:]
    return body[:body.rindex("```")].strip("\n") if "```" in body else body.strip("\n")
