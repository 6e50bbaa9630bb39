"""As a program it writes the SVG files."""

from __future__ import annotations

from docs.pictures import files

for path, text in files().items():
    path.write_text(text)
