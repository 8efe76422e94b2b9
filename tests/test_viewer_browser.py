"""The viewer in a real Chromium: no script error on any page, hostile text stays text, keys, live pages, dark and light."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator

import pytest
from viewer_made import Characters, addresses, fill, turn_of

from longstraw_agents.storage import Store, StoreConfig
from longstraw_agents.types import StopReason

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the viewer's packages are not installed")
from longstraw_agents import viewer_pages  # noqa: E402
from longstraw_agents.viewer import make_app  # noqa: E402

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]


@pytest.fixture(scope="module")
def writing(tmp_path_factory) -> Iterator[Store]:
    with Store.open(str(tmp_path_factory.mktemp("browser") / "store.sqlite")) as store:
        fill(store)
        yield store


@pytest.fixture(scope="module")
def address(writing: Store) -> Iterator[str]:
    """A server of its own on a free port."""
    decoder_of, viewer_pages.decoder_of = viewer_pages.decoder_of, lambda config: Characters()
    with Store.open(str(writing.database.path), create=False, config=StoreConfig(read_only=True)) as store:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = uvicorn.Server(uvicorn.Config(make_app(store), log_level="error"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True
            thread.join(10)
    viewer_pages.decoder_of = decoder_of


@pytest.fixture(scope="module")
def chromium() -> Iterator:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def tab(chromium, request) -> Iterator:
    """A page that fails the test for anything that the browser complains of."""
    with chromium.new_context(color_scheme=request.param, viewport={"width": 1200, "height": 800}) as context:
        page, complaints = context.new_page(), []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
        left = "net::ERR_ABORTED"  # asked while the page was left
        page.on("requestfailed", lambda asked: asked.failure != left and complaints.append(f"{asked.url}: {asked.failure}"))
        page.complaints, page.scheme = complaints, request.param
        yield page


def test_every_page_opens_without_a_complaint_and_runs_nothing_of_the_store(tab, address: str) -> None:
    for path in addresses():
        tab.goto(address + path, wait_until="load")
        assert tab.title().endswith("LongStraw Agents") and tab.locator(".planted").count() == 0
        assert tab.evaluate("document.querySelectorAll('main script, main img, main [onload], main [onerror]').length") == 0
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
    assert tab.complaints == []


def test_the_page_s_own_policy_would_stop_what_slipped_through(tab, address: str) -> None:
    tab.goto(address)
    tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=/x onerror=\"window.ran = 1\">')")
    tab.evaluate("const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)")
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.ran") is None and any("Content Security Policy" in text for text in tab.complaints)


def test_text_stands_out_from_its_ground_in_both_schemes(tab, address: str) -> None:
    """WCAG 2.1, 1.4.3: at least 4.5 to 1 (composited colours are opaque here)."""
    for path in ("/trajectories/t2?colour=log-probability", "/trajectories/t2?colour=advantage", "/groups/g1", "/runs/r1"):
        tab.goto(address + path)
        ratios = tab.evaluate(
            """() => {
              const part = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
              const light = (rgb) => { const [r, g, b] = rgb.match(/[\\d.]+/g).map(Number).map(part);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
              const ground = (e) => { for (; e; e = e.parentElement) {
                const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; } };
              return [...document.querySelectorAll('p, a, th, td, dt, dd, summary, .text span, .chip, button')].map((e) => {
                const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
                return [(a + 0.05) / (b + 0.05), e.className || e.tagName]; });
            }"""
        )
        assert len(ratios) > 10 and min(ratios)[0] >= 4.5, min(ratios)
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert dark == (tab.scheme == "dark")


def test_keys_move_open_and_search(tab, address: str) -> None:
    focused = lambda: tab.evaluate("document.activeElement.id")
    tab.goto(f"{address}/trajectories/t2")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")  # the first stop is the link that skips to the content
    assert focused() == "main"
    tab.keyboard.press("j")
    tab.keyboard.press("j")
    assert focused() == "turn-1"
    tab.keyboard.press("k")
    assert focused() == "turn-0"
    opened = "document.querySelectorAll('#turn-0 details[open]').length"
    before = tab.evaluate(opened)
    tab.keyboard.press("o")
    assert tab.evaluate(opened) != before
    tab.keyboard.press("/")
    assert focused() == "q"
    tab.keyboard.type("jk needle")
    assert tab.input_value("#q") == "jk needle"  # in a field letters are letters
    tab.goto(f"{address}/runs/r1/groups")
    tab.click("#keys")  # off
    tab.keyboard.press("j")
    assert focused() == "keys"
    tab.click("#keys")
    tab.keyboard.press("j")
    tab.keyboard.press("o")
    tab.wait_for_url("**/groups/g*")
    assert tab.complaints == []


def test_the_tree_s_boxes_are_links_for_the_keyboard(tab, address: str) -> None:
    tab.goto(f"{address}/groups/g1")
    tab.locator(".tree a").first.focus()
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/tokens?start=*")


def test_a_page_follows_the_run_and_keeps_what_is_open(tab, address: str, writing: Store) -> None:
    group = writing.add_group("r1", writing.groups("r1")[0].task, 1)
    name = writing.add_trajectory(group, 0)
    writing.append_turn(name, 0, turn_of("first", "one"))
    tab.goto(f"{address}/trajectories/{name}")
    tab.wait_for_timeout(500)
    tab.locator("#turn-0 summary").first.click()
    tab.focus("#turn-0")
    writing.append_turn(name, 1, turn_of("second", "two"))
    tab.wait_for_selector("#turn-1", timeout=15000)
    assert not tab.evaluate("document.querySelector('#turn-0 details').open")
    assert tab.evaluate("document.activeElement.id") == "turn-0" and "updated at" in tab.inner_text("#status")
    tab.click("#live")  # off: nothing moves any more
    writing.append_turn(name, 2, turn_of("third", "three"))
    tab.wait_for_timeout(5000)
    assert tab.locator("#turn-2").count() == 0
    tab.click("#live")
    tab.wait_for_selector("#turn-2", timeout=15000)
    writing.finish_trajectory(name, StopReason.ANSWERED, 1.0, {})
    assert tab.complaints == []


def test_search_goes_on_by_itself_to_the_end(tab, address: str, monkeypatch) -> None:
    from longstraw_agents import viewer_search

    monkeypatch.setattr(viewer_pages, "search", lambda *given, **named: viewer_search.search(*given, seconds=0.0, **named))
    tab.goto(f"{address}/search?q=needle&in=r1")
    playwright.expect(tab.locator("#status")).to_contain_text("turns found", timeout=60000)
    assert tab.locator("#hits > li").count() == 12 and "that is all" in tab.inner_text("#searched")
    assert tab.complaints == []


def test_pages_work_without_script(chromium, address: str) -> None:
    with chromium.new_context(java_script_enabled=False) as context:
        tab = context.new_page()
        tab.goto(f"{address}/runs/r1")
        tab.click("text=by spread of reward")
        tab.click("th a >> nth=0")
        tab.click("text=t2 >> nth=0")
        assert "Trajectory t2" in tab.inner_text("h1") and tab.locator(".switches").is_hidden()
