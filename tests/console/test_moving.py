"""Moving over the log: dragging, links, stepping, going back, playing."""

import asyncio
import re
from collections import Counter
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.async_api import Request, expect

from tests.console.browser import NARROW, VIEWS, Console, ConsolePage

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.xdist_group("console")]


async def check_overview(console: Console, shown: ConsolePage) -> None:
    """The numbers of the overview are the API's at the position in the field."""
    at = await shown.position()
    fleet = await console.ask("fleet", at=at)
    assert fleet["position"] == at
    totals = fleet["totals"]
    await expect(shown.page.locator(".tile", has_text="Workers ready").locator(".tile-value")).to_have_text(
        f"{totals['ready']} of {totals['workers']}"
    )
    await expect(shown.page.locator(".tile", has_text="Requests open").locator(".tile-value")).to_have_text(
        f"{totals['requests_open']:,}"
    )
    await expect(
        shown.page.locator(".tile", has_text="Requests open").locator(".tile-detail")
    ).to_contain_text(f"{totals['running']:,} running, {totals['waiting']:,} waiting")


class InFlight:
    """The most requests that a page had on their way at once, by path."""

    def __init__(self, shown: ConsolePage) -> None:
        self._now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        shown.page.on("request", self._began)
        shown.page.on("requestfinished", self._ended)
        shown.page.on("requestfailed", self._ended)

    def _began(self, request: Request) -> None:
        path = urlsplit(request.url).path
        self._now[path] += 1
        self.most[path] = max(self.most[path], self._now[path])

    def _ended(self, request: Request) -> None:
        self._now[urlsplit(request.url).path] -= 1


async def test_dragging_under_load_shows_the_api_s_numbers(console: Console) -> None:
    async with console.page() as shown:
        await shown.open("overview", pool=console.pool)
        await expect(shown.page.locator(".live-button")).to_have_attribute("aria-pressed", "true")
        flights = InFlight(shown)
        box = await shown.page.locator("#position-slider").bounding_box()
        assert box is not None
        await shown.page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 18)
        await shown.page.mouse.down()
        for step in range(80):
            x = box["x"] + box["width"] * (0.98 - 0.5 * step / 80 if step < 50 else 0.2 + 0.3 * step / 80)
            await shown.page.mouse.move(x, box["y"] + 18)
        await shown.page.mouse.up()
        await expect(shown.page.locator(".live-button")).to_have_attribute("aria-pressed", "false")
        await shown.shown()
        await check_overview(console, shown)
        assert flights.most["/api/fleet"] == flights.most["/api/series"] == 1
        assert f"at={await shown.position()}" in shown.page.url


async def test_a_link_shows_the_same_elsewhere(console: Console) -> None:
    log = await console.ask("log")
    at = (log["first"] + log["last"]) * 2 // 3
    async with console.page() as one, console.page(NARROW, theme="dark") as other:
        for view, parameters in (("fleet", {}), ("requests", {"sort": "ttft", "window": 900})):
            await one.open(view, pool=console.pool, **parameters)
            await one.page.locator("#position-field").fill(f"{at:,}")
            await one.page.keyboard.press("Enter")
            await expect(one.page.locator("#position-field")).to_have_value(f"{at:,}")
            await one.page.wait_for_function("at => location.hash.includes(`at=${at}`)", arg=at)
            await one.shown()
            await other.page.goto("about:blank")
            await other.page.goto(one.page.url)
            await other.shown()
            assert await other.position() == at
            cells = "() => [...document.querySelectorAll('main tbody tr:nth-child(-n+12)')].map((row) => row.textContent)"
            assert await other.page.evaluate(cells) == await one.page.evaluate(cells)


async def test_a_position_counts_though_enter_comes_before_it_is_rendered(console: Console) -> None:
    """A page that follows a busy fleet renders late."""
    log = await console.ask("log")
    at = (log["first"] + log["last"]) // 2
    typed_and_sent = """at => {
        const field = document.querySelector('#position-field');
        field.value = at;
        field.dispatchEvent(new Event('input', { bubbles: true }));
        field.form.requestSubmit();
    }"""
    async with console.page() as shown:
        await shown.open("events", pool=console.pool)
        await shown.page.evaluate(typed_and_sent, str(at))
        await shown.page.wait_for_function("at => location.hash.includes(`at=${at}`)", arg=at)


async def test_a_field_with_the_focus_holds_still_while_the_position_moves(console: Console) -> None:
    """What is typed replaces what was selected, though newer positions have come meanwhile."""
    moved = "was => Number(document.querySelector('#position-slider').value) > was"
    async with console.page() as shown:
        await shown.open("overview", pool=console.pool)
        await shown.page.locator("#position-field").focus()
        held = await shown.position()
        await shown.page.wait_for_function(moved, arg=held)
        assert await shown.position() == held
        await shown.page.keyboard.insert_text("40")
        await expect(shown.page.locator("#position-field")).to_have_value("40")
        await shown.page.keyboard.press("Enter")
        await shown.page.wait_for_function("() => location.hash.includes('at=40')")


@pytest.mark.soak
async def test_the_copied_link_has_the_position_though_the_page_is_live(console: Console) -> None:
    async with console.page(permissions=("clipboard-read", "clipboard-write")) as shown:
        await shown.open("events", pool=console.pool, kind="route")
        assert "at=" not in shown.page.url
        await shown.page.get_by_role("button", name="Copy link").click()
        await expect(shown.page.get_by_role("status")).to_contain_text("is copied")
        link = await shown.page.evaluate("() => navigator.clipboard.readText()")
    query = httpx.QueryParams(urlsplit(link).fragment.partition("?")[2])
    assert (query["pool"], query["kind"]) == (console.pool, "route")
    assert int(query["at"]) > 0


