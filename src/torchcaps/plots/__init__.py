"""Pictures."""

import os
import sys

if "matplotlib" not in sys.modules and os.path.lexists("matplotlibrc"):
    # It would be read from the current folder, which may be somebody else's, and can ask for programs to be run.
    here = os.getcwd()
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    try:
        import matplotlib  # noqa: F401
    finally:
        os.chdir(here)

from matplotlib import font_manager, rcParams

_OTHER_SCRIPTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Arial Unicode MS"),
    *("Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo"),
)
"""Fonts with the letters that matplotlib's own lacks; those that are installed take over where it does."""
_installed = {font.name for font in font_manager.fontManager.ttflist}
rcParams["font.family"] = [*rcParams["font.family"], *(name for name in _OTHER_SCRIPTS if name in _installed)]
