"""Every view in every form: no overflow, nothing that the browser complains about, accessible; and what goes wrong is said."""

import httpx
import pytest
from playwright.async_api import Route, expect

from tests.console.browser import NARROW, VIEWS, WIDE, Console, ConsolePage
from tests.console.conftest import HOSTILE, TOKEN

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.xdist_group("console")]


async def ended_request(console: Console) -> tuple[str, str]:
    """An ended request and its decision."""
    rows = (await console.ask("requests", state="ended", limit=1))["requests"]
    name = rows[0]["id"]
    return name, (await console.ask("request", id=name))["decisions"][0]["id"]


async def request_with_a_past(console: Console) -> tuple[str, str, int]:
    """An ended request, its decision, and where this is stored, at which its first token is not known: not of a machine so busy that it is stored later."""
    for row in (await console.ask("requests", state="ended", limit=50))["requests"]:
        [made, *_] = (await console.ask("request", id=row["id"]))["decisions"]
        if not (await console.ask("decision", id=made["id"], at=made["stored"]))["found"]["started"]:
            return row["id"], made["id"], made["stored"]
    raise AssertionError("no decision is stored before the first token")


FORMS = {
    "wide light": (WIDE, "light", True),
    "wide dark": (WIDE, "dark", False),
    "narrow dark": (NARROW, "dark", True),
    "narrow light": (NARROW, "light", False),
}
"""Size, theme, and whether axe looks at it."""


@pytest.mark.parametrize("audits", [1, pytest.param(2, marks=pytest.mark.soak)])
async def test_every_view_fits_and_is_accessible_in_every_form(console: Console, audits: int) -> None:
    """In every run axe looks at one form of each view in turn, in the long form at two."""
    request, decision = await ended_request(console)
    at = (await console.ask("log"))["last"]
    run = next(one for one in (await console.ask("tree", at=at))["runs"] if one["uses"])
    views: list[tuple[str, dict[str, str]]] = [(name, {}) for name in VIEWS] + [
        ("request", {"id": request}),
        ("decision", {"id": decision, "policy": "random"}),
        ("fleet", {"panel": "worker-0"}),
        ("rates", {"split": "tenant", "model": "sim"}),
        ("tree", {"open": run["first"], "holder": run["holders"][0]["worker"]}),
    ]
    async with console.page() as shown:
        await shown.open("overview", pool=console.pool, at=at)
        audited = [name for name, (_, _, is_audited) in FORMS.items() if is_audited]
        for number, (view, parameters) in enumerate(views):
            await shown.turn_to(view, pool=console.pool, at=at, **parameters)
            looked_at = [audited[(number + turn) % len(audited)] for turn in range(audits)]
            for name, (size, theme, _) in FORMS.items():
                await shown.take_form(size, theme)
                assert await shown.overflow() <= 0, f"{view}, {name}"
                if name in looked_at:
                    assert await shown.axe() == [], f"{view}, {name}"


@pytest.mark.soak
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_page_begins_in_the_form_of_the_system(console: Console, theme: str) -> None:
    async with console.page(NARROW, theme=theme) as shown:
        await shown.open("overview", pool=console.pool)
        assert await shown.page.evaluate("() => document.documentElement.dataset.theme") == theme
        assert await shown.overflow() <= 0


@pytest.mark.soak
async def test_palette_and_help_are_accessible(console: Console) -> None:
    async with console.page() as shown:
        await shown.open("overview", pool=console.pool, at=50)
        for keys in ("Control+k", "?"):
            await shown.page.keyboard.press(keys)
            await expect(shown.page.get_by_role("dialog")).to_be_visible()
            assert await shown.axe() == []
            await shown.page.keyboard.press("Escape")
            await expect(shown.page.get_by_role("dialog")).to_have_count(0)


def hostile(value: object) -> object:
    """The same answer with every name and text replaced by one that would run if it were taken as HTML."""
    if isinstance(value, dict):
        return {key: HOSTILE if key in NAMES and one else hostile(one) for key, one in value.items()}
    if isinstance(value, list):
        return [HOSTILE if isinstance(one, str) else hostile(one) for one in value]
    return value


NAMES = frozenset(
    {"name", "worker", "engine", "model", "title", "text", "remedy", "tenant", "error", "endpoint", "why", "writer", "what", "label", "from", "to"}
)  # fmt: skip


async def test_hostile_names_are_shown_as_text(console: Console) -> None:
    request, decision = await ended_request(console)

    async def spoil(route: Route) -> None:
        response = await route.fetch()
        await route.fulfill(response=response, json=hostile(await response.json()))

    async with console.page() as shown:
        for path in (
            "fleet",
            "lanes",
            "requests",
            "request",
            "decision",
            "events",
            "queue",
            "diff",
            "tree",
            "series",
            "usage",
        ):
            await shown.page.route(f"**/api/{path}?*", spoil)
        await shown.open("overview", pool=console.pool, at=60)
        for view, parameters in (
            ("overview", {}), ("fleet", {}), ("requests", {}), ("events", {}), ("request", {"id": request}), ("decision", {"id": decision}), ("diff", {}),
            ("rates", {"split": "model"}),
        ):  # fmt: skip
            await shown.turn_to(view, pool=console.pool, at=(await console.ask("log"))["last"], **parameters)
            assert "<img src=x" in await shown.page.locator("main").inner_text(), view
        assert await shown.page.locator("main img, main script").count() == 0
        assert await shown.page.evaluate("() => window.hacked") is None


@pytest.mark.soak
async def test_the_prompt_is_shown_as_text(console: Console) -> None:
    request, _ = await ended_request(console)
    async with console.page() as shown:
        await shown.open("request", pool=console.pool, id=request)
        assert HOSTILE not in await shown.page.locator("main").inner_html()
        assert await shown.page.evaluate("() => window.hacked") is None


