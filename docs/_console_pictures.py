"""Pictures of the console's views for the guide: `python -m docs._console_pictures CONSOLE_URL`, with a fleet that has served requests.

Each view at both widths, light and dark, in one picture per view: `docs/_static/console/views/NAME.webp`. Needs Chromium and `make browser`.
"""

import argparse
import asyncio
import io
from pathlib import Path
from typing import Any, Final

import httpx
from PIL import Image
from playwright.async_api import Page
from tests.console.browser import NARROW, VIEWS, WIDE, ConsolePage, chromium

FOLDER: Final = Path(__file__).parent / "_static" / "console" / "views"
GAP: Final = 16
QUALITY: Final = 60


async def shot(shown: ConsolePage, size: Any, theme: str) -> Image.Image:
    """The window's content in one form."""
    await shown.take_form(size, theme)
    await shown.shown()
    page: Page = shown.page
    return Image.open(io.BytesIO(await page.screenshot())).convert("RGB")


def sheet(pictures: list[Image.Image]) -> Image.Image:
    """Pictures side by side, light ones above dark ones."""
    rows = [pictures[:2], pictures[2:]]
    width = max(sum(one.width for one in row) + GAP for row in rows)
    heights = [max(one.height for one in row) for row in rows]
    made = Image.new("RGB", (width, sum(heights) + GAP), "white")
    top = 0
    for row, height in zip(rows, heights, strict=True):
        left = 0
        for one in row:
            made.paste(one, (left, top))
            left += one.width + GAP
        top += height + GAP
    return made


async def parameters_of(url: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The pool and position that are shown, and what single views are about: a request that moved to another worker, or else the slowest one, its decision, and an earlier position."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        pool = (await client.get("/api/pools")).json()["pools"][0]["pool"]
        last = (await client.get("/api/log", params={"pool": pool})).json()["last"]
        asked = {"pool": pool, "at": last, "state": "ended", "sort": "duration", "limit": 500}
        rows = (await client.get("/api/requests", params=asked)).raise_for_status().json()["requests"]
    row = next((one for one in rows if one["migrations"]), rows[0])
    about = {
        "request": {"id": row["id"]},
        "decision": {"id": f"{row['id']}-0-1"},
        "diff": {"a": max(1, last // 2), "b": last},
        "fleet": {"window_s": 300},
    }
    return {"pool": pool, "at": last}, about


async def main(url: str) -> None:
    """Draw all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    common, about = await parameters_of(url)
    async with chromium() as browser:
        for name in (*VIEWS, "request"):
            context = await browser.new_context(viewport=WIDE)
            shown = ConsolePage(await context.new_page(), url)
            pictures = []
            for theme in ("light", "dark"):
                for size in (WIDE, NARROW):
                    await shown.page.set_viewport_size(size)
                    await shown.open(name, **common, **about.get(name, {}))
                    pictures.append(await shot(shown, size, theme))
            path = FOLDER / f"{name}.webp"
            sheet(pictures).save(path, quality=QUALITY, method=6)
            print(f"{path.name}: {path.stat().st_size:,} bytes")
            await context.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    asyncio.run(main(parser.parse_args().url))
