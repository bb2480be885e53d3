"""What data says, as text of a page or a terminal: nothing that it holds can act."""

import unicodedata
from html import escape

_WRITTEN = "\n\t\u200c\u200d"
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def visible(text: str) -> str:
    """Text whose invisible characters can be seen: `‹U+202E›` for one that turns the line around.

    Newlines, tabs and the joiners that emoji and some scripts are written with stay; a terminal's commands do not.
    """
    return "".join(char if _is_shown(char) else f"‹U+{ord(char):04X}›" for char in text)


def _is_shown(char: str) -> bool:
    return char in _WRITTEN or unicodedata.category(char) not in _INVISIBLE


def escaped(value: object) -> str:
    """Anything as text of HTML, in an attribute too."""
    return escape(visible(str(value)))
