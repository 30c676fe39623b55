"""Texts in pictures."""

from __future__ import annotations

LONGEST = 18


def plain(text: str, longest: int = LONGEST) -> str:
    r"""A text that matplotlib shows as it is: no formulas, no bytes that are no letters, not too long.

    >>> print(plain("p_1$^$"))
    p_1\$^\$
    """
    printable = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    short = printable if len(printable) <= longest else f"{printable[: longest - 1]}…"
    return short.replace("$", r"\$")
