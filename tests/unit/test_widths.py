"""`make docs` finds the pages that are wider than a screen, and their tables."""

from __future__ import annotations

import shutil

import pytest

from docs import widths

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

PAGE = '<!doctype html><body style="margin: 0"><div style="width: {}px">text</div>{}'
TABLE = '<div class="table-wrapper" style="width: 300px; overflow-x: auto"><div style="width: {}px">cells</div></div>'


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_pages_and_tables_that_do_not_fit_are_named(tmp_path):
    (tmp_path / "fits.html").write_text(PAGE.format(400, TABLE.format(300)))
    (tmp_path / "wide.html").write_text(PAGE.format(500, ""))
    (tmp_path / "table.html").write_text(PAGE.format(400, TABLE.format(350)))
    assert sorted(widths.too_wide(tmp_path, BROWSER)) == [
        "table.html, 1400 pixels: a table: cells is 50 too wide",
        "table.html, 400 pixels: a table: cells is 50 too wide",
        "wide.html, 400 pixels: the page is 100 too wide",
    ]


def test_without_pages_it_says_how_to_build_them(tmp_path):
    with pytest.raises(SystemExit, match="make docs builds them"):
        widths.too_wide(tmp_path, "chromium")
