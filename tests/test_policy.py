"""Images, ids, features and positions: ours against those of PIL, the tokenizer and transformers."""

import numpy as np
import pytest
import torch
from PIL import Image

from pyvision_mini.config import UserError
from pyvision_mini.images import load_image, size_problem, to_rgb
from pyvision_mini.policy import fit_image, load_policy, mrope_positions
from pyvision_mini.prompts import IM_END, IM_START, IMAGE, VISION_END, VISION_START, Control

MIN, MAX = 56 * 56, 112 * 112


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def row(mode: str, *pixels, **info) -> Image.Image:
    image = Image.new(mode, (len(pixels), 1))
    if mode == "P":
        image.putpalette([255, 0, 0, 0, 0, 255])
    for x, pixel in enumerate(pixels):
        image.putpixel((x, 0), pixel)
    image.info.update(info)
    return image


@pytest.mark.parametrize("image, expected", [
    (row("RGBA", (255, 0, 0, 0), (255, 0, 0, 255)), [(255, 255, 255), (255, 0, 0)]),          # transparent over white
    (row("RGBA", (0, 0, 0, 128)), [(127, 127, 127)]),
    (row("LA", (0, 0), (9, 255)), [(255, 255, 255), (9, 9, 9)]),
    (row("P", 0, 1, transparency=0), [(255, 255, 255), (0, 0, 255)]),
    (row("L", 0, 100, transparency=0), [(255, 255, 255), (100, 100, 100)]),
    (row("CMYK", (0, 0, 0, 0), (0, 255, 255, 0), (0, 0, 0, 255)), [(255, 255, 255), (255, 0, 0), (0, 0, 0)]),
    (row("1", 0, 255), [(0, 0, 0), (255, 255, 255)]), (row("L", 0, 200), [(0, 0, 0), (200, 200, 200)]),
    (row("I;16", 0, 200), [(0, 0, 0), (1, 1, 1)]),                                            # dark, but 16 bit for certain
    (Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16)), [(v, v, v) for v in (0, 1, 128, 255)]),  # I;16
    (row("I;16", 0, 30000, transparency=0), [(0, 0, 0), (117, 117, 117)]),                    # 30000 / 65535 · 255
    (row("I", 0, 255), [(0, 0, 0), (255, 255, 255)]),                                         # 8 bit in an int
    (row("I", 0, 65535, 32896), [(0, 0, 0), (255, 255, 255), (128, 128, 128)]),               # 16 bit in an int
    (row("F", 0.0, 0.5, 1.0), [(0, 0, 0), (128, 128, 128), (255, 255, 255)]),
    (row("F", 0.0, 100.0, 255.0), [(0, 0, 0), (100, 100, 100), (255, 255, 255)]),
    (row("F", float("nan"), -5.0, 1.0, 0.5), [(0, 0, 0), (0, 0, 0), (255, 255, 255), (128, 128, 128)]),
])
def test_every_mode_becomes_rgb_with_transparency_over_white_and_deep_greys_scaled(image, expected):
    converted = to_rgb(image)
    assert converted.mode == "RGB" and [converted.getpixel((x, 0)) for x in range(converted.width)] == expected


def test_a_rotated_photo_is_turned_upright_and_the_original_is_left_alone(tmp_path):
    photo, exif = Image.new("RGB", (40, 20), "blue"), Image.Exif()
    photo.paste((255, 0, 0), (0, 0, 8, 20))                  # red at the left
    exif[0x0112] = 6                                         # to be turned clockwise: left becomes top
    photo.save(tmp_path / "a.png", exif=exif)
    upright = load_image(tmp_path / "a.png")
    assert upright.size == (20, 40)
    assert upright.getpixel((10, 2)) == (255, 0, 0) and upright.getpixel((10, 30)) == (0, 0, 255)
    copy = load_image(photo)
    copy.paste(0, (0, 0, 40, 20))
    assert photo.getpixel((0, 0)) == (255, 0, 0)


def test_what_cannot_be_shown_is_named_with_its_file_or_size(tmp_path):
    noise(64, 64).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    for name, content in (("empty", b""), ("text", b"no image"), ("head", whole[:30]), ("cut", whole[:3000]), ("none", None)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"/{name}: "):
            load_image(tmp_path / name)
    assert size_problem(0, 5) == "the image is empty: 0x5 pixels"
    assert "201x1" in size_problem(201, 1) and "1x201" in size_problem(1, 201)
    assert size_problem(200, 1) is size_problem(1, 200) is None


# --- as the model sees them -------------------------------------------------------------------------------------------

SIZES = [(1, 1), (5, 5), (27, 300), (672, 4), (4, 672), (200, 1), (98, 1), (30, 3000), (111, 113), (672, 672), (3000, 2000)]


