"""The pictures of README and docs: their files are what `docs.pictures` draws, and what it draws is true and fits."""

from __future__ import annotations

import json
import re
from math import log2
from statistics import median
from xml.etree import ElementTree

import pytest

from docs.pictures import FOLDER, PICTURES, bars, files, layers, rounds, scaling, timeline
from docs.pictures.axes import Axis
from docs.pictures.svg import SMALL, THEMES, WIDTH
from mpidist.schedules import table
from tests.helpers.pages import PAGES, ROOT

FILES = files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_what_the_code_draws(path):
    assert path.read_text() == FILES[path], "make pictures writes it anew"


def test_no_file_is_left_of_a_picture_that_is_drawn_no_more():
    assert set(FOLDER.glob("*.svg")) == set(FILES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_shows_each_picture(name):
    assert [page.name for page in PAGES if f"pictures/{name}-light.svg" in page.read_text()] != []


#: Em of a letter in the mean, and of a bold one: the widest of the fonts that are asked for has 0.52 and 0.59.
_EM, _BOLD_EM = 0.54, 0.6


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_text_is_text_large_enough_and_inside_the_picture(path):
    words = [each for each in ElementTree.fromstring(FILES[path]).iter() if each.tag.endswith("}text")]
    assert len(words) > 10
    for each in words:
        size, x = float(each.get("font-size")), float(each.get("x"))
        length = (_BOLD_EM if each.get("font-weight") else _EM) * size * len(each.text or "")
        begin = {"start": x, "middle": x - length / 2, "end": x - length}[each.get("text-anchor")]
        assert size >= SMALL and begin >= 0 and begin + length <= WIDTH, each.text


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    ("ink", "paper"),
    [
        *(
            (ink, paper)
            for ink in ("ink", "muted", "rank", "shared", "network", "failed")
            for paper in ("paper", "panel")
        ),
        *(("ink", f"{each}_pale") for each in ("rank", "shared", "network", "failed")),
        *(("shared", "shared_pale"), ("on", "rank")),
    ],
)
def test_text_has_the_contrast_that_wcag_asks_for(theme, ink, paper):
    low, high = sorted(_luminance(THEMES[theme][each]) for each in (ink, paper))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_an_algorithm_is_drawn_as_it_moves():
    played = rounds.play(table.algorithm("all_reduce", "ring"), 4)
    assert [each.reduce for each in played[1:]] == [True] * 3 + [False] * 3
    assert {(each.sender, each.receiver) for step in played for each in step.messages} == {
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 0),
    }
    assert played[0].counts == [[1] * 4] * 4 and played[-1].counts == [[4] * 4] * 4
    # after the reduce-scatter rank r alone has the whole sum of chunk r
    assert [[count == 4 for count in row] for row in played[3].counts] == [[r == c for c in range(4)] for r in range(4)]
    doubled = rounds.play(table.algorithm("all_reduce", "recursive_doubling"), 8)
    assert [each.counts[5] for each in doubled] == [[1], [2], [4], [8]]


def test_layers_import_only_what_is_below_them():
    order = [*dict.fromkeys(layers.rows().values())]  # the lowest first
    found = layers.imported()
    assert len(order) > 15 and ("collectives", "transports") in found
    assert [pair for pair in found if order.index(pair[0]) <= order.index(pair[1])] == []


def test_a_bar_is_the_median_over_the_launches(tmp_path, monkeypatch):
    rows = [
        [{"work": "w", "who": "a", "time_us": time}, {"work": "w", "who": "b", "time_us": 1.0}]
        for time in (9.0, 2.0, 4.0)
    ]
    (tmp_path / "some.json").write_text(json.dumps({"launches": [{"rows": each} for each in rows]}))
    monkeypatch.setattr(bars, "_RESULTS", tmp_path)
    assert bars.microseconds("some", "w", "a") == 4


def test_steps_of_pytorch_are_those_of_readme_and_of_the_pages():
    readme = (ROOT / "README.md").read_text()
    (row,) = re.findall(r"^\| training step of a PyTorch MLP of 2.2 million parameters \|.*$", readme, re.MULTILINE)
    drawn = [f"{bars.milliseconds('MLP, 2.2 million', who):.1f} ms" for who in ("mpidist", "DDP")]
    assert [cell.strip() for cell in row.split("|") if cell.strip().endswith(" ms")] == drawn
    launches = json.loads((ROOT / "benchmarks" / "results" / "torch_steps-2.json").read_text())["launches"]

    def ratios(who, of):
        steps = [[each["seconds"][model] for each in launches] for model in launches[0]["seconds"]]
        return [median(each[who] for each in found) / median(each[of] for each in found) for found in steps]

    (said,) = re.findall(r"a step takes (\S+) to (\S+) of the time of PyTorch's own class", _words("coming-from-ddp"))
    found = ratios("mpidist DDP", "DDP")
    assert said == (f"{min(found):.2f}", f"{max(found):.2f}")
    said = re.findall(r"up to (\S+) times", _words("torch"))
    assert said == [f"{max(ratios(who, 'nothing')):.2f}" for who in ("mpidist DDP", "DDP")]


