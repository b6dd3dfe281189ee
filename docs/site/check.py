"""Opens each page of a built site in Chromium, as wide as a desktop and as a phone: python docs/site/check.py DIR.

A page fails if it asks another host for anything, reports an error, shows no title, or is wider than the window. The
search must find a word, from a server and from a folder.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import sys
import threading
from functools import partial
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

WINDOWS = {"desktop": (1280, 900), "phone": (390, 844)}
WORD, PAGE_OF_WORD = "BackPressure", "troubleshooting"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files. It writes no line per file, and none for a browser that left early."""

    def handle(self) -> None:
        """Answer the requests of a connection."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def opened(browser: Browser, wrong: list[str], own: str, **options: object) -> Page:
    """Return a page whose requests to other addresses than `own`, and whose errors, are added to `wrong`."""
    page = browser.new_page(**options)

    def ask(route, request) -> None:
        if request.url.startswith((own, "data:", "blob:", "about:")):
            route.continue_()
        else:
            wrong.append(f"{page.url}: asks {request.url}")
            route.abort()

    page.route("**/*", ask)
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on("console", lambda said: said.type == "error" and wrong.append(f"{page.url}: {said.text}"))
    return page


def search(page: Page, wrong: list[str]) -> None:
    """Search for a word, and expect the page that has it."""
    page.locator("[data-md-component=search-query]").fill(WORD)
    try:
        page.locator(f".md-search-result__link[href*={PAGE_OF_WORD}]").first.wait_for(state="attached", timeout=30_000)
    except Exception as error:  # noqa: BLE001
        wrong.append(f"{page.url}: the search does not find {WORD}: {type(error).__name__}")


def main(folder: Path) -> int:
    """Check the site; return the exit code."""
    wrong: list[str] = []
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        print("the check of the site needs Chromium: bash deploy/find-chromium.sh installs it", file=sys.stderr)
        return 1
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
    with sync_playwright() as playwright:
        args = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=args)
        own = f"http://127.0.0.1:{server.server_port}/"
        for name, (width, height) in WINDOWS.items():
            scheme = "light" if name == "desktop" else "dark"
            page = opened(browser, wrong, own, viewport={"width": width, "height": height}, color_scheme=scheme)
            for path in pages:
                page.goto(own + path, wait_until="domcontentloaded")
                if not page.locator("h1").first.is_visible():
                    wrong.append(f"{path}: no title on a {name}")
                if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
                    wrong.append(f"{path}: {wide} pixels wide on a {name}")
            page.goto(own)
            look = page.evaluate("document.body.dataset.mdColorScheme")
            if look != {"light": "default", "dark": "slate"}[scheme]:
                wrong.append(f"{scheme} is shown as {look}")
            search(page, wrong)
        files = folder.as_uri()
        page = opened(browser, wrong, files)
        page.goto(f"{files}/index.html")
        search(page, wrong)
        browser.close()
    server.shutdown()
    print("\n".join(wrong) or f"{len(pages)} pages are right on {' and '.join(WINDOWS)}, and so is the search")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve()))
