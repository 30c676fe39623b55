"""Pictures as files."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

from matplotlib.figure import Figure

from torchcaps.atomic import write_atomically


def png(figure: Figure) -> bytes:
    """The picture as the content of a PNG file; the same picture has the same bytes."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that no font here has
        figure.savefig(content, format="png", dpi=120, metadata={"Software": None})
    return content.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write the picture whole or not at all. A link of that name is replaced, not followed."""
    write_atomically(path, png(figure))
