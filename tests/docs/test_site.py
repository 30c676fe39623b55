"""The documentation site is built without a warning, and has everything that is public."""

import re
import subprocess
import sys

import pytest
from pages import PAGES, ROOT

import torchcaps


def test_the_site_builds_without_warnings(tmp_path):
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[docs]' -c constraints.txt")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "doctrees"]
    built = subprocess.run([*command, ROOT / "docs", tmp_path / "site"], capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    for page in PAGES:
        assert (tmp_path / "site" / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()
    page = re.sub(r"<[^>]+>", "", (tmp_path / "site/own-loop.html").read_text(encoding="utf-8"))
    assert "ascent = RoutingAscent(network, gamma=0.1)" in page, "the README's loop is not on the page"
    assert (tmp_path / "site/_images/coefficients.png").exists()


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    documented = set(re.findall(r"auto(?:class|function):: torchcaps\.(\w+)\n", text))
    assert documented == set(torchcaps.__all__)
