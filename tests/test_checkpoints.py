"""Step folders: whole or absent, checked by digest, replaced after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from longstraw_agents.checkpoints import check_step, prune, step_folder, write_step
from longstraw_agents.errors import CorruptionError


def save(content: bytes):
    def write(folder: Path) -> None:
        (folder / "adapter.bin").write_bytes(content)
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "state.bin").write_bytes(content * 2)

    return write


def test_what_was_written_is_found_and_checked(tmp_path: Path) -> None:
    files = write_step(tmp_path / "steps", 3, save(b"abc"))
    assert sorted(files) == ["adapter.bin", "optimizer/state.bin"]
    folder = check_step(tmp_path / "steps", 3, files)
    assert (folder / "adapter.bin").read_bytes() == b"abc"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    files = write_step(tmp_path, 3, save(b"abc"))
    path = step_folder(tmp_path, 3) / "optimizer" / "state.bin"
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(b"abcabd" if damage == "flip" else b"abca")
    with pytest.raises(CorruptionError, match="state.bin"):
        check_step(tmp_path, 3, files)


def test_a_crash_while_writing_leaves_no_step_and_does_not_block_the_next(tmp_path: Path) -> None:
    def die(folder: Path) -> None:
        (folder / "adapter.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_step(tmp_path, 3, die)
    assert not step_folder(tmp_path, 3).exists()
    files = write_step(tmp_path, 3, save(b"abc"))
    check_step(tmp_path, 3, files)


def test_an_uncommitted_folder_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write_step(tmp_path, 3, save(b"old"))
    files = write_step(tmp_path, 3, save(b"new"))
    assert (check_step(tmp_path, 3, files) / "adapter.bin").read_bytes() == b"new"


def test_prune_keeps_what_it_is_told(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step, save(b"x"))
    (tmp_path / ".writing-000004").mkdir()
    prune(tmp_path, keep={1, 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003"]
