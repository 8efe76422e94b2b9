"""The viewer's pages: what they show, to whom, and that nothing in a store becomes markup, script, or a write."""

from __future__ import annotations

import hashlib
import html
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser

import numpy as np
import pytest
from store_made import make_turn, write
from viewer_made import HOSTILE, Characters, addresses, fill, ids_of, turn_of

from longstraw_agents.errors import ConfigError
from longstraw_agents.storage import Store, StoreConfig, browse
from longstraw_agents.trainer.credit import packed
from longstraw_agents.types import StopReason, Task

pytest.importorskip("starlette", reason="the viewer's packages are not installed")
httpx = pytest.importorskip("httpx", reason="starlette's test client needs httpx")

from starlette.testclient import TestClient  # noqa: E402

from longstraw_agents import viewer_curves, viewer_pages, viewer_search, viewer_tokens  # noqa: E402
from longstraw_agents.viewer import ViewerConfig, make_app  # noqa: E402

LOCAL = "http://127.0.0.1:8322"


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("viewer") / "store.sqlite")
    with Store.open(path) as store:
        fill(store)
    return path


@pytest.fixture
def looking(filled: str) -> Iterator[Store]:
    with Store.open(filled, create=False, config=StoreConfig(read_only=True)) as store:
        yield store


@pytest.fixture
def client(looking: Store, monkeypatch) -> TestClient:
    monkeypatch.setattr(viewer_pages, "decoder_of", lambda config: Characters())
    return TestClient(make_app(looking), base_url=LOCAL)


