"""The documentation as a site, and the reference of the configuration as the schema has it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_site_builds_strictly():
    """Into build/site, where `make docs` leaves it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    page = (ROOT / "build/site/quickstart/index.html").read_text(encoding="utf-8")
    for scheme in ("default", "slate"):
        assert re.search(f'<input[^>]*data-md-color-scheme="{scheme}"', page), (
            "the theme follows the reader by its toggles"
        )
    assert "fonts.googleapis" not in page and "cdn" not in page.lower(), (
        "a page that needs a network"
    )


GENERATED = ("configuration.md", "resume.md", "data.md", "metrics.md")


def test_the_reference_and_the_tables_are_those_of_the_code(tmp_path):
    """Where this fails, a key, an exit code, a format or a metric was changed: run `python docs/make_reference.py`."""
    for page in (*GENERATED, "make_reference.py"):
        shutil.copy(ROOT / "docs" / page, tmp_path)
    subprocess.run([sys.executable, "make_reference.py"], cwd=tmp_path, check=True)
    for page in GENERATED:
        assert (tmp_path / page).read_text(encoding="utf-8") == (
            ROOT / "docs" / page
        ).read_text(encoding="utf-8")
