"""A headless Chromium for tests of pages: the system's own, nothing is downloaded."""

import contextlib
import importlib.util
import os
import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

VIEWS = ("run", "chat", "tokens", "group", "timeline")  # of the viewer

needs_chromium = pytest.mark.skipif(
    (CHROMIUM is None or importlib.util.find_spec("playwright") is None)
    and not os.environ.get("CI"),
    reason="Chromium or playwright is not installed",
)

# Keeps what the tests ask for afterwards: long tasks as [start, duration] in ms.
_OBSERVER = """
window.longTasks = [];
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.longTasks.push([task.startTime, task.duration]);
}).observe({ type: "longtask", buffered: true });
"""


class Tab:
    """A page with what went wrong on it and what it asked of the network."""

    def __init__(self, page) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.add_init_script(_OBSERVER)
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, address, **state) -> None:
        """Open a page at a state such as `view="tokens"`, and wait until it has drawn it."""
        fragment = "&".join(f"{name}={value}" for name, value in state.items())
        self.page.goto("about:blank")
        self.page.goto(f"{address}#{fragment}")
        self.wait_for("#panel > *")

    def wait_for(self, selector) -> None:
        self.page.locator(selector).first.wait_for(state="attached")

    def press(self, *keys) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def texts(self, selector) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def settle(self) -> None:
        """Until what was asked for is on the screen."""
        self.page.evaluate(
            "() => new Promise((done) => setTimeout(() => requestAnimationFrame(done), 50))"
        )


@contextlib.contextmanager
def browser():
    """Makes tabs; options are those of playwright's `new_page`."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "Chromium is missing. Install it: apt-get install chromium"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM)
        yield lambda **options: Tab(chromium.new_page(**options))
        chromium.close()


# ---- WCAG 2.2 contrast ----


def contrast(first, second) -> float:
    """Of two colours as `getComputedStyle` gives them, "rgb(1, 2, 3)"."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour) -> float:
    channels = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
