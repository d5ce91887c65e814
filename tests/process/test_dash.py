"""The dashboard in a real browser: every view, by keyboard, dark and light, live; hostile text stays text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.dash import ARGUMENTS, CHROMIUM, served
from benchmarks.dash_run import HOSTILE, RunWriter, Shape

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra)")
WAIT_MS = 90_000
VIEWS = ("overview", "distributions", "lanes", "weights", "buffer", "health", "waits", "trajectories")


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunWriter]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser at {CHROMIUM}")
    made = RunWriter(
        tmp_path_factory.mktemp("dash") / "run",
        Shape(groups=4, members=2, tokens=6, engines=2),
        time.time() - 90,
    )
    for _ in range(45):
        made.step()
    yield made
    made.close(ended=False)


@pytest.fixture(scope="module")
def url(writer: RunWriter) -> Iterator[str]:
    with served(writer.root) as (_, found):
        yield found


@pytest.fixture(scope="module")
def browser(writer: RunWriter) -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        made = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=WAIT_MS)
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A page that must tell no error and get every file."""
    with clean_page(browser) as made:
        made.goto(url)
        yield made


class clean_page:
    """A page of its own; at its end nothing may have gone wrong in it."""

    def __init__(self, browser: Any, scheme: str = "light") -> None:
        self.page, self.wrong = (
            browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme),
            list[str](),
        )
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", lambda message: self.wrong.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("requestfailed", lambda request: self.wrong.append(f"failed: {request.url}"))
        self.page.on(
            "response",
            lambda answer: answer.status >= 400 and self.wrong.append(f"{answer.status}: {answer.url}"),
        )

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *error: object) -> None:
        wrong = list(self.wrong)  # what is asked when it closes fails
        self.page.close()
        assert error[0] is not None or wrong == []


def shown(page: Any, view: str) -> None:
    page.wait_for_function(f"() => document.documentElement.dataset.ready === '{view}'")


def painted(page: Any) -> int:
    """Canvases of the page that hold more than one colour."""
    return page.evaluate(
        """() => [...document.querySelectorAll("canvas")].filter((one) => {
            const data = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
            return new Set(new Uint32Array(data.buffer)).size > 3;
        }).length"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_drawn(browser: Any, url: str, scheme: str) -> None:
    canvases = dict.fromkeys(VIEWS, 0) | {
        "overview": 6,
        "distributions": 5,
        "lanes": 1,
        "weights": 3,
        "buffer": 2,
    }
    words = {
        "lanes": "trainer",
        "weights": "engine-0",
        "buffer": "stale: lag",
        "health": "engine-1",
        "waits": "a token",
    }
    with clean_page(browser, scheme) as page:
        page.goto(url)
        for number, view in enumerate(VIEWS, start=1):
            page.keyboard.press(str(number))
            shown(page, view)
            page.wait_for_selector(f"#tab-{view}[aria-selected=true]")
            page.wait_for_function(
                "(word) => document.getElementById('main').textContent.includes(word)",
                arg=words.get(view, ""),
            )
            assert painted(page) >= canvases[view], view
        light = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert (light == "rgb(15, 20, 26)") == (scheme == "dark")


def test_tabs_and_charts_by_keyboard(page: Any) -> None:
    shown(page, "overview")
    page.keyboard.press("1")
    page.keyboard.press("ArrowRight")
    shown(page, "distributions")
    focus = "() => [document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
    assert page.evaluate(focus) == ["tab-distributions", "solid"]
    page.keyboard.press("Home")
    shown(page, "overview")
    page.focus("canvas")
    for key in ("End", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    page.wait_for_function("() => /step 42/.test(document.querySelector('.legend .at').textContent)")
    assert "reward of rollouts" in page.get_attribute("canvas", "aria-label")
    page.keyboard.press("3")
    shown(page, "lanes")
    page.focus("canvas")
    before = page.inner_text("main .spread .dim")
    page.keyboard.press("-")
    page.wait_for_function(
        "(text) => document.querySelector('main .spread .dim').innerText !== text", arg=before
    )


def test_a_trajectory_by_keyboard_and_its_text_stays_text(page: Any) -> None:
    page.keyboard.press("8")
    page.wait_for_selector("tr.row")
    page.focus("tr.row")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tokens .tok")
    assert HOSTILE in page.inner_text(".tokens") and page.query_selector("#main img") is None
    assert page.title() != "owned"
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    told = page.inner_text(".readout")
    assert "masked" in told and "lag" in told and "engine-0" in told and "onerror" in told
    page.keyboard.press("Escape")
    page.wait_for_selector("tr.row")
    page.select_option("select[name=state]", "dropped")
    page.wait_for_function(
        "() => [...document.querySelectorAll('tr.row')].every((row) => /stale: lag|onerror/.test(row.innerText))"
    )
    page.click("tr.row")
    page.wait_for_function("() => document.querySelector('.why')?.innerText.startsWith('Dropped: ')")
    assert "dropped keeps none" in page.inner_text("main")
    for view in ("buffer", "distributions"):  # a cause may hold text of a model too
        page.goto(f"{page.url.partition('#')[0]}#{view}")
        page.wait_for_function("() => document.getElementById('main').textContent.includes('onerror')")
        assert page.query_selector("#main img") is None


def test_a_live_run_goes_on_before_ones_eyes(page: Any, writer: RunWriter) -> None:
    shown(page, "overview")
    step = f"() => document.querySelector('.kpi .v').textContent === '{writer.steps}'"
    page.wait_for_function(step)
    writer.step()
    page.wait_for_function(step.replace(str(writer.steps - 1), str(writer.steps)))
