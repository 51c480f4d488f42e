"""Multi-turn rollouts with scripted turns: the tokens are forced, the log-probs recorded are the model's own for them."""

from contextlib import nullcontext
from math import isnan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

from pyvision_mini import rollout as module
from pyvision_mini.config import Config
from pyvision_mini.grpo import policy_loss, token_logprobs
from pyvision_mini.prompts import END_OF_TEXT, IM_END
from pyvision_mini.reward import score
from pyvision_mini.sandbox import SandboxError
from pyvision_mini.trainer import Scorer, collate
from pyvision_mini.trajectory import EndReason as End
from pyvision_mini.trajectory import Problem

ANSWER = "<answer>\n\\boxed{red}\n</answer>"


def code(line: str) -> str:
    return f"Look.\n<code>\n```python\n{line}\n```\n</code>"


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def ask(name: str, *images, question: str = "What color is the dot?") -> Problem:
    return Problem(name, question, "red", images=images)


SMALL, BIG = noise(60, 60), noise(400, 300, 1)               # 4 and 4x3 tokens
CROP = code("image_clue_0.crop((0, 0, 28, 56)).show()")


@pytest.fixture
def play(policy, pool, monkeypatch):
    """play((problem, [script, ..]), ..) → trajectories in order. A script is a list of turns, each a text or token ids."""
    scripts, forced = {}, []
    open_rows, generate = module._open_rows, module._History.generate

    def open_scripted(*args):
        rows = open_rows(*args)
        for row in rows:
            row.script = next(scripts[row.traj.problem.id])
        return rows

    def generate_forced(history, rows, *args):
        turns = [row.script[len(row.traj.turns)] for row in rows]
        forced[:] = [policy.encode([t] if "</code>" in t else [t, IM_END]) if isinstance(t, str) else t for t in turns]
        forced[:] = [ids[row.n_written:] for ids, row in zip(forced, rows)]
        return generate(history, rows, *args)

    class Forced(module._Recorder):
        def __init__(self, *args):
            super().__init__(*args)
            self.turns = list(forced)

        def __call__(self, input_ids, scores):
            scores = torch.full_like(super().__call__(input_ids, scores), -torch.inf)
            for b, ids in enumerate(self.turns):
                scores[b, ids[len(self.logps)] if len(self.logps) < len(ids) else 0] = 0
            return scores

    monkeypatch.setattr(module, "_open_rows", open_scripted)
    monkeypatch.setattr(module._History, "generate", generate_forced)
    monkeypatch.setattr(module, "_Recorder", Forced)

    def play(*games, pool=pool, tick=lambda kind, n: None, **config):
        scripts.update((problem.id, iter(its_scripts)) for problem, its_scripts in games)
        groups = module.rollout(policy, [problem for problem, _ in games], Config(**config), pool, tick=tick,
                                n_samples=len(games[0][1]))
        trajs = [traj for group in groups for traj in group.trajectories]
        for traj in trajs:                                   # true of every trajectory, whatever happened
            assert traj.consistent and traj.ids.count(policy.image_id) == traj.n_visual_tokens
            assert sum(turn.n_tokens for turn in traj.turns) == sum(traj.action_mask)
            assert [isnan(logp) for logp in traj.logps] == [not m for m in traj.action_mask]
        return trajs
    return play


def sample(policy, pool, problems, seed=0, **config):
    """An unscripted rollout."""
    cfg = Config(**{"group_size": 2, "max_turn_tokens": 12, **config})
    return [traj for group in module.rollout(policy, problems, cfg, pool, seed) for traj in group.trajectories]


def sampled(traj) -> list[int]:
    return [i for i, m in zip(traj.ids, traj.action_mask) if m]