async def test_a_policy_violation_is_noticed(console: Console) -> None:
    """The check of all other tests sees what the policy forbids."""
    async with console.page() as shown:
        await shown.open("overview", pool=console.pool)
        await shown.page.evaluate(
            "() => { const one = document.createElement('div'); one.setAttribute('style', 'color: red'); document.body.append(one); }"
        )
        await shown.page.wait_for_function("() => window.violations.length > 0")
        with pytest.raises(AssertionError):
            await shown.check()
        shown.expected.append("Content Security Policy")
        await shown.page.evaluate("() => { window.violations.length = 0; }")


@pytest.mark.soak
async def test_a_lost_server_is_said_and_found_again(console: Console) -> None:
    async with console.page() as shown:
        shown.expected += ["Failed to load resource", "ERR_FAILED"]
        await shown.open("queue", pool=console.pool, at=50)
        await shown.page.route("**/api/**", lambda route: route.abort())
        await shown.page.locator("#position-field").fill("70")
        await shown.page.keyboard.press("Enter")
        await expect(shown.page.get_by_role("alert")).to_contain_text("does not answer")
        await expect(shown.page.locator(".tile").first).to_be_visible()
        await shown.page.unroute_all()
        await expect(shown.page.get_by_role("alert")).to_have_count(0)


@pytest.mark.soak
async def test_a_position_without_data_says_so(console: Console) -> None:
    async with console.page() as shown:
        await shown.open("requests", pool=console.pool, at=1)
        await expect(shown.page.locator("main")).to_contain_text("No request was accepted")
        await shown.open("decision", pool=console.pool, at=1)
        await expect(shown.page.locator("main")).to_contain_text("no decision up to this position")
        request, decision, decided = await request_with_a_past(console)
        await shown.open("request", pool=console.pool, at=1, id=request)
        await expect(shown.page.locator("main")).to_contain_text("not accepted yet")
        shown.expected.append("404")
        await shown.open("request", pool=console.pool, at=decided, id=request)
        await expect(shown.page.locator("main")).to_contain_text("It is open at this position")
        await shown.page.get_by_role("link", name="See all that is known").click()
        await expect(shown.page.locator("ol li", has_text="ended")).to_be_visible()
        await shown.open("decision", pool=console.pool, at=decided, id=decision)
        await expect(shown.page.locator("main")).to_contain_text("The first token has not come")
        await shown.page.get_by_role("link", name="See all that is known").click()
        await expect(shown.page.locator("main")).to_contain_text("Regret: ")


async def fill_token(shown: ConsolePage, token: str) -> None:
    await shown.page.locator("#token-field").fill(token)
    await shown.page.get_by_role("button", name="Continue").click()


@pytest.mark.soak
async def test_a_worker_is_drained_after_a_token_and_a_confirmation(guarded: Console) -> None:
    async with guarded.page() as shown:
        shown.expected.append("401")
        await shown.page.goto(f"{guarded.url}/#/fleet?pool={guarded.pool}&panel=worker-2")
        await fill_token(shown, "wrong")
        await expect(shown.page.get_by_role("dialog", name="Token")).to_be_visible()
        await fill_token(shown, TOKEN)
        await shown.shown()
        panel = shown.page.get_by_role("complementary")
        await panel.get_by_role("button", name="Drain").click()
        await shown.page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        await expect(panel.get_by_text("ready", exact=True)).to_be_visible()
        await panel.get_by_role("button", name="Drain").click()
        await shown.page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        await expect(panel.get_by_text("draining", exact=True)).to_be_visible()
        await panel.get_by_role("button", name="Resume").click()
        await shown.page.get_by_role("dialog").get_by_role("button", name="Resume").click()
        await expect(panel.get_by_text("ready", exact=True)).to_be_visible()


@pytest.mark.soak
async def test_engine_weights_are_changed_and_removed(guarded: Console) -> None:
    """They are shown where there are any, and the change after the next event of the log."""
    header = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=guarded.url, headers=header) as client:
        answer = await client.post(f"/admin/pools/{guarded.pool}/weights", json={"sim": 3})
        assert answer.status_code == 200, answer.text
    async with guarded.page() as shown:
        shown.expected.append("401")
        await shown.page.goto(f"{guarded.url}/#/fleet?pool={guarded.pool}")
        await fill_token(shown, TOKEN)
        await shown.shown()
        panel = shown.page.get_by_role("region", name="Engine weights")
        await expect(panel).to_contain_text("sim 100")
        await panel.get_by_role("button", name="Change").click()
        dialog = shown.page.get_by_role("dialog", name="Engine weights")
        await dialog.get_by_label("sim").fill("0")
        await dialog.get_by_role("button", name="Set").click()
        await expect(dialog.get_by_role("alert")).to_be_visible()
        shown.expected.append("400")
        await dialog.get_by_role("button", name="Remove").click()
        await expect(dialog).to_be_hidden()
        await expect(panel).to_be_hidden()


@pytest.mark.soak
async def test_who_may_not_control_sees_no_commands(console: Console) -> None:
    async with console.page() as shown:
        await shown.open("fleet", pool=console.pool, panel="worker-0")
        panel = shown.page.get_by_role("complementary")
        await expect(panel.get_by_text("Epoch", exact=True)).to_be_visible()
        assert await panel.get_by_role("button", name="Drain").count() == 0


@pytest.mark.soak
async def test_a_seed_of_64_bits_is_shown_exactly(console: Console) -> None:
    _, decision = await ended_request(console)
    seed = (await console.ask("decision", id=decision))["seed"]
    async with console.page() as shown:
        await shown.open("decision", pool=console.pool, id=decision)
        await expect(shown.page.get_by_text(str(seed), exact=True)).to_be_visible()
