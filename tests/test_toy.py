"""The embedded tasks have the properties the runs rely on, and the shipped policy is a fair start for RL."""

from collections import Counter

import numpy as np
import pytest
from cold_start import Lessons, image_scene, picture_accuracy, teach, video_scene

from pyvision_mini.config import Config
from pyvision_mini.images import to_rgb
from pyvision_mini.policy import EMBEDDED, fit_image, load_policy
from pyvision_mini.reward import check_gold, score
from pyvision_mini.rollout import describe, rollout
from pyvision_mini.toy import QUADRANTS, clip, image_problems, video_problems


def scenes(n, seed=0):
    return [image_scene(np.random.default_rng([seed, i])) for i in range(n)]


@pytest.fixture(scope="module")
def shipped():
    return load_policy()


def test_problems_are_the_same_for_the_same_seed_and_differ_between_splits():
    pixels = [[p.images[0].tobytes() for p in image_problems(3, 5, split)] for split in ("train", "train", "val", "test")]
    assert pixels[0] == pixels[1]
    assert len({image for split in pixels[1:] for image in split}) == 9
    assert image_problems(2, 5)[0].images[0].tobytes() != image_problems(2, 6)[0].images[0].tobytes()
    assert len({p.id for split in ("train", "val", "test") for p in image_problems(3, 5, split)}) == 9


def test_every_colour_and_quadrant_comes_up_about_equally_often():
    some = scenes(600)
    assert all(60 <= n <= 145 for n in Counter(s.problem.answer for s in some).values())          # 100 each
    assert all(110 <= n <= 190 for n in Counter(p.name for s in some for p in s.places if p.tells).values())  # 150 each
    assert all(check_gold(s.problem) for s in some[:20])


def test_the_dot_is_in_one_quadrant_only_and_its_ring_cancels_it():
    for scene in scenes(20):
        rgb = np.asarray(to_rgb(scene.problem.images[0])).astype(float)
        strong = np.abs(rgb - 128).max(axis=-1) > 50
        inside = [strong[top:bottom, left:right].sum() for left, top, right, bottom in QUADRANTS.values()]
        told = [scene.places[k].tells for k in range(4)]
        assert [n > 0 for n in inside] == told
        rows, columns = np.nonzero(strong)
        patch = rgb[rows.min():rows.max() + 1, columns.min():columns.max() + 1]
        assert np.abs(patch.mean(axis=(0, 1)) - 128).max() < 8                     # dot and ring average to the grey


def test_an_image_costs_sixteen_tokens_whole_or_cropped(shipped):
    scene, seen = scenes(1)[0], {}
    for image in (scene.problem.images[0], *(place.shown for place in scene.places)):
        (one,) = shipped.see([to_rgb(image)], seen, 56 * 56, 112 * 112)
        assert len(one.features) == 16


def test_the_shipped_checkpoint_is_small():
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 5_000_000


def test_the_shipped_policy_tells_the_answer_from_the_right_picture(shipped):
    clips = [video_scene(np.random.default_rng([8, i])) for i in range(100)]
    assert picture_accuracy(shipped, Lessons(shipped), scenes(200, seed=1)) >= 0.97
    assert picture_accuracy(shipped, Lessons(shipped), clips) >= 0.97


def test_the_teacher_is_mediocre():
    rng, some = np.random.default_rng(0), scenes(30)
    taught = [(scene, teach(scene, rng)) for scene in some * 30]
    right = np.mean([scene.problem.answer in steps[-1].text for scene, steps in taught])
    calls = [step for _, steps in taught for step in steps[:-1]]
    assert 0.35 < right < 0.6
    assert 0.1 < np.mean([step.shown is None for step in calls]) < 0.2            # wrong code
    assert 0.05 < np.mean([step.code == "image_clue_0.show()" for step in calls]) < 0.15
    assert max(len(steps) for _, steps in taught) == 5                             # at most four looks and an answer


@pytest.mark.parametrize("problems", [image_problems, video_problems])
def test_the_cold_start_answers_some_calls_the_tool_mostly_and_makes_errors(problems, shipped, pool):
    cfg = Config()
    trajs = [g.trajectories[0] for g in rollout(shipped, problems(120, 3, "test"), cfg, pool, seed=1, n_samples=1)]
    for traj in trajs:
        score(traj, cfg)
    results = [turn.result for traj in trajs for turn in traj.turns if turn.result]
    assert 0.35 < np.mean([traj.correct for traj in trajs]) < 0.7     # 0.485 and 0.585 of 200, give or take 0.045 of 120
    assert np.mean([bool(traj.turns[0].result) for traj in trajs]) > 0.6
    assert 0.02 < np.mean([result.status == "error" for result in results]) < 0.4


def test_a_clip_is_found_again_by_what_it_shows_not_by_the_problems_name(tmp_path):
    def path(seed, name):
        return clip(np.random.default_rng(seed), name, tmp_path).problem.videos[0]
    assert path(0, "a") == path(0, "b") != path(1, "a")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_clip_says_nothing_by_its_name_and_shows_what_the_question_asks(tmp_path, pool):
    kinds = Counter()
    for i in range(12):
        scene = video_scene(np.random.default_rng([9, i]), tmp_path)
        problem = scene.problem
        path, = problem.videos
        assert problem.answer not in path.name and len(path.stem) == 16
        assert describe(problem, pool) is None
        n = int(problem.about.split(" s, ")[1].split()[0])
        assert 16 <= n <= 64 and "224x224" in problem.about
        session = pool.open(videos=problem.videos)
        for place in scene.places:
            result = session.run(place.code)
            assert result.status == "ok", result.text
            pair = (np.asarray(fit_image(to_rgb(im), 3136, 12544)).astype(int) for im in (result.images[0], place.shown))
            assert np.abs(np.subtract(*pair)).mean() < 3                           # the frame the teacher saw, but for H.264
        assert any(place.tells for place in scene.places) and session.run(scene.wrong[0]).status == "error"
        session.close()
        kinds[problem.source] += 1
    assert set(kinds) == {"when", "quarter"}