@pytest.mark.soak
async def test_back_and_forward_return_to_view_and_position(console: Console) -> None:
    async with console.page() as shown:
        await shown.open("overview", pool=console.pool, at=40)
        await shown.page.get_by_role("navigation", name="Views").get_by_role("link", name="Fleet").click()
        await expect(shown.page.locator("h1")).to_have_text("Fleet")
        await shown.page.locator("#position-field").fill("60")
        await shown.page.keyboard.press("Enter")
        await expect(shown.page.locator("#position-field")).to_have_value("60")
        await shown.page.go_back()
        await expect(shown.page.locator("#position-field")).to_have_value("40")
        await expect(shown.page.locator("h1")).to_have_text("Fleet")
        await shown.page.go_back()
        await expect(shown.page.locator("h1")).to_have_text("Overview")
        await shown.page.go_forward()
        await shown.page.go_forward()
        await expect(shown.page.locator("#position-field")).to_have_value("60")


async def test_the_keyboard_reaches_every_view(console: Console) -> None:
    async with console.page() as shown:
        await shown.open("overview", pool=console.pool, at=50)
        for key, heading in VIEWS.values():
            await shown.page.keyboard.press("g")
            await shown.page.keyboard.press(key)
            await expect(shown.page.locator("h1")).to_have_text(heading)
            await expect(shown.page.locator("h1")).to_be_focused()
        await shown.page.keyboard.press("?")
        await expect(shown.page.get_by_role("dialog", name="Keys")).to_be_visible()
        await shown.page.keyboard.press("Escape")
        await expect(shown.page.get_by_role("dialog")).to_have_count(0)
        await shown.page.keyboard.press("Control+k")
        await shown.page.keyboard.type("requests")
        await shown.page.keyboard.press("Enter")
        await expect(shown.page.locator("h1")).to_have_text("Requests")
        await shown.page.keyboard.press("/")
        await expect(shown.page.get_by_role("searchbox", name="Text")).to_be_focused()


async def test_the_keyboard_moves_over_charts_and_lanes(console: Console) -> None:
    """The cursor is said in words, and Enter goes to its time as the API has it."""
    at = (await console.ask("log"))["last"]
    async with console.page() as shown:
        for view, path, columns, name in (
            ("rates", "series", 120, "Requests, cursor"),
            ("fleet", "lanes", 240, "Lanes, cursor"),
        ):
            await shown.open(view, pool=console.pool, at=at, window=60)
            axis = await console.ask(path, at=at, window_s=60, columns=columns)
            cursor = shown.page.get_by_role("slider", name=re.compile(f"^{name}"))
            await cursor.focus()
            for key in ("End", "PageUp", "ArrowLeft", "ArrowRight", "ArrowLeft", "ArrowLeft"):
                await shown.page.keyboard.press(key)
            column = columns - 13
            await expect(cursor).to_have_attribute("aria-valuenow", str(column))
            if view == "fleet":
                await shown.page.keyboard.press("ArrowDown")
                await expect(cursor).to_have_attribute(
                    "aria-valuetext", re.compile("^worker-1, .*(running|report)")
                )
                time_ms = axis["from_ms"] + (column + 0.5) * axis["step_ms"]
            else:
                await expect(cursor).to_have_attribute("aria-valuetext", re.compile("accepted [0-9.]+ 1/s"))
                time_ms = axis["from_ms"] + (column + 1) * axis["step_ms"]
            assert await shown.axe() == []
            wanted = (await console.ask("position", time_ms=round(time_ms)))["position"]
            await shown.page.keyboard.press("Enter")
            await expect(shown.page.locator("#position-field")).to_have_value(f"{wanted:,}")


async def test_keys_step_as_the_api_does(console: Console) -> None:
    log = await console.ask("log")
    at = (log["first"] + log["last"]) // 2
    steps = {
        "]": ("message", 1), "[": ("message", -1), "d": ("decision", 1), "D": ("decision", -1),
        "r": ("request", 1), "R": ("request", -1), "F": ("fleet", -1),
    }  # fmt: skip
    async with console.page() as shown:
        await shown.open("overview", pool=console.pool, at=at)
        for key, (by, direction) in steps.items():
            wanted = (await console.ask("step", at=at, by=by, direction=direction))["position"]
            await shown.page.keyboard.press(key)
            await expect(shown.page.locator("#position-field")).to_have_value(f"{wanted:,}")
            at = wanted
        await shown.page.keyboard.press("l")
        await expect(shown.page.locator(".live-button")).to_have_attribute("aria-pressed", "true")


@pytest.mark.soak
async def test_playing_moves_on_and_ends_live(console: Console) -> None:
    log = await console.ask("log")
    async with console.page() as shown:
        await shown.open("overview", pool=console.pool, at=log["last"] - 30)
        began = await shown.position()
        await shown.page.keyboard.press("p")
        await expect(shown.page.get_by_role("button", name="Stop playing")).to_be_visible()
        async with asyncio.timeout(10):
            while await shown.position() <= began:
                await asyncio.sleep(0.1)
        await shown.page.get_by_label("Speed").select_option("100")
        await expect(shown.page.locator(".live-button")).to_have_attribute("aria-pressed", "true")
