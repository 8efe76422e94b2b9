"""Secrets never reach the store, receipts or logs."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from sqlalchemy import select
from store_made import make_turn

from longstraw_agents import redaction
from longstraw_agents.envs.mcp_tools import MCPServer
from longstraw_agents.errors import ConfigError
from longstraw_agents.policies.endpoint import EndpointConfig
from longstraw_agents.storage import Store, blobs, hide, redact
from longstraw_agents.storage.schema import Base
from longstraw_agents.types import StopReason, Task, ToolCall

SECRET = 'sk-l0ng/"secret"+äé'
FORMS = (SECRET, quote(SECRET, safe=""), base64.b64encode(SECRET.encode()).decode(), SECRET.replace('"', '\\"'))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)
    redaction._hidden.clear()
    redaction._pattern = None


def everything_stored(store: Store) -> bytes:
    """All values of all tables, blobs decompressed."""
    parts = []
    with store.database.engine.connect() as connection:
        for table in Base.metadata.sorted_tables:
            for row in connection.execute(select(table)).mappings():
                parts += [repr(value).encode() for value in row.values()]
                if table.name == "blobs":
                    parts.append(blobs.decompress(row["digest"], row["data"]))
    return b"\n".join(parts)


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_never_reaches_the_store(store: Store, form: str) -> None:
    hide(SECRET)
    text = f"Authorization: Bearer {form}; ok"
    run = store.create_run(f"run {form}", {"endpoint": {"headers": [text]}, form: 1})
    group = store.add_group(run, Task("e", 1, "train", {"key": text}), 1)
    trajectory = store.add_trajectory(group, 0)
    call = ToolCall(f"get {form}", {"url": text, "nested": [{form: form}]}, result=text, error=text)
    source = b"\xff" + text.encode()
    store.append_turn(trajectory, 0, make_turn(0, tool_calls=[call], observation_source=source))
    store.finish_trajectory(trajectory, StopReason.ANSWERED, 1.0, {})
    receipt, files = {"said": text}, {"adapter": text}
    store.commit_step(run, step=0, first_version=0, last_version=1, group_ids=[group], files=files, receipt=receipt)
    store.add_evaluation(run, f"heldout {form}", 1, {"note": text})
    kept = everything_stored(store)
    for known in FORMS:
        assert known.encode() not in kept and repr(known)[1:-1].encode() not in kept
    turn = store.turns(trajectory)[0]
    assert turn.observation_source == b"\xffAuthorization: Bearer [hidden]; ok"
    assert turn.tool_calls[0].result == "Authorization: Bearer [hidden]; ok"


def test_a_secret_never_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    hide(SECRET)
    log = logging.getLogger("longstraw_agents.test")
    with caplog.at_level(logging.INFO):
        log.info("calling %s with %r", "tool", {"key": SECRET})
        try:
            raise ValueError(f"the server refused {SECRET}")
        except ValueError:
            log.exception("failed")
    assert SECRET not in caplog.text and caplog.text.count("[hidden]") == 2


def test_an_endpoints_key_is_hidden_by_its_configuration() -> None:
    EndpointConfig("http://127.0.0.1/v1", "m", api_key="none")
    assert redact("none of it") == "none of it"
    EndpointConfig("http://127.0.0.1/v1", "m", api_key="sk-endpoint-key")
    assert redact("key sk-endpoint-key.") == "key [hidden]."


def test_a_tool_servers_secrets_are_hidden_when_it_is_given_them() -> None:
    MCPServer(["shop"], variables={"REGION": "northwest"}, secrets={"SHOP_KEY": "shop-key-1234"})
    assert redact("northwest shop-key-1234") == "northwest [hidden]"
    with pytest.raises(ConfigError, match="at least 6"):
        MCPServer(["shop"], secrets={"SHOP_KEY": "1234"})


def test_what_is_too_short_to_hide_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 6"):
        hide("abc")


def test_environments_text_is_cleaned_before_it_is_encoded() -> None:
    from longstraw_agents.episodes import World

    class Echo:
        def reset(self, **_: object) -> tuple[str, dict]:
            return f"your key is {SECRET}", {}

    hide(SECRET)
    world = World(lambda task: Echo(), Task("e", 1))
    assert world.reset().messages[0].content == "your key is [hidden]"
