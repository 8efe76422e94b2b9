"""Fixtures that several tests share: a store on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store_server import PostgreSQL, binaries

from longstraw_agents.storage import Store


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQL]:
    if binaries() is None:
        pytest.skip("PostgreSQL's server programs are not installed")
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    server = PostgreSQL()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def store_url(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite")
    return request.getfixturevalue("postgresql_server").url("store")


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with Store.open(store_url) as store:
        yield store