def assert_exact(policy, trajs, temperature=1.0):
    """Recorded log-probs = one forward per row from pixels, without cache, padding or positions of ours."""
    for traj in trajs:
        ids_1T = torch.tensor([traj.ids])
        pixels = policy.processor.image_processor(images=traj.images, return_tensors="pt") if traj.images else {}
        with torch.no_grad():
            logits = policy.model(input_ids=ids_1T, mm_token_type_ids=(ids_1T == policy.image_id).int(), use_cache=False,
                                  **pixels).logits
        wanted = token_logprobs(logits, ids_1T, temperature, policy.suppressed)[0]
        gaps = [abs(logp - w) for logp, w, m in zip(traj.logps, wanted.tolist(), traj.action_mask) if m]
        assert max(gaps) < 1e-4, f"{traj.problem.id}: {max(gaps)}"


def assert_scored(policy, trajs, temperature=1.0):
    """Recorded log-probs = the update's padded batch forward."""
    with torch.no_grad():
        logp_BT, _ = Scorer(policy, temperature, False)(collate(policy, trajs))
    for traj, logp_T in zip(trajs, logp_BT.tolist()):
        assert [logp for logp in traj.logps if not isnan(logp)] == pytest.approx(
            [logp for logp, m in zip(logp_T, traj.action_mask) if m], abs=1e-4)


# --- exactness --------------------------------------------------------------------------------------------------------

GAMES = [(ask("big", BIG), [[CROP, code("print(1)"), ANSWER], [ANSWER]]),                      # one row ends early
         (ask("text", question="Which? " * 20), [
             [code("plt.plot([1, 2]); plt.show()"), ANSWER],
             [code("1 / 0"), code("x = 1"), code("Image.new('L', (90, 60)).show()"), ANSWER]]),
         (ask("two", SMALL, BIG), [["hm"], [code("print('a' * 40)\nimage_clue_1.show(); image_clue_0.show()"), CROP, ANSWER]])]


@pytest.mark.parametrize("temperature, rows", [(1.0, 128), (1.0, 1), (0.4, 4), (1.7, 3)])   # 3 and 1 split groups
def test_every_log_prob_is_that_of_a_full_forward(policy, play, temperature, rows):
    trajs = play(*GAMES, temperature=temperature, rollout_rows=rows)
    assert [traj.problem.id for traj in trajs] == ["big", "big", "text", "text", "two", "two"]
    assert [len(traj.images) for traj in trajs] == [2, 1, 1, 1, 2, 5]
    assert_exact(policy, trajs, temperature)
    assert_scored(policy, trajs, temperature)


def test_two_interleaved_rollouts_do_not_disturb_each_other(policy, play):
    inner, count = [], iter(range(10**6))

    def tick(kind, n):                                       # in the middle of the first and of the second turn
        if kind == "tokens" and next(count) in (5, 40):
            inner.extend(play((ask("inner", SMALL, SMALL), [[CROP, ANSWER], [ANSWER]])))

    outer = play(*GAMES, tick=tick)
    assert len(inner) == 4
    assert_exact(policy, outer + inner)


def test_a_row_has_the_same_log_probs_in_a_batch_and_alone(play):
    short = ask("short", SMALL), [[CROP, ANSWER], ["hm"]]
    long = ask("long", BIG, SMALL, BIG, question="Which? " * 90), [[ANSWER], [code("print('b' * 50)"), CROP, ANSWER]]
    for a, b in zip(play(short, long), play(short) + play(long)):
        assert a.ids == b.ids
        assert a.logps == pytest.approx(b.logps, abs=1e-4, nan_ok=True)


def test_attention_implementations_agree_over_a_cache(policy):
    assert module.attention_gap(policy, "eager") < 1e-5 and policy.model.config._attn_implementation == "sdpa"


