"""The parser of a command's arguments: pages of help and refusals have one shape for all commands."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """The parser of ``mpidist COMMAND``.

    `what` says in the imperative what the command does; `more` stands below the options and begins with examples.
    """

    def __init__(self, command: str, what: str, more: str, **options: Any) -> None:
        super().__init__(
            prog=f"mpidist {command}",
            description=what,
            epilog=more,
            formatter_class=_Page,
            allow_abbrev=False,
            **options,
        )

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """The options and arguments that there are."""
        return self._actions

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Return the options; leave, with a suggestion, where one is unknown."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown, f"{self.prog} --help lists what there is")
        return found

    def print_help(self, file: Any = None) -> None:
        """Print the page of help; OSError where it cannot be written, which argparse's own keeps to itself."""
        print(self.format_help(), end="", file=file)

    def refuse(self, unknown: Sequence[str], hint: str, meant: str | None = None) -> NoReturn:
        """Leave because of unknown words, and name the first one's kind: say what is `meant`, else what is similar."""
        known = [option for action in self.actions for option in action.option_strings]
        kinds = {word: "option" if re.match(r"-\D", word) else "argument" for word in unknown}  # -3 is a value
        kind = kinds[unknown[0]]
        words = [word for word in kinds if kinds[word] == kind]
        close = [difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.7) for word in words]
        meant = meant or " and ".join(dict.fromkeys(match for matches in close for match in matches))
        self.error(f"there is no {kind} {' and no '.join(words)}; {f'did you mean {meant}?' if meant else hint}")


class _Page(argparse.RawDescriptionHelpFormatter):
    """Pages of one width, whatever the terminal's."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=120)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap the description, which is one line; leave the examples as they are."""
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)
