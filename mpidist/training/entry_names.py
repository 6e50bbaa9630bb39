"""The names of entries in a file: any text, coded where HDF5 would not find it again.

HDF5 takes "a//b", "/a/b" and "a/./b" for "a/b", and ends names at NUL.  Such parts of a name are coded with "%", as in
addresses of the web; all other names stand in the file as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection

#: The longest name, in bytes of the file: HDF5 has room for 64 KiB.
MOST_BYTES = 1 << 14

#: A part of a name that is nothing; what stands for a character; and what begins an attribute whose name was taken.
_NOTHING = "%"
_CHARACTERS = {"%25": "%", "%00": "\0", "%2E": "."}
_OTHER = "%."
_CODE = re.compile("|".join(map(re.escape, (*_CHARACTERS, _OTHER))))


def coded(name: str) -> str:
    """Return the name in the file; ValueError for one that no file can hold.  Local."""
    coded_name = "/".join(map(_coded_part, name.split("/")))
    try:
        length = len(coded_name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"the name {shortened(name)} is no text that UTF-8 can hold; give it another one") from None
    if length > MOST_BYTES:
        raise ValueError(
            f"the name {shortened(name)} has {length} bytes in a checkpoint, expected at most {MOST_BYTES}; give it a "
            "shorter one"
        )
    return coded_name


def coded_attribute(name: str, taken: Collection[str]) -> str:
    """Return the coded last part of a name as that of an attribute; those that are taken are not the user's.  Local."""
    return f"{_OTHER}{name}" if name in taken else name


def decoded(name: str) -> str:
    """Return the name of which `coded` and `coded_attribute` made this one.  Local."""
    if "%" not in name:
        return name
    parts = ("" if part == _NOTHING else part for part in name.split("/"))
    return "/".join(_CODE.sub(lambda code: _CHARACTERS.get(code[0], ""), part) for part in parts)


def shortened(name: str) -> str:
    """Return a name for messages: of a long one, the beginning.  Local."""
    return repr(name) if len(name) <= 100 else f"{name[:100]!r}..."


def _coded_part(part: str) -> str:
    if part in (".", ".."):
        return part.replace(".", "%2E")
    return part.replace("%", "%25").replace("\0", "%00") or _NOTHING
