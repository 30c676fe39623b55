"""Code and commands found in Markdown."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code in one language, or without any."""
    text = path.read_text(encoding="utf-8")
    fenced = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for found, code in fenced if found == language]


def commands(path: Path) -> list[list[str]]:
    """The words after ``torchcaps`` of every command."""
    lines = [line for block in blocks(path, "") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("torchcaps ")]


def links(path: Path) -> list[str]:
    """Targets of links and pictures that are files, without what follows #."""
    targets = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    return [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