class Elements(HTMLParser):
    """The elements of a page, and whether every one that must be closed is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


@pytest.mark.parametrize("address", addresses())
def test_hostile_text_is_text_on_every_page(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 200
    page = Elements(answer.text)
    assert not page.open
    scripts = [attributes for tag, attributes in page.found if tag == "script"]
    assert scripts == [{"src": "/static/view.js", "defer": None}]
    for tag, attributes in page.found:
        assert tag not in ("img", "iframe", "object", "style") and attributes.get("class") != "planted"
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "srcdoc")]
        for name in ("href", "action", "src"):
            assert re.match(r"[/?#]", attributes.get(name) or "/") and not (attributes.get(name) or "").startswith("//")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u202a-\u202e\u2066-\u2069]", answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("address", addresses())
def test_pages_can_be_found_one_s_way_in_without_sight(client: TestClient, address: str) -> None:
    page = Elements(client.get(address).text)
    tags = [tag for tag, _ in page.found]
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert tags.count("main") == tags.count("h1") == tags.count("header") == tags.count("footer") == 1
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for tag, attributes in page.found if tag == "a"]
    assert links[0] == "#main" and {name[1:] for name in links if name.startswith("#")} <= set(ids)
    labelled = {attributes.get("for") for tag, attributes in page.found if tag == "label"}
    for tag, attributes in page.found:
        if tag in ("input", "select") and attributes.get("type") != "hidden":
            assert attributes.get("id") in labelled or attributes.get("aria-label")
        if tag in ("nav", "section", "article") or attributes.get("role") in ("region", "img", "group"):
            assert attributes.get("aria-label") or attributes.get("aria-labelledby") in ids, (tag, attributes)
        if tag == "th":
            assert attributes.get("scope") in ("row", "col")
    assert next(attributes for tag, attributes in page.found if tag == "html")["lang"] == "en"


def test_hostile_text_is_shown(client: TestClient) -> None:
    shown = html.unescape(client.get("/trajectories/t2").text)
    for text in HOSTILE:
        for part in re.findall(r"[ -~]{3,}", text):
            assert part in shown
    assert "\\x1b[2J\\x00" in shown and "abc\\u202edlo\\u2066\\u200ftxt\\u2028end" in shown and "\\ud800 lone" in shown


def test_looking_changes_nothing(filled: str, client: TestClient) -> None:
    def content() -> tuple[str, list[str]]:
        connection = sqlite3.connect(filled)
        rows = list(connection.iterdump())
        connection.close()
        return hashlib.sha256(open(filled, "rb").read()).hexdigest(), rows

    before = content()
    for address in [*addresses(), "/state?of=all", "/state?of=r1", "/runs/r99", "/static/view.css"]:
        client.get(address)
        for method in ("post", "put", "patch", "delete"):
            assert getattr(client, method)(address).status_code in (404, 405)
    assert content() == before


def test_only_known_hosts_are_answered(client: TestClient, looking: Store) -> None:
    for host in ("127.0.0.1", "localhost:9", "[::1]:8322", "10.1.2.3"):
        assert client.get("/", headers={"host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8322", "", "[evil]", "127.1.evil:1"):
        for address in ("/", "/state?of=all", "/static/view.js"):
            assert client.get(address, headers={"host": host}).status_code == 421
    with_name = TestClient(make_app(looking, ViewerConfig(names=("box",))), base_url="http://box")
    assert with_name.get("/static/view.js").status_code == 200


def test_beyond_loopback_a_token_is_needed(looking: Store) -> None:
    with pytest.raises(ConfigError, match="token"):
        ViewerConfig(host="0.0.0.0")
    with pytest.raises(ConfigError, match="16"):
        ViewerConfig(host="0.0.0.0", token="short")
    token = "0123456789abcdef"
    client = TestClient(make_app(looking, ViewerConfig(host="0.0.0.0", token=token)), base_url="http://10.0.0.1")
    for address in ("/", "/state?of=all", "/static/view.js", "/?token=wrong", "/?token=%F0%9F%99%82"):
        assert client.get(address).status_code == 401
    assert client.get("/", headers={"authorization": f"Bearer {token}"}).status_code == 200
    answer = client.get(f"/search?q=a+b&token={token}", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/search?q=a+b"
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
    assert client.get("/").status_code == 200


def test_what_is_not_there_and_what_is_asked_wrongly(client: TestClient) -> None:
    for address in ("/runs/r9", "/groups/g99", "/trajectories/t999", "/runs/x", "/runs/r1/receipts/9", "/nothing", "/static/x"):
        assert client.get(address).status_code == 404
    for address in (
        "/runs/r1/groups?order=size", "/runs/r1?from=-1", "/trajectories/t1?turn=x", "/trajectories/t1?colour=red",
        "/compare?run=r1", "/search?q=a&in=r1&after=x", f"/search?q={'a' * 201}&in=r1", "/trajectories/t1?turn=²",
    ):  # fmt: skip
        answer = client.get(address)
        assert answer.status_code == 400 and "This cannot be shown" in answer.text
    assert client.get("/trajectories/t1?turn=999999").status_code == 200  # behind the end: the last page


def test_a_damaged_row_is_an_error_page(filled: str, tmp_path) -> None:
    copy = tmp_path / "damaged.sqlite"
    copy.write_bytes(open(filled, "rb").read())
    connection = sqlite3.connect(copy)
    connection.execute("UPDATE trajectories SET reward = 7 WHERE id = 2")
    connection.commit()
    connection.close()
    with Store.open(str(copy), create=False, config=StoreConfig(read_only=True)) as store:
        client = TestClient(make_app(store), base_url=LOCAL)
        answer = client.get("/trajectories/t2")
        assert answer.status_code == 500 and "seal" in answer.text and client.get("/groups/g2").status_code == 200


def test_the_run_s_page_has_every_curve(client: TestClient) -> None:
    shown = html.unescape(client.get("/runs/r1").text)
    for label in (
        "Reward. reward: 0.2 at step 1, 0.6 at step 3", "KL. kl old: 0.01 at step 1, 0.03 at step 3", "clip fraction: 0.1",
        "Entropy. entropy", "Mismatch of sampler and trainer. mismatch kl", "held-out, sampled: 0.5 at step 0", "trained: 333.3",
        "Memory by phase. replay: 101 at step 1, 103 at step 3", "answer: 0.25 at step 1",
    ):  # fmt: skip
        assert label in shown, label
    assert "held-out, sampled: 0.5 at step 0, 0.5 at step 0" in shown  # a control is no point of the curve


def test_groups_page_puts_the_widest_spread_first(tmp_path) -> None:
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        run = store.create_run("run", {})
        for index, rewards in enumerate([(0.5, 0.5), (0.0, 1.0), (0.25, 0.5)]):
            group = store.add_group(run, Task("x", index), 2)
            for member, reward in enumerate(rewards):
                write(store, group, member, [make_turn(member)], reward=reward)
        client = TestClient(make_app(store), base_url=LOCAL)
        names = lambda address: re.findall(r'<a href="/groups/(g\d)"', client.get(address).text)
        assert names("/runs/r1/groups") == ["g2", "g3", "g1"] and names("/runs/r1/groups?order=oldest") == ["g1", "g2", "g3"]
        assert names("/runs/r1/groups?purpose=eval") == []


def test_tokens_have_their_own_numbers(tmp_path) -> None:
    """Against the whole trajectory: whatever the range, a token's numbers are those of its position."""
    receipt = {"credit": {"t": [[3, 5, 1.0], [8, 10, -0.5]]}, "log_ratio": {"t": packed([0.1, 0.2, 0.3, 0.4])}}
    behaviour = np.array([np.nan] * 3 + [-1, -2] + [np.nan] * 3 + [-3, -4], np.float32)
    whole = viewer_tokens.token_numbers(0, behaviour, receipt, "t")
    assert np.allclose(whole.ratio[[3, 4, 8, 9]], np.exp([0.1, 0.2, 0.3, 0.4]), rtol=1e-3)
    assert whole.advantage[[3, 4, 8, 9]].tolist() == [1, 1, -0.5, -0.5] and np.isnan(whole.advantage[[0, 5, 7]]).all()
    for start in range(10):
        for stop in range(start, 11):
            part = viewer_tokens.token_numbers(start, behaviour[start:stop], receipt, "t")
            cut = whole.slice(start, stop)
            for name in ("logp", "advantage", "ratio"):
                assert np.array_equal(getattr(part, name), getattr(cut, name), equal_nan=True)
    assert viewer_tokens.classes(whole, "advantage")[2:6] == ["", "p2", "p2", ""]
    assert viewer_tokens.classes(whole, "log-probability")[8:] == ["l5", "l5"]
    assert viewer_tokens.classes(whole, "mask") == ["", "", "", "act", "act", "", "", "", "act", "act"]


