"""The two files beside Arrow streams by which `datasets.load_from_disk` opens a folder."""

import json
from pathlib import Path
from typing import Any


def describe_for_datasets(folder: Path, files: list[str], features: dict[str, Any], fingerprint: str) -> None:
    """Writes state.json and dataset_info.json of the split that `folder` is called after.

    Args:
        files: names of its Arrow streams, in order.
        features: of each column, as `datasets.Features.to_dict` gives them.
        fingerprint: by which `datasets` knows its content.
    """
    state = {
        "_data_files": [{"filename": file} for file in files],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
