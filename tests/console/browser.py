"""The console's page in a real browser, and what its server says: both for the tests of this folder."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from playwright.async_api import Browser, BrowserContext, Page, ViewportSize, async_playwright, expect

AXE: Final = Path(".browser/node_modules/axe-core/axe.min.js")
VIEWS: Final = {
    "overview": ("o", "Overview"),
    "fleet": ("f", "Fleet"),
    "requests": ("r", "Requests"),
    "decision": ("w", "Why here"),
    "tree": ("t", "Prefix tree"),
    "queue": ("q", "Queue and hand-offs"),
    "stuck": ("s", "Stuck requests"),
    "rates": ("l", "Rates and latencies"),
    "events": ("e", "Events"),
    "diff": ("d", "Difference"),
    "replicas": ("p", "Replicas"),
}
"""Name: key after `g`, and heading."""

WIDE: Final = ViewportSize(width=1280, height=800)
NARROW: Final = ViewportSize(width=390, height=844)

AUDIT: Final = {"resultTypes": ["violations"], "preload": False}

WATCH: Final = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The system's Chromium: Playwright's own is not downloaded."""
    program = shutil.which("chromium")
    assert program, "these tests need Chromium: apt-get install chromium"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        await browser.close()


class ConsolePage:
    """A page of the console that notes everything that browsers complain about."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        self.expected: list[str] = []
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    async def open(self, view: str = "overview", **parameters: Any) -> None:
        """Load the page with a view's address, and wait for its content."""
        query = httpx.QueryParams({name: value for name, value in parameters.items() if value is not None})
        await self.page.goto("about:blank")
        await self.page.goto(f"{self.url}/#/{view}?{query}")
        await self.shown()

    async def turn_to(self, view: str, **parameters: Any) -> None:
        """Go to a view's address in the page that is loaded."""
        query = httpx.QueryParams({name: value for name, value in parameters.items() if value is not None})
        await self.page.evaluate("address => { location.hash = address; }", f"#/{view}?{query}")
        heading = VIEWS[view][1] if view in VIEWS else view.capitalize()
        await expect(self.page.locator("h1")).to_have_text(heading)
        await self.shown()

    async def shown(self) -> None:
        """Wait until the view has its content, and all that was asked for is answered."""
        await self.page.wait_for_selector("h1")
        await self.page.wait_for_function(
            "() => !document.querySelector('main .skeleton') && !document.querySelector('main.busy')"
        )

    async def position(self) -> int:
        """The position in the field."""
        text = await self.page.locator("#position-field").input_value()
        return int(text.replace(",", ""))

    async def tile(self, label: str) -> str:
        """The value of a tile of the view."""
        tile = self.page.locator(".tile", has=self.page.get_by_text(label, exact=True)).first
        return await tile.locator(".tile-value").inner_text()

    async def take_form(self, size: ViewportSize, theme: str) -> None:
        """Change the window's size and the system's colours, and wait until the page has followed."""
        await self.page.set_viewport_size(size)
        await self.page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        await self.page.wait_for_function(
            "theme => document.documentElement.dataset.theme === theme", arg=theme
        )
        # Charts are drawn again when the browser has told them their size: in the frame after the next.
        await self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    async def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        width: int = await self.page.evaluate(
            "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return width

    async def axe(self) -> list[str]:
        """Serious and critical findings of axe-core. Its source is evaluated by the browser's debugger, which no policy of the page forbids."""
        if not await self.page.evaluate("() => Boolean(window.axe)"):
            assert AXE.exists(), f"{AXE} is missing: make browser"
            await self.page.evaluate(AXE.read_text())
        found: list[dict[str, Any]] = await self.page.evaluate(
            "async options => (await axe.run(document, options)).violations", AUDIT
        )
        return [
            f"{one['id']}: {one['nodes'][0]['html'][:200]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    async def check(self) -> None:
        """Fail if the browser complained, or if something violated the page's policy."""
        violations = await self.page.evaluate("() => window.violations")
        assert violations == [], violations
        left = [one for one in self.complaints if not any(part in one for part in self.expected)]
        assert left == [], left


class Console:
    """A console under test: its API, and pages of it."""

    def __init__(self, url: str, browser: Browser, pool: str) -> None:
        self.url = url
        self.pool = pool
        self._browser = browser
        self._api = httpx.AsyncClient(base_url=url, timeout=30)

    async def ask(self, path: str, **parameters: Any) -> Any:
        """An answer of the API."""
        response = await self._api.get(f"/api/{path}", params={"pool": self.pool, **parameters})
        assert response.status_code == 200, response.text
        return response.json()

    @asynccontextmanager
    async def page(
        self, size: ViewportSize = WIDE, *, theme: str = "light", permissions: Sequence[str] = ()
    ) -> AsyncIterator[ConsolePage]:
        """A page in a context of its own. On leaving, it must have had nothing to complain about."""
        context: BrowserContext = await self._browser.new_context(
            viewport=size,
            color_scheme="dark" if theme == "dark" else "light",
            reduced_motion="reduce",
            permissions=list(permissions),
        )
        context.set_default_timeout(20_000)
        await context.add_init_script(WATCH)
        shown = ConsolePage(await context.new_page(), self.url)
        try:
            yield shown
            await shown.check()
        finally:
            await context.close()

    async def close(self) -> None:
        """Close the connections to the API."""
        await self._api.aclose()