def _words(page: str) -> str:
    """Return the text of a page on one line."""
    return re.sub(r"\s+", " ", (ROOT / "docs" / f"{page}.md").read_text())


def test_an_axis_is_even_or_by_decades():
    assert [Axis(0, 30, 100, 400).at(value) for value in (0, 10, 30)] == [100, 200, 400]
    # upwards, as y grows downwards
    assert [Axis(1, 1000, 350, 50, is_log=True).at(value) for value in (1, 10, 100, 1000)] == pytest.approx(
        [350, 250, 150, 50]
    )


def test_a_prediction_is_that_of_the_model():
    found = scaling.seconds()
    inside, between, local = scaling.MODEL.intra, scaling.MODEL.inter, scaling.RANKS_PER_NODE
    for ranks, seconds in found["recursive_doubling"].items():
        if log2(ranks) % 1 == 0:  # the whole buffer in each round; between nodes all ranks of one share its link
            near = log2(local) * (inside.alpha + scaling.BYTES * inside.beta)
            far = log2(ranks / local) * (between.alpha + local * scaling.BYTES * between.beta)
            assert seconds == pytest.approx(near + far)
    # latencies alone, of 2 (P - 1) rounds, are less than the ring takes
    assert all(times > 2 * (ranks - 1) * inside.alpha for ranks, times in found["ring"].items())
    assert {name: max(times) for name, times in found.items()} == dict.fromkeys(found, 100_000)
    assert "Predicted, not measured" in FILES[FOLDER / "scaling-light.svg"]


def test_the_page_says_what_is_predicted():
    found, words = scaling.seconds(), _words("simulate")
    best = {ranks: min(found, key=lambda name: found[name][ranks]) for ranks in found["ring"]}
    (last,) = re.findall(r"Up to (\d+) ranks the ring is the quickest", words)
    assert [ranks for ranks, name in best.items() if name == "ring"] == [r for r in best if r <= int(last)]
    (said,) = re.findall(r"stays at (\S+) ms up to 65 536 ranks.* on 100 000 ranks it takes (\S+) ms", words)
    assert said == tuple(f"{1e3 * found['rabenseifner'][ranks]:.1f}" for ranks in (65_536, 100_000))


def _event(rank, kind, begin, end):
    return {"ph": "X", "cat": kind, "pid": rank, "ts": 1000 * begin, "dur": 1000 * (end - begin)}


def test_a_step_is_computing_but_for_its_calls():
    events = [
        {"ph": "M", "name": "process_name", "pid": 0},
        *(_event(0, kind, *span) for kind, span in (("call", (1, 2)), ("arrive", (1, 2)))),  # in no step
        *(_event(0, "step", *span) for span in ((2, 4), (10, 20))),
        *(_event(0, kind, *span) for kind, span in (("call", (13, 18)), ("arrive", (14, 15)), ("pack", (15, 16)))),
    ]
    assert timeline.pieces(events, range(1, 2)) == [
        (0, "compute", 10, 13),
        (0, "wait", 13, 15),
        (0, "reduce", 15, 18),
        (0, "compute", 18, 20),
    ]


def test_the_trace_that_is_drawn_has_one_slow_rank():
    drawn = timeline.pieces(json.loads(timeline.TRACE.read_text())["traceEvents"], timeline.STEPS)
    waits = [each for each in drawn if each.kind == "wait"]
    steps = [sorted(each for each in waits if each.rank == rank) for rank in range(4)]
    assert [len(each) for each in steps] == [len(timeline.STEPS)] * 4
    for together in zip(*steps, strict=True):
        assert max(together, key=lambda each: each.begin).rank == 2
        # none has waited enough before the slow one has come
        assert all(each.end >= together[2].begin for each in together)


def test_the_picture_of_readme_is_light_and_dark():
    readme = (ROOT / "README.md").read_text()
    assert re.search(r'<source media="\(prefers-color-scheme: dark\)" srcset="docs/pictures/step-dark.svg">', readme)
