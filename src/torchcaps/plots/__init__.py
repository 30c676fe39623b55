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
