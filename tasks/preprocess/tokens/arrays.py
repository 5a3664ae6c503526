"""Arrays on disk, in numpy's own format."""

from pathlib import Path

import numpy as np


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes `array` as .npy. On a full disk the error says so, which that of `np.save` does not (it carries no errno)."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)
