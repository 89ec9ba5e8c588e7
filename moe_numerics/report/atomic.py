"""Writes files so that a reader never sees half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_files(folder: Path, contents: Mapping[str, str]) -> dict[str, Path]:
    """Writes UTF-8 text files into `folder` (made if absent) and gives their paths by name.

    All are written under temporary names first and then moved to theirs, so that a full disk or an
    interruption leaves the files that were there. Raises OSError as the file system does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary: dict[str, str] = {}
    try:
        for name, text in contents.items():
            descriptor, temporary[name] = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            # mkstemp makes files that only their owner may read; a report is for everybody.
            os.chmod(temporary[name], 0o644)
        for name in contents:
            os.replace(temporary.pop(name), folder / name)
    finally:
        for leftover in temporary.values():
            Path(leftover).unlink(missing_ok=True)
    return {name: folder / name for name in contents}
