"""The nouns. A Problem becomes G Trajectories (one Group); each Trajectory is a list of Turns over one growing token row.

Token rows only ever grow, and every token is born with its mask and log-prob: nothing is re-tokenised or inferred later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import nan
from pathlib import Path

from PIL import Image


class EndReason(str, Enum):
    """Why a trajectory stopped. Every one is counted in the metrics."""

    ANSWERED = "answered"          # a turn ended with a non-empty <answer>
    OUT_OF_TURNS = "out_of_turns"  # the last allowed turn wrote code instead of an answer
    TOO_LONG = "too_long"          # a turn cut by its token limit, or an observation that did not fit
    PROMPT_TOO_LONG = "prompt_too_long"  # over the prompt's limits: rejected before the rollout, never cut
    NO_ACTION = "no_action"        # a turn with neither code nor answer
    CODE_ERROR = "code_error"      # only with end_on_error: the authors' release stops at any error
    TOOL_FAILURE = "tool_failure"  # ours, never what the code did: no sandbox, or a prompt image that cannot be read


@dataclass
class Problem:
    """One question. `answer` is the gold: a letter for "choice", LaTeX for "math", a number (MRA) or plain text."""

    id: str
    question: str
    answer: str
    kind: str = "text"                               # "choice" | "math" | "number" | "text"
    choices: list[str] | None = None                 # option texts, in the order of the letters A, B, ...
    images: tuple[str | Path | Image.Image, ...] = ()
    videos: tuple[str | Path, ...] = ()
    source: str = ""                                 # data set or category, for per-source averages
    about: str = ""                                  # what the prompt says of the videos; rollout.describe fills it in
    variant_of: str = ""                             # variants of one question share it: one observation in evaluations


@dataclass
class ToolResult:
    """What one call of the sandbox returned. Whatever the code did, this is data, never an exception."""

    status: str                                      # "ok" | "error" | "timeout" | "killed"
    text: str = ""                                   # printed text, then the error if any
    images: list[Image.Image] = field(default_factory=list)
    seconds: float = 0.0                             # wall clock of the call, waiting for a slot not included


@dataclass
class Turn:
    """One assistant turn: what was sampled, what it meant, and what came back (None: no code ran)."""

    text: str                                        # decoded sampled ids, control tokens stripped
    kind: str                                        # "code" | "answer" | "none"
    content: str | None = None                       # the code or the answer
    result: ToolResult | None = None
    n_tokens: int = 0                                # sampled tokens
    n_observation_tokens: int = 0                    # tokens of the observation, image tokens included
    no_op: bool = False                              # the call only showed a whole input image again
    seconds: float = 0.0                             # generation time of the batched turn this row was in


@dataclass
class Trajectory:
    """One sampled conversation as a token row of length L, with what the reward and the update need."""

    problem: Problem
    ids: list[int] = field(default_factory=list)             # L token ids: prompt, turns, observations
    action_mask: list[int] = field(default_factory=list)     # L: 1 exactly where the policy sampled the token
    logps: list[float] = field(default_factory=list)         # L: log-prob at sampling, nan where not sampled
    images: list[Image.Image] = field(default_factory=list)  # as the model saw them (resized), in order
    grids: list[tuple[int, int, int]] = field(default_factory=list)  # per image (t, h, w) in patches; t·h·w/4 tokens
    features: list = field(default_factory=list)             # per image: Tensor[t·h·w/4, D] of the frozen tower
    n_prompt: int = 0                                        # tokens before the first sampled one
    n_image_tokens: int = 0                                  # image-pad ids in `ids`; must equal Σ t·h·w/4
    turns: list[Turn] = field(default_factory=list)
    n_tool_calls: int = 0                                    # calls that pay the bonus (reward.py says which)
    answer: str | None = None                                # extracted from the final turn only
    end: EndReason | None = None
    failure: str = ""                                        # what failed at TOOL_FAILURE
    correct: float = 0.0                                     # A of the paper's Eq. 1, in 0..1
    reward: float = 0.0                                      # A + bonus · calls · 1[A ≥ 0.5]; set once

    def extend(self, ids: list[int], trained: bool, logps: list[float] | None = None) -> None:
        """Append tokens with their mask. Sampled tokens bring one log-prob each; the rest get nan."""
        logps = logps if trained else [nan] * len(ids)
        assert logps is not None and len(logps) == len(ids), f"{len(ids)} ids but {len(logps or [])} log-probs"
        self.ids.extend(ids)
        self.action_mask.extend([int(trained)] * len(ids))
        self.logps.extend(logps)

    @property
    def n_visual_tokens(self) -> int:
        """Image tokens in the context, of the prompt and of tool images."""
        return sum(t * h * w // 4 for t, h, w in self.grids)

    @property
    def consistent(self) -> bool:
        """Images, tokens and masks agree; a trajectory that is not consistent never trains."""
        lengths = {len(self.ids), len(self.action_mask), len(self.logps)}
        return len(lengths) == 1 and self.n_image_tokens == self.n_visual_tokens and len(self.images) == len(self.grids)


@dataclass
class Group:
    """The trajectories sampled for one problem, in sampling order."""

    problem: Problem
    trajectories: list[Trajectory]
