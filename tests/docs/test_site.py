"""The documentation as a site, and the reference of the configuration as the schema has it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "site/quickstart/index.html").read_text(encoding="utf-8")
    for scheme in ("default", "slate"):
        assert re.search(f'<input[^>]*data-md-color-scheme="{scheme}"', page), (
            "the theme follows the reader by its toggles"
        )
    assert "fonts.googleapis" not in page and "cdn" not in page.lower(), "a page that needs a network"


def test_the_reference_is_that_of_the_schema(tmp_path):
    """Where this fails, a key was changed: run `python docs/make_reference.py`."""
    made = tmp_path / "configuration.md"
    program = "import sys; sys.path.insert(0, 'docs'); import make_reference; print(make_reference.reference(), end='')"
    made.write_text(
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )
    assert made.read_text() == (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
