"""The site: ``sphinx-build -W --keep-going -b html docs build/site``.

Pages are reStructuredText that GitHub's viewer shows, too, and notebooks with the outputs of a run. What the site adds
is in ``_extensions/``.
"""

import sys
from pathlib import Path

_DOCS = Path(__file__).parent
sys.path[:0] = [str(_DOCS / "_extensions"), str(_DOCS.parent)]

from nemo_lowprec import __version__  # noqa: E402

project = "nemo_lowprec"
version = release = __version__
copyright = "the authors of nemo_lowprec, Apache-2.0"
extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "myst_nb"),
    *("breakable_names", "llms_txt", "page_links", "tables_behind"),
]
exclude_patterns = ["_extensions"]
include_patterns = ["**.rst", "notebooks/*.ipynb"]
smartquotes = False
suppress_warnings = ["myst.header"]  # of the changelog, which has its title from the page

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
nb_execution_mode = "off"  # tests/packaging/test_notebooks.py runs them
tables_behind = ["measured", "advising"]
