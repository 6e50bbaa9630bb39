"""``mpidist completion``: the script by which a shell completes the commands and their options.

The script holds all words.  So a key press starts no Python, which takes seconds from the file system of a cluster.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from mpidist.commands.job_control import VERBS
from mpidist.commands.main import COMMANDS
from mpidist.commands.parser import Parser
from mpidist.jobs.schedulers import SCHEDULERS

_EXAMPLES = """examples:
  mpidist completion bash > ~/.local/share/bash-completion/completions/mpidist
  mpidist completion zsh > ~/.zfunc/_mpidist                     with ~/.zfunc in fpath

It needs the package shtab, once: pip install shtab
"""

#: What the first words of ``mpidist job`` may be, files aside.
_JOB_WORDS = f"""_mpidist_words() {{
    compgen -W "{" ".join([*SCHEDULERS, *VERBS])}" -- "$1"
    compgen -f -- "$1"
}}"""


def parser() -> Parser:
    """Return the parser of ``mpidist completion``'s arguments."""
    parser = Parser("completion", "Print a script by which a shell completes commands and options.", _EXAMPLES)
    parser.add_argument("shell", choices=("bash", "zsh"), nargs="?", default="bash", help="whose script (bash)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the script, and return the exit status; Local."""
    shell = parser().parse_args(argv).shell
    try:
        shtab: Any = importlib.import_module("shtab")  # its annotations are not those of its documentation
    except ModuleNotFoundError:
        print("mpidist completion: it needs the package shtab: pip install shtab", file=sys.stderr)
        return 1
    root = argparse.ArgumentParser(prog="mpidist")
    added = root.add_subparsers()
    for name, (module, what) in COMMANDS.items():
        command = importlib.import_module(module).parser()
        for action in command.actions:
            _complete(action, shtab.FILE, shtab.DIRECTORY)
        added.add_parser(name, parents=[command], add_help=False, help=what)
    print(shtab.complete(root, shell, preamble={"bash": _JOB_WORDS}))
    return 0


def _complete(action: argparse.Action, file: dict[str, str], folder: dict[str, str]) -> None:
    """Have the shell complete the value of an option or an argument that is a file or a folder."""
    if action.dest == "words":
        function = {**file, "bash": "_mpidist_words"}
    elif action.metavar in ("FILE", "PATH") or action.dest == "program":
        function = file
    elif action.metavar in ("DIR", "FOLDER"):
        function = folder
    else:
        return
    action.complete = function  # type: ignore[attr-defined]
