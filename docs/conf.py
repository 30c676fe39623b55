"""Sphinx settings of the documentation: ``sphinx-build -W docs build/site``."""

import torchcaps

project = "torchcaps"
author = "The torchcaps authors"
version = release = torchcaps.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"torchcaps {version}"
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

napoleon_google_docstring = True
napoleon_numpy_docstring = False
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"Tensor": "Tensor"}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
nitpicky = True  # a reference to a public name that is not in these pages is an error
nitpick_ignore_regex = [("py:.*", r"(?!torchcaps\.(functional\.|ascent\.|\w+$)).*")]
