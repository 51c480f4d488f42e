"""What a tool call does, in the categories of PyVision (arXiv 2507.07998, section 4), by rules over its syntax tree.

One label per call: the first rule that fits, the rare and specific ones first. Names of what is called decide, not
those of variables, nor values: a rule-based label is a trend over thousands of calls, not a judgement of one.
"""

from __future__ import annotations

import ast

# label → names of called functions and used modules that give it away
RULES: list[tuple[str, str]] = [
    ("advanced: ocr", "pytesseract easyocr image_to_string image_to_data readtext paddleocr"),
    ("advanced: detection", "CascadeClassifier detectMultiScale HoughCircles HoughLines HoughLinesP matchTemplate findContours "
                            "blob_log find_peaks detectAndDecode goodFeaturesToTrack"),
    ("advanced: segmentation", "grabCut watershed threshold adaptiveThreshold inRange connectedComponents kmeans slic label "
                               "connectedComponentsWithStats floodFill Canny"),
    ("sketching: marks", "rectangle Rectangle circle Circle ellipse Ellipse scatter putText text annotate add_patch polygon "
                         "drawMarker drawContours"),
    ("sketching: lines", "line lines axhline axvline axline hlines vlines polylines arrow arrowedLine plot grid"),
    ("numerical: histogram", "hist histogram calcHist bincount bar hist2d imhist"),
    ("basic: rotate", "rotate rot90 transpose flip fliplr flipud warpAffine warpPerspective getRotationMatrix2D mirror"),
    ("basic: enhance", "ImageEnhance ImageFilter Contrast Sharpness Brightness Color enhance point equalizeHist autocontrast "
                       "equalize createCLAHE invert GaussianBlur medianBlur bilateralFilter gamma sharpen blur"),
    ("video: frame sampling", "frame_at get_batch asnumpy frame_times get_frame_timestamp get_avg_fps VideoReader"),
    ("basic: crop", "crop"),
    ("basic: enhance", "resize thumbnail zoom pyrUp"),       # after crop: an enlarged crop is a crop
    ("numerical: analysis", "mean std sum var median unique sqrt corrcoef argmax argmin argsort percentile norm polyfit "
                            "solve lstsq abs round sorted min max getpixel getcolors count_nonzero sympy math"),
]
REPLOT = set("imshow show figure subplots axis axes title suptitle set_title set_axis_off tight_layout array asarray".split())
WORDS = [(label, set(names.split())) for label, names in RULES]


def label_call(code: str, no_op: bool = False) -> str:
    """Label of one call. `no_op`: it only showed a whole input image again, which the rollout has seen."""
    if no_op:
        return "no-op: shown again"
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "invalid: no Python"
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    used = {getattr(func, "attr", getattr(func, "id", "")) for func in called}
    used |= {name for name in names if name[0].isupper() or name in ("math", "sympy")}      # ImageFilter.SHARPEN, math.pi
    used |= {alias.name.split(".")[0] for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    index = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    cuts = [[part for part in i.elts if isinstance(part, ast.Slice)] for i in index if isinstance(i, ast.Tuple)]
    if any(len(cut) >= 2 and any(part.lower or part.upper for part in cut) for cut in cuts):
        used.add("crop")                                     # image[top:bottom, left:right], not the channel image[:, :, 0]
    if index and any(name.startswith("video_clue") for name in names):
        used.add("frame_at")                                 # video_clue_0[120]
    has_sums = any(isinstance(node, ast.BinOp) for node in nodes)
    if has_sums and "print" in used:
        used.add("sum")                                      # print(3 * 7)
    if any(name.startswith("image_clue") for name in names) and used <= REPLOT and not has_sums and not index:
        return "no-op: shown again"                          # plt.imshow(image_clue_0), with axes around it
    return next((label for label, words in WORDS if words & used), "long tail")
