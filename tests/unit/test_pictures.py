"""The pictures of README and docs: their files are what `docs.pictures` draws, and what it draws is true and fits."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from docs.pictures import FOLDER, PICTURES, bars, files, layers, rounds
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


#: Em of a letter in the mean: DejaVu Sans, the widest of the fonts that are asked for, needs 0.52.
_EM = 0.54


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_text_is_text_large_enough_and_inside_the_picture(path):
    words = [each for each in ElementTree.fromstring(FILES[path]).iter() if each.tag.endswith("}text")]
    assert len(words) > 10
    for each in words:
        size, x = float(each.get("font-size")), float(each.get("x"))
        length = _EM * size * len(each.text or "")
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


def test_the_picture_of_readme_is_light_and_dark():
    readme = (ROOT / "README.md").read_text()
    assert re.search(r'<source media="\(prefers-color-scheme: dark\)" srcset="docs/pictures/step-dark.svg">', readme)
