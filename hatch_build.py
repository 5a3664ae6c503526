"""Build hook: refuses an editable install of a checkout whose links were written as text files."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LinkCheck(BuildHookInterface[Any]):
    """Refuse an editable install without the links in src/infini_llama; a wheel needs none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folders = ("configs", "flows", "model", "tasks")
        missing = [
            name
            for name in folders
            if not Path(self.root, "src/infini_llama", name).is_dir()
        ]
        if version == "editable" and missing:
            raise SystemExit(
                f"src/infini_llama/{missing[0]} is not a link to {missing[0]}/, which an editable "
                "install imports: clone with git -c core.symlinks=true, or install without -e."
            )