# Of the released Qwen2.5-VL checkpoints, without its picture numbers and videos.
QWEN = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("template", [None, QWEN], ids=["tiny checkpoint", "released checkpoints"])
def test_a_conversation_of_three_turns_is_one_render_of_the_chat_template(policy, play, template):
    show = code("image_clue_0.crop((0, 0, 28, 56)).show()\nprint('hi')")
    traj, _ = play((ask("p", BIG), [[show, "```python\nx = 1\n```", ANSWER], [ANSWER]]))
    image, text = {"type": "image"}, lambda value: {"type": "text", "text": value}
    messages = [
        {"role": "system", "content": "Look with Python, then answer."},
        {"role": "user", "content": [text("<image_clue_0>"), image, text("</image_clue_0>\n"), text("What color is the dot?")]},
        {"role": "assistant", "content": [text(show)]},
        {"role": "user", "content": [text("<interpreter>\nhi\n<image_clue_1>"), image, text("</image_clue_1>\n</interpreter>")]},
        {"role": "assistant", "content": "```python\nx = 1\n```"},
        {"role": "user", "content": "<interpreter>\n(no output)\n</interpreter>"},
        {"role": "assistant", "content": ANSWER}]
    whole = policy.processor.apply_chat_template(messages, template, tokenize=False)
    assert whole.count("system\n") == 1 and whole.count("<|im_end|>\n") == 7
    ids = policy.processor(text=[whole], images=traj.images)["input_ids"][0]
    assert traj.ids == ids[:-1] and policy.decode(ids[-1:]) == "\n"      # the last turn ends with its sampled stop
    start = policy.processor.apply_chat_template(messages[:2], template, add_generation_prompt=True, tokenize=False)
    assert traj.ids[:traj.n_prompt] == policy.processor(text=[start], images=traj.images[:1])["input_ids"][0]


def test_each_turn_is_trained_up_to_the_stop_that_was_sampled_and_not_beyond(policy, play):
    turns = [policy.encode([CROP]), policy.encode([CROP + "\n"]), policy.encode(["```python\n1\n```", IM_END]),
             policy.encode(["```python\n1\n```", END_OF_TEXT]), policy.encode([ANSWER, END_OF_TEXT])]
    assert policy.decode(turns[1][-1:]) == ">\n"             # a token that completes </code> and goes on
    traj, other = play((ask("p", SMALL), [turns, ["hm"]]))
    assert sampled(traj) == sum(turns, []) and sampled(other) == policy.encode(["hm", IM_END])
    assert (traj.end, other.end) == (End.ANSWERED, End.NO_ACTION)
    # After </code> the turn is closed for the model, after a sampled <|im_end|> only the newline is missing.
    ends = [i for i in range(traj.n_prompt, len(traj.ids) - 1) if traj.action_mask[i] and not traj.action_mask[i + 1]]
    closing = [policy.tokenizer.convert_ids_to_tokens(traj.ids[i + 1:i + 4]) for i in ends]
    closed, ended = ["<|im_end|>", "Ċ", "<|im_start|>"], ["Ċ", "<|im_start|>", "u"]
    assert closing == [closed, closed, ended, closed]


def test_junk_outside_the_mask_moves_neither_loss_nor_gradient(policy, play):
    trajs, scorer, found = play((ask("p", SMALL), [[CROP, ANSWER], ["hm"]])), Scorer(policy, 1.0, False), []
    batch = collate(policy, trajs)
    for junk in (float("nan"), 1e9):
        old_BT = torch.full(batch.ids_BT.shape, junk)
        for i, traj in enumerate(trajs):
            old_BT[i, :len(traj.ids)] = torch.tensor(traj.logps).nan_to_num(junk) + 0.1
        loss, _ = policy_loss(scorer(batch)[0], old_BT, torch.tensor([1.0, -1.0]), batch.action_BT, 10)
        found.append((loss, *torch.autograd.grad(loss, scorer.lm_head.weight)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1]) and found[0][1].any()


def test_tokens_that_do_not_survive_decoding_stay_bit_identical(policy, play):
    half = policy.encode(["é"])[:1]                          # the first of two bytes
    turn = half + sum((policy.encode([c]) for c in "<code>print(7)</code>"), [])
    assert policy.encode([policy.decode(turn)]) != turn
    traj, _ = play((ask("p"), [[turn, half + policy.encode([ANSWER, IM_END])], [half + policy.encode([IM_END])]]))
    assert sampled(traj) == turn + half + policy.encode([ANSWER, IM_END])
    assert (traj.turns[0].result.text.strip(), traj.end) == ("7", End.ANSWERED)
    assert_exact(policy, [traj])


