"""Damage as a disk does it, and wrong artifacts whose manifests have valid checksums."""

import json
from pathlib import Path

from infini_llama.tasks.storage.artifacts import MANIFEST, checksum_of, file_checksum


def flip(path: Path, bit: int | None = None) -> None:
    """Flip one bit of a file, by default the lowest of its middle byte."""
    content = bytearray(path.read_bytes())
    bit = len(content) // 2 * 8 if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def forge(folder: Path, **fields: object) -> None:
    """Write other fields into a manifest, whose own checksum is right afterwards."""
    manifest = json.loads((folder / MANIFEST).read_bytes()) | fields
    manifest["self_checksum"] = checksum_of(
        {key: value for key, value in manifest.items() if key != "self_checksum"}
    )
    (folder / MANIFEST).write_text(
        json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8"
    )


def reseal(folder: Path, **content: object) -> str:
    """Make a manifest agree with the files as they are now, as a faulty builder or an attacker would; returns its digest."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name in manifest["files"]:
        manifest["files"][name] = {
            "size": (folder / name).stat().st_size,
            "checksum": file_checksum(folder / name),
        }
    manifest["content"] |= content
    sealed = {
        name: manifest[name] for name in ("kind", "format_version", "files", "content")
    }
    forge(folder, **sealed, digest=checksum_of(sealed))
    return checksum_of(sealed)