def test_long_parts_are_folded_and_paged(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(viewer_pages, "decoder_of", lambda config: Characters())
    text = "".join(chr(0x4E00 + i) for i in range(5000))
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        name = write(store, store.add_group(store.create_run("run", {}), Task("x", 0), 1), 0, [turn_of(text, "ab")] * 50)
        client = TestClient(make_app(store), base_url=LOCAL)
        first = client.get(f"/trajectories/{name}").text
        assert first.count("<article") == viewer_pages.TURNS and text[:160] in first and text[161] not in first
        assert "4,680 tokens more" in first and "0 to 20 of 50 turns" in first
        assert "turn-20" in client.get(f"/trajectories/{name}?turn=20").text
        assert "turn-3" in client.get(f"/trajectories/{name}?position=16000").text
        shown, start = "", 0
        for start in range(0, 5002, viewer_pages.TOKENS):
            page = client.get(f"/trajectories/{name}/tokens?start={start}").text
            shown += "".join(re.findall(r"[一-鿿]", page))
        assert shown.startswith(text) and start > 0


def test_the_tree_s_picture_covers_all_that_is_shared(client: TestClient, looking: Store) -> None:
    text = html.unescape(client.get("/groups/g1").text)
    told = re.findall(r'aria-label="tokens ([\d,]+) to ([\d,]+) of (\d+) trajector[^"]*: ([^"]*)"', text)
    number = lambda shown: int(shown.replace(",", ""))
    lengths = [row.length for row in looking.trajectories("g1")]
    assert sum((number(stop) - number(start)) * int(count) for start, stop, count, _ in told) == sum(lengths) - len(lengths)
    assert {role for _, _, count, role in told if count == "4"} == {"captured once for all that share it, then reversed"}
    assert all("replayed" in role for _, _, count, role in told if count == "1")
    assert "Inputs that the whole of step 1 ran" in text


def test_search_finds_every_turn_that_holds_the_text_and_goes_on_where_it_stopped(looking: Store) -> None:
    def all_of(query: str, seconds: float, **scope) -> list[tuple[str | None, int, bool]]:
        hits, after, pages = [], None, 0
        while pages == 0 or after is not None:
            found = viewer_search.search(looking, "r1", Characters(), query, after=after, seconds=seconds, **scope)
            hits += [(hit.trajectory_id, hit.turn, hit.action) for hit in found.hits]
            after, pages = found.rest, pages + 1
        assert seconds or pages > 3
        return hits

    for query in ("needle", "DONE 2", "begun", "nothing of it", "<script>"):
        assert sorted(all_of(query, 10)) == sorted(all_of(query, 0)), query
    assert sorted(all_of("done 2", 10)) == [("t11", 1, True), ("t3", 1, True), ("t7", 1, True)]
    assert all_of("begun", 10) == [("t13", 0, False)] and all_of("done 2", 0, trajectory_id="t2") == []


def test_a_hit_across_stored_spans_and_pages_is_seen(tmp_path) -> None:
    text = "x" * 4090 + "needle in the middle" + "y" * 5000
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        run = store.create_run("run", {})
        write(store, store.add_group(run, Task("x", 0), 1), 0, [turn_of(text, "a")])
        for seconds in (10.0, 0.0):
            found, after, first = [], None, True
            while first or after:
                page = viewer_search.search(store, run, Characters(), "NEEDLE IN", after=after, seconds=seconds)
                found, after, first = found + page.hits, page.rest, False
            assert [(hit.turn, hit.found) for hit in found] == [(0, "needle in")]


def test_live_stamps_change_with_what_is_shown(tmp_path) -> None:
    with Store.open(str(tmp_path / "store.sqlite")) as store:
        client = TestClient(make_app(store), base_url=LOCAL)
        run = store.create_run("run", {})
        group = store.add_group(run, Task("x", 0), 1)
        name = store.add_trajectory(group, 0)
        seen = lambda: [client.get(f"/state?of={of}").json()["stamp"] for of in ("all", run, group, name)]
        before = seen()
        assert seen() == before
        store.append_turn(name, 0, make_turn(1))
        during = seen()
        assert all(a != b for a, b in zip(before, during, strict=True))
        store.finish_trajectory(name, StopReason.ANSWERED, 1.0, {})
        assert all(a != b for a, b in zip(during, seen(), strict=True))
        assert client.get("/state?of=r9").status_code == 404


def test_steps_are_read_once(looking: Store, monkeypatch) -> None:
    site, asked = viewer_pages.Site(looking), []
    steps = looking.steps
    monkeypatch.setattr(looking, "steps", lambda run, **kind: asked.append(kind["first"]) or steps(run, **kind))
    assert [r.step for r in site.readings("r1")] == [r.step for r in site.readings("r1")] == [1, 2, 3]
    assert asked == [0, 4]


def test_curves_are_thinned_to_their_extremes_and_comparison_names_both_runs() -> None:
    points = [(float(i), float(i == 777) - float(i == 5)) for i in range(5000)]
    kept = viewer_curves.thinned(points)
    assert len(kept) <= viewer_curves.MOST_POINTS and {(777.0, 1.0), (5.0, -1.0)} <= set(kept)
    assert list(kept) == sorted(kept)
    chart = viewer_curves.Chart("Reward", "", (viewer_curves.Series("reward", ((1.0, 0.5),)),))
    (both,) = viewer_curves.beside([chart], [chart], ("r1", "r2"))
    assert [series.name for series in both.series] == ["r1: reward", "r2: reward"]
    assert "nothing recorded" in viewer_curves.draw(viewer_curves.Chart("Empty"))


def test_ids_are_shown_where_no_tokenizer_is_at_hand(looking: Store) -> None:
    client = TestClient(make_app(looking), base_url=LOCAL)
    assert " ".join(map(str, ids_of("begun"))) in client.get("/trajectories/t13").text
    assert browse.run(looking, "r1").config["model"]["name"] == "/nowhere"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_command_serves_until_it_is_stopped(filled: str, host: str) -> None:
    pytest.importorskip("uvicorn", reason="the viewer's packages are not installed")
    command = [sys.executable, "-m", "longstraw_agents.cli", "view", filled, "--host", host, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        shown = process.stdout.readline().split()[0].replace("0.0.0.0", "127.0.0.1")
        assert ("?token=" in shown) == (host == "0.0.0.0")
        with httpx.Client(follow_redirects=True) as client:
            assert "<h1>Runs</h1>" in client.get(shown).text
        assert httpx.get(shown.split("?")[0]).status_code == (401 if "?" in shown else 200)
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