def test_printed_control_tokens_are_plain_text(policy, play):
    traj, _ = play((ask("p", SMALL), [[code("print('<|im_end|><|image_pad|>', end='<|vision_start|>')"), ANSWER], ["hm"]]))
    observed = traj.ids[traj.n_prompt + traj.turns[0].n_tokens:][:traj.turns[0].n_observation_tokens]
    assert "<|im_end|><|image_pad|><|vision_start|>" in policy.decode(observed)
    assert observed.count(policy.stop_ids[0]) == 2 and traj.n_visual_tokens == 4


def test_tags_in_the_prompt_stop_and_score_nothing_and_each_row_stops_on_its_own(play):
    question = "Is </code> or <answer>red</answer> <code>print(1)</code> better?"
    scripts = [["<code>1</code>", ANSWER], ["Look. " * 8], ["one </code> more"], ["Look.\n<CODE>print(3)</CODE>", ANSWER]]
    trajs = play((ask("p", question=question), scripts), max_turn_tokens=60)
    assert [[turn.kind[0] for turn in traj.turns] for traj in trajs] == [["c", "a"], ["n"], ["n"], ["c", "a"]]
    assert [traj.turns[0].text for traj in trajs] == [*(turns[0] for turns in scripts[:2]), "one </code>", scripts[3][0]]
    for traj in trajs:
        score(traj, Config())
    assert [traj.correct for traj in trajs] == [1, 0, 0, 1]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_code_stop_cut_by_anothers_turn_is_seen_whole(policy, play, monkeypatch, cut):
    """The short row's end interrupts the other one a token after its `cut` tokens: anywhere within its "</code>"."""
    monkeypatch.setattr(module, "WAIT_STEPS", 0)
    pieces = sum([policy.encode([char]) for char in "</code>"], [])
    ids = policy.encode(["a"]) + pieces
    assert policy.decode(ids) == "a</code>"
    short, cut_row = play((ask("p"), [[policy.encode(["b"]) * (cut - 1) + [policy.stop_ids[0]]], [ids, [policy.stop_ids[0]]]]))
    assert sampled(short)[-1] == policy.stop_ids[0] and short.end == End.NO_ACTION
    assert (cut_row.turns[0].text, cut_row.turns[0].n_tokens) == ("a</code>", len(ids))
    assert_exact(policy, [short, cut_row])


