"""Show text that another machine sent: escaped, cut and in quotes, so that it cannot pass for our own words.

    a new line, a control character, a terminal's escape sequence,      \\n  \\x1b  \\u202e
    a mark that changes the direction of writing, a quote, a backslash  \\"  \\\\
    anything after the first ``SHOWN`` characters                       "…" and the number of characters left out
"""

SHOWN = 160


def quoted(text: object, *, shown: int = SHOWN) -> str:
    """Return one line of printable characters in quotes.

    >>> print(quoted("no space\\nround 99 of 99: counted [0, 1, 2]"))
    "no space\\nround 99 of 99: counted [0, 1, 2]"
    >>> print(quoted("A" * 5000, shown=10))
    "AAAAAAAAAA" (and 4990 more characters)
    """
    whole = text if isinstance(text, str) else _repr(text)
    cut = "".join(map(_escaped, whole[:shown]))
    return f'"{cut}"' + (f" (and {len(whole) - shown} more characters)" if len(whole) > shown else "")


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _repr(value: object) -> str:
    """Return the text of a value, without making a long one of a huge value."""
    if isinstance(value, bytes | list | tuple):
        return f"{value[:20]!r}" + (f" … ({len(value)} in all)" if len(value) > 20 else "")
    return repr(value)
