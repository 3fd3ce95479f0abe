"""Configure Sphinx for the documentation site: `bash docs/build.sh` writes it to build/docs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]  # the extensions below, and the package that is documented
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # importing DeepSpeed does not look for a GPU

from mst_scale import __version__  # noqa: E402

project = "mst_scale"
author = "The mst_scale maintainers"
version = release = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "plain_pages", "plain_docstrings"]
root_doc = "index"

# Pages are plain Markdown, so that a code host shows them as well: headings are anchors, as there.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = ["myst.header"]  # pages of results are written by programs, and some begin with a second level

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"mst_scale {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