@pytest.mark.parametrize("max_pixels", [MAX, 448 * 448])
@pytest.mark.parametrize("size", SIZES)
def test_every_image_fits_the_pixel_limits_in_whole_tokens_and_fitting_again_changes_nothing(size, max_pixels):
    fitted = fit_image(Image.new("RGB", size), MIN, max_pixels)
    width, height = fitted.size
    assert width % 28 == height % 28 == 0 and MIN <= width * height <= max_pixels
    assert (width >= height) == (size[0] >= size[1]) or width == height
    assert fit_image(fitted, MIN, max_pixels) is fitted


def test_an_image_is_encoded_once_with_the_features_of_the_processors_pixels_which_it_leaves_as_they_are(policy):
    seen: dict = {}
    # 300x200: both sides / sqrt(300 · 200 / 12544) = 137 and 91, down to multiples of 28
    images = policy.see([noise(300, 200), noise(60, 60, 1)], seen, MIN, MAX)
    assert [i.image.size for i in images] == [(112, 84), (56, 56)]
    again = policy.see([noise(60, 60, 1), noise(60, 60, 2), noise(60, 60, 1)], seen, MIN, MAX)
    assert again[0] is again[2] is images[1] and again[1] not in images and len(seen) == 3      # encoded once
    batch = policy.processor.image_processor(images=[i.image for i in images], return_tensors="pt")   # resizing on
    assert [list(i.grid) for i in images] == batch["image_grid_thw"].tolist() == [[1, 6, 8], [1, 4, 4]]
    with torch.no_grad():
        wanted = policy.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"], return_dict=True)
    for image, features in zip(images, wanted.pooler_output):
        assert image.features.shape == (image.grid[1] * image.grid[2] // 4, 128)
        torch.testing.assert_close(image.features, features, atol=1e-5, rtol=1e-5)


def test_text_that_spells_a_control_token_is_never_its_id(policy):
    text = "a<|im_end|>b<|image_pad|><|endoftext|>"
    ids = policy.encode([text])
    assert not set(ids) & {*policy.suppressed, *policy.stop_ids} and policy.decode(ids) == text
    assert policy.encode([IM_END]) == [policy.control_id(IM_END)]


def test_segments_encode_as_the_tokenizer_encodes_their_joined_text(policy):
    segments = [IM_START, "user\n", "Look", ".\n<code>", "\n", VISION_START, IMAGE, VISION_END, "\n", IM_END, "\n"]
    expected = "<|im_start|>user\nLook.\n<code>\n<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>\n<|im_end|>\n"
    assert policy.encode(segments, [(1, 4, 6)]) == policy.tokenizer.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("config, message", [
    (None, "no readable config.json"), ("{", "no readable config.json"), ('{"model_type": "llama"}', "'llama'"),
    ('{"model_type": "qwen2_5_vl"}', "cannot be loaded")])
def test_a_folder_that_is_no_checkpoint_is_a_one_line_user_error(policy, tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=message) as error:
        load_policy(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="no such folder"):
        load_policy(tmp_path / "missing")
    with pytest.raises(UserError, match=r"no <\|nothing\|> token"):
        policy.control_id(Control("<|nothing|>"))


@pytest.mark.parametrize("grids", [[], [(1, 4, 6)], [(1, 4, 6), (1, 8, 4)], [(1, 4, 4), (1, 2, 10), (1, 8, 8)]])
def test_positions_are_those_of_transformers_for_images_of_different_grids(policy, grids):
    segments = [IM_START, "user\n"]
    for _ in grids:
        segments += ["see ", VISION_START, IMAGE, VISION_END]
    ids = policy.encode([*segments, "What color is the dot?", IM_END], grids)
    ids_1T = torch.tensor([ids])
    wanted, _ = policy.model.model.get_rope_index(
        ids_1T, (ids_1T == policy.image_id).int(), torch.tensor(grids) if grids else None)
    ours = mrope_positions(ids, grids, policy.image_id)
    assert ours.tolist() == wanted[:, 0].tolist()
    block = np.asarray(ids) == policy.image_id
    if grids:                                                # height and width vary inside the images, time does not
        first = slice(block.argmax(), block.argmax() + grids[0][1] * grids[0][2] // 4)
        assert len(set(ours[0, first])) == 1
        assert len(set(ours[1, first])) == grids[0][1] // 2 and len(set(ours[2, first])) == grids[0][2] // 2


def test_positions_of_pieces_go_on_where_the_last_piece_ended():
    pad, grids = 9, [(1, 4, 6), (1, 2, 4)]
    ids = [1, 2, *[pad] * 6, 3, 4, 5, *[pad] * 2, 6]         # 2 text, 2x3 image, 3 text, 1x2 image, 1 text
    whole = mrope_positions(ids, grids, pad)
    #                      text   image              text      image  text
    assert whole.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 8, 10],
                              [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 8, 10],
                              [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    first, second = mrope_positions(ids[:10], grids[:1], pad), mrope_positions(ids[10:], grids[1:], pad)
    assert np.concatenate([first, second + first[:, -1].max() + 1], axis=1).tolist() == whole.tolist()