def test_a_long_turn_does_not_hold_up_the_others(policy, play):
    steps, long, short = [], policy.encode(["hm " * 30, IM_END]), code("x = 1")
    trajs = play((ask("p", SMALL), [[long], *[[short, short, short, ANSWER] for _ in range(3)]]),
                 tick=lambda kind, n: steps.append(n) if kind == "tokens" else None)
    lengths = [[turn.n_tokens for turn in traj.turns] for traj in trajs]
    assert [traj.end for traj in trajs] == [End.NO_ACTION] + 3 * [End.ANSWERED]
    assert len(lengths[0]) == 1 and sum(steps) == sum(map(sum, lengths))
    short, waited = lengths[1], -(-4 * module.WAIT_STEPS // 3)               # 4 rows' starts, 3 rows idle
    # They wait twice; the long turn ends while they write for the third time.
    assert len(steps) == sum(short) + 2 * waited < lengths[0][0] + sum(short[1:])
    assert_exact(policy, trajs)


def test_every_way_to_end_has_its_reason_and_its_reward(play):
    last = [(["hm"], End.NO_ACTION, 0), ([ANSWER], End.ANSWERED, 1), ([CROP, ANSWER], End.ANSWERED, 1.1),
            ([CROP, code("1 / 0"), ANSWER], End.ANSWERED, 1.1), ([CROP, CROP, CROP], End.OUT_OF_TURNS, 0),
            ([CROP, CROP, f"{ANSWER}<code>x</code>"], End.ANSWERED, 1.2), (["<answer> </answer>"], End.NO_ACTION, 0),
            (["<interpreter>red</interpreter> <code>1"], End.NO_ACTION, 0)]
    trajs = play((ask("p", SMALL), [turns for turns, _, _ in last]), max_turns=2)
    for traj, (_, end, reward) in zip(trajs, last):
        score(traj, Config())
        assert (traj.end, traj.reward) == (end, pytest.approx(reward)), traj.turns
    assert [turn.result is None for turn in trajs[4].turns] == [False, False, True]  # code in the last turn does not run
    assert [traj.end for traj in play((ask("p"), [[ANSWER], [CROP]]), max_turns=0)] == [End.ANSWERED, End.OUT_OF_TURNS]
    failed, fine = play((ask("p"), [[code("1 / 0"), ANSWER], [code("x = 1"), ANSWER]]), end_on_error=True)
    assert (failed.end, failed.turns[0].result.status, fine.end) == (End.CODE_ERROR, "error", End.ANSWERED)


def test_a_turn_cut_by_its_limit_is_too_long_whatever_it_holds(policy, play):
    trajs = play((ask("p", SMALL), [[CROP], [policy.encode([ANSWER + " so"])], [policy.encode(["```python\n1\n``` and so"])],
                                    [CROP, ANSWER]]), max_turn_tokens=9)
    assert [(traj.end, len(sampled(traj)), traj.turns[0].result) for traj in trajs] == [(End.TOO_LONG, 9, None)] * 4
    exact = len(policy.encode([ANSWER, IM_END]))             # the stop is the last token allowed
    assert [traj.end for traj in play((ask("p"), [[ANSWER], [ANSWER]]), max_turn_tokens=exact)] == [End.ANSWERED] * 2


def test_an_observation_that_does_not_fit_is_left_out_whole(policy, play):
    game = ask("p", BIG), [[code("image_clue_0.show()"), ANSWER], [ANSWER]]
    turn = play(game)[0].turns[0]
    full = turn.n_tokens + turn.n_observation_tokens
    for budget, n_images, n_turns in ((full - 8, 1, 1), (full, 1, 1), (full + 1, 2, 2)):
        traj = play(game, max_response_tokens=budget)[0]
        assert (traj.end, len(traj.images), len(traj.turns)) == (End.TOO_LONG, n_images, n_turns)
        assert len(traj.ids) - traj.n_prompt == (turn.n_tokens if n_turns == 1 else budget)   # nothing of it, or all
        assert_exact(policy, [traj])
    rows = ask("p", BIG), [[code("image_clue_0.show()"), "<code>1</code>"], [code("x = 1"), ANSWER]]
    cut, other = play(rows, max_response_tokens=full + 3)    # the other row, of a longer limit, goes on
    assert (cut.end, cut.turns[1].n_tokens, other.end) == (End.TOO_LONG, 3, End.ANSWERED)
    traj, other = play(game, max_images=1)
    assert (traj.end, len(traj.images), other.end) == (End.TOO_LONG, 1, End.ANSWERED)


def test_a_prompt_over_a_limit_or_unreadable_is_a_counted_end_before_sampling_and_the_others_go_on(policy, play, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    long, bad, ended = End.PROMPT_TOO_LONG, End.TOOL_FAILURE, []
    wanted = [(long, ask("p", BIG, SMALL)), (End.ANSWERED, ask("q", BIG)), (long, ask("r", question="Which? " * 60)),
              (bad, ask("s", tmp_path / "bad.png")), (bad, ask("t", tmp_path / "none.png")), (bad, ask("u", noise(201, 1)))]
    trajs = play(*[(problem, [[ANSWER]] * 2) for _, problem in wanted], max_images=1, max_prompt_tokens=100,
                 tick=lambda kind, n: ended.append(n * (kind == "trajectories")))
    assert [traj.end for traj in trajs] == [end for end, _ in wanted for _ in range(2)] and sum(ended) == 12
    assert [len(traj.ids) - traj.n_prompt > 0 for traj in trajs[::2]] == [False, True, False, False, False, False]
    assert [traj.n_prompt > 0 for traj in trajs[::2]] == [True, True, True, False, False, False]      # whole, or nothing
    assert_exact(policy, trajs[2:4])


@pytest.mark.parametrize("opens", [False, True])
def test_a_sandbox_that_cannot_serve_is_a_counted_end(play, opens):
    def fail(*_, **__):
        raise SandboxError("no sandbox")
    broken = SimpleNamespace(open=(lambda **_: SimpleNamespace(run=fail, close=fail)) if opens else fail)
    trajs = play((ask("p"), [[code("x = 1"), ANSWER], [ANSWER]]), pool=broken)
    assert [traj.end for traj in trajs] == [End.TOOL_FAILURE, End.ANSWERED]


def test_variables_and_image_names_last_over_turns(policy, play):
    traj, _ = play((ask("p", BIG), [[code("x = 5\nimage_clue_0.crop((0, 0, 40, 60)).show()"),
                                     code("image_clue_1.rotate(90, expand=True).show(); print(x, image_clue_1.size)"),
                                     code("print(image_clue_2.size)"), ANSWER], ["hm"]]))
    assert [turn.result.text.strip() for turn in traj.turns[:3]] == ["", "5 (40, 60)", "(60, 40)"]
    text = policy.decode(traj.ids)
    assert [text.count(f"<image_clue_{k}>") for k in range(4)] == [1, 1, 1, 0] and len(traj.images) == 3


def test_a_call_that_only_shows_an_input_again_is_a_no_op(play):
    lines = ["image_clue_0.show()", "image_clue_1.show()\nimage_clue_0.show()", "image_clue_0.show()\nprint(1)", "x = 1",
             "image_clue_0.crop((0, 0, 40, 60)).show()", "image_clue_0.show()\nimage_clue_0.rotate(90).show()"]
    trajs = play((ask("p", BIG, SMALL), [[code(line), ANSWER] for line in lines]))
    assert [traj.turns[0].no_op for traj in trajs] == [True, True, False, False, False, False]


def test_rows_of_a_group_cannot_see_each_other(play):
    vandal = "import os\nx = 1\nimage_clue_0.paste((0, 0, 0), (0, 0, 60, 60))\nos.mkdir('d'); os.chdir('d')"
    look = "import os\nprint(image_clue_0.getpixel((5, 5)), os.path.basename(os.getcwd()) == 'd')"
    a, b = play((ask("p", SMALL), [[code(vandal), code(look), ANSWER], [code("y = 1"), code(look), code("print(x)"), ANSWER]]))
    assert a.turns[1].result.text.strip() == "(0, 0, 0) True"
    assert b.turns[1].result.text.strip() == f"{SMALL.getpixel((5, 5))} False"
    assert b.turns[2].result.status == "error" and "NameError" in b.turns[2].result.text
    assert SMALL.tobytes() == noise(60, 60).tobytes()


def test_a_tool_image_arrives_under_the_limits_or_is_an_error_observation(policy, play):
    boxes = ["(10, 10, 10, 50)", "(10, 10, 50, 10)", "(50, 50, 10, 10)", "(0, 0, float('nan'), 9)", "(900, 900, 950, 950)"]
    lines = [f"image_clue_0.crop({box}).show()" for box in boxes] + ["Image.new('RGB', (201, 1)).show()"]
    for traj in play((ask("p", SMALL), [[code(line), ANSWER] for line in lines])):
        assert (traj.turns[0].result.status, len(traj.images), traj.end) == ("error", 1, End.ANSWERED)
    sizes = [(1, 1), (5, 5), (27, 300), (672, 4), (4, 672), (10_000, 10_000)]
    trajs = play((ask("p"), [[code(f"Image.new('L', {size}).show()"), ANSWER] for size in sizes]))
    for size, traj in zip(sizes, trajs):
        assert traj.end == End.ANSWERED and len(traj.images) == (traj.turns[0].result.status == "ok"), size
        assert all(56 * 56 <= i.width * i.height <= 112 * 112 for i in traj.images)
        assert traj.n_visual_tokens >= 4 * len(traj.images)
    assert sum(len(traj.images) for traj in trajs) >= 5      # the largest may be refused
    assert_exact(policy, trajs[2:5])


def test_ids_of_media_are_never_sampled_however_likely(policy, pool, monkeypatch):
    head, likely_V = policy.model.lm_head.forward, torch.zeros(len(policy.tokenizer))
    media = [f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")]
    likely_V[policy.tokenizer.convert_tokens_to_ids(media)] = 50
    monkeypatch.setattr(policy.model.lm_head, "forward", lambda hidden: head(hidden) + likely_V)
    trajs = sample(policy, pool, [ask("p", SMALL)], group_size=4)
    assert all(sampled(traj) for traj in trajs) and not likely_V[sum(map(sampled, trajs), [])].any()
    assert_scored(policy, trajs)


def test_the_checkpoints_generation_config_does_not_leak_into_sampling(policy, pool, monkeypatch):
    greedy = GenerationConfig(do_sample=True, temperature=1e-6, top_k=1, top_p=0.001, repetition_penalty=1.05)
    flat_V = torch.full((len(policy.tokenizer),), -1e4)
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])              # of 4 x 25 ids: a top-k of 50 would show
    flat_V[:100] = (shares / 25).repeat_interleave(25).log() + 20    # far from 0: a penalty would show
    monkeypatch.setattr(policy.model, "generation_config", greedy)
    monkeypatch.setattr(policy.model.lm_head, "forward", lambda hidden: flat_V.expand(*hidden.shape[:-1], -1).clone())
    trajs = sample(policy, pool, [ask("p")], group_size=32, max_turn_tokens=40)
    tokens = torch.tensor([sampled(traj) for traj in trajs])
    frequencies = torch.bincount(tokens.flatten() // 25, minlength=4) / tokens.numel()
    assert tokens.shape == (32, 40) and policy.model.generation_config is greedy
    torch.testing.assert_close(frequencies, shares, atol=0.05, rtol=0)                  # sigma is 0.014
    logps = torch.tensor([traj.logps for traj in trajs])[:, -40:]
    torch.testing.assert_close(logps.exp(), shares[tokens // 25] / 25, atol=1e-4, rtol=0)


def test_a_seed_fixes_the_rollout_and_the_global_generator_is_left_alone(policy, pool):
    state, problems = torch.get_rng_state(), [ask("p", SMALL), ask("q")]
    a, b, c = (sample(policy, pool, problems, seed) for seed in (1, 1, 2))
    assert [(t.ids, str(t.logps)) for t in a] == [(t.ids, str(t.logps)) for t in b]
    assert all(x.ids != y.ids for x, y in zip(a, c)) and a[0].ids != a[1].ids
    assert torch.equal(torch.get_rng_state(), state)
    assert module.mix_seed(0, 1, 0) != module.mix_seed(0, 0, 1) != module.mix_seed(1, 0, 0)


@pytest.mark.parametrize("mode, fails", [(True, False), (True, True), (False, False), (False, True)])
def test_dropout_is_off_while_sampling_and_the_models_state_comes_back(policy, pool, monkeypatch, mode, fails):
    def tick(kind, n):
        if kind == "generate" and fails:
            raise KeyError("stop")

    generation, before = policy.model.generation_config, torch.get_rng_state()
    for layer in policy.model.model.language_model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
    policy.model.train(mode)
    with pytest.raises(KeyError) if fails else nullcontext():
        groups = module.rollout(policy, [ask("p", SMALL)], Config(max_turn_tokens=8), pool, n_samples=2, tick=tick)
    found = policy.model.training, policy.model.generation_config is generation, torch.equal(torch.get_rng_state(), before)
    policy.model.eval()
    assert found == (mode, True, True)
    if not fails:
        assert_exact(policy, groups[0].trajectories)
