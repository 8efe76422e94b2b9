"""Where converted models and what belongs to them are kept, for those who need no more than the place."""

from __future__ import annotations

import os
from pathlib import Path

#: The name of the model that is taken from the package index; its folder in the cache is called so too.
SMOLLM2 = "smollm2-135m-instruct"


def cache_folder() -> Path:
    """The folder that converted models are kept in: $LONGSTRAW_CACHE, or ~/.cache/longstraw."""
    return Path(os.environ.get("LONGSTRAW_CACHE") or Path.home() / ".cache" / "longstraw")
