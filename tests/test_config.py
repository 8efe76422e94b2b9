"""TOML into dataclasses: what is refused, and what the message says."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstraw_agents import config
from longstraw_agents.errors import ConfigError


class Mode(enum.StrEnum):
    EXACT = "exact"
    DETACHED = "detached"


@dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    steps: int = 1

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate must be above 0, not {self.learning_rate}")


@dataclass(frozen=True)
class Settings:
    name: str
    optimizer: Optimizer = field(default_factory=Optimizer)
    mode: Mode = Mode.EXACT
    dtype: Literal["float32", "bfloat16"] = "float32"
    seeds: tuple[int, ...] = ()
    folder: Path | None = None
    clip: float | None = 1.0
    adapter: Optimizer | None = Optimizer()
    limit: float | str = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    verbose: bool = False


def load(tmp_path: Path, text: str, **overrides: Any) -> Settings:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return config.load(path, Settings, overrides)


def test_values_arrive_in_their_types(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        'name = "x"\nmode = "detached"\nseeds = [1, 2]\nfolder = "/tmp"\nlimit = "all"\n'
        '[options]\nrows = 3\n[optimizer]\nlearning_rate = 1\nbetas = [0.8, 0.9]\n',
    )
    assert settings == Settings(
        "x", Optimizer(1.0, (0.8, 0.9)), Mode.DETACHED, seeds=(1, 2), folder=Path("/tmp"), limit="all", options={"rows": 3}
    )
    assert isinstance(settings.optimizer.learning_rate, float)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('nam = "x"', ["unknown key 'nam'", "'name'"]),
        ('name = "x"\n[optimizer]\nlearningrate = 1.0', ["optimizer.learningrate", "'learning_rate'"]),
        ('name = "x"\n[optimizer]\nlearning_rate = -1.0', ["[optimizer]", "above 0"]),
        ('name = "x"\n[optimizer]\nlearning_rate = "1e-4"', ["optimizer.learning_rate", "a number", "'1e-4'"]),
        ('name = "x"\n[optimizer]\nsteps = 1.5', ["optimizer.steps", "an integer"]),
        ('name = "x"\n[optimizer]\nsteps = true', ["optimizer.steps", "an integer"]),
        ('name = "x"\n[optimizer]\nbetas = [0.9]', ["optimizer.betas", "2 entries"]),
        ('name = "x"\nseeds = [1, "2"]', ["seeds[1]", "an integer"]),
        ('name = "x"\nmode = "exakt"', ["mode", "'exact'"]),
        ('name = "x"\ndtype = "float16"', ["dtype", "float"]),
        ('name = "x"\nlimit = true', ["limit", "a number or a string"]),
        ('name = "x"\noptimizer = 3', ["optimizer", "a table"]),
        ('name = "x"\nverbose = 1', ["verbose", "true or false"]),
        ("verbose = true", ["lacks name"]),
        ("name = ", ["not valid TOML"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    for word in words:
        assert word in str(error.value)


def test_none_is_written_as_a_word(tmp_path: Path) -> None:
    settings = load(tmp_path, 'name = "none"\nclip = "none"\nadapter = "none"\nfolder = "none"')
    assert (settings.name, settings.clip, settings.adapter, settings.folder) == ("none", None, None, None)


def test_overrides_win_and_are_checked_alike(tmp_path: Path) -> None:
    assert load(tmp_path, 'name = "x"\n[optimizer]\nsteps = 2', **{"optimizer.steps": 5}).optimizer.steps == 5
    with pytest.raises(ConfigError, match="optimizer.stepz"):
        load(tmp_path, 'name = "x"', **{"optimizer.stepz": 5})


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        config.load(tmp_path / "none.toml", Settings)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    name=TEXT,
    rate=st.floats(1e-12, 1e3),
    mode=st.sampled_from(Mode),
    seeds=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    folder=st.sampled_from([None, Path("a b/c")]),
    clip=st.sampled_from([None, 1.0, 2.0]),
    adapter=st.sampled_from([None, Optimizer(), Optimizer(2.0)]),
    options=st.dictionaries(TEXT, VALUES, max_size=3),
)
def test_what_is_dumped_loads_to_an_equal_one(tmp_path_factory: Any, **fields: Any) -> None:
    settings = Settings(optimizer=Optimizer(fields.pop("rate")), **fields)
    path = tmp_path_factory.mktemp("dump") / "run.toml"
    path.write_text(config.dump(settings), encoding="utf-8", newline="")
    assert config.load(path, Settings) == settings
