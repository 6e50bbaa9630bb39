"""Say which built pages, and which of their tables, are wider than a screen: ``python -m docs.widths FOLDER``.

Chromium opens each page in a frame as wide as a phone, and in one as wide as a laptop.  Without Chromium nothing is
checked, which is said.
"""

from __future__ import annotations

import html
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = (400, 1400)

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FRAME = '<iframe width="{width}" height="900" src="{page}"></iframe>'
_MEASURE = """<script>
addEventListener("load", () => {
  const wide = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument;
    for (const part of [page.documentElement, ...page.querySelectorAll(".table-wrapper")])
      if (part.scrollWidth > part.clientWidth)
        wide.push([frame.getAttribute("src"), frame.width, part.tagName == "HTML" ? "the page" : "a table: " +
          part.innerText.trim().slice(0, 40), part.scrollWidth - part.clientWidth]);
  }
  document.body.innerHTML = "<pre id=wide></pre>";
  document.body.firstChild.textContent = JSON.stringify(wide);
});
</script>"""


def too_wide(folder: Path, browser: str) -> list[str]:
    """Return a line for each page or table that does not fit."""
    pages = sorted(path.as_uri() for path in folder.resolve().rglob("*.html"))
    if not pages:
        raise SystemExit(f"no page in {folder}: make docs builds them")
    frames = [_FRAME.format(width=width, page=page) for width in WIDTHS for page in pages]
    with tempfile.TemporaryDirectory() as own:
        index = Path(own, "index.html")
        index.write_text("\n".join([_MEASURE, *frames]))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars"]
        command = [browser, *options, f"--user-data-dir={own}/profile", "--dump-dom", index.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    found = dom.partition('<pre id="wide">')[2].partition("</pre>")[0]
    if not found:
        raise SystemExit(f"{browser} has measured nothing")
    return [
        f"{page.rpartition('/')[2]}, {width} pixels: {part} is {more} too wide"
        for page, width, part, more in json.loads(html.unescape(found))
    ]


def main() -> None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        print("no Chromium here: the widths of the pages are not checked")
        return
    lines = too_wide(Path(sys.argv[1]), browser)
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
