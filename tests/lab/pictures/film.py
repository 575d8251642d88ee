"""Animations of what a browser shows: WebP, in light and in dark colours, of a fixed length."""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.chromium import MISSING, start_chromium

LENGTH = 15.0  # seconds of an animation, whatever the time that was recorded
LARGEST = 600_000  # bytes of a file
EVERY = 0.4  # seconds between two pictures
PATIENCE = 90.0  # seconds for what is to happen
WIDTH = 430  # pixels of CSS: the text can still be read on a telephone
SCHEMES = ("light", "dark")
CAPTION = """([text, aside]) => {
    const bar = document.getElementById("caption") || document.body.appendChild(document.createElement("div"));
    bar.id = "caption";
    bar.replaceChildren(...[text, aside].map((part) => {
        const child = document.createElement("span");
        child.textContent = part;
        return child;
    }));
}"""
CAPTION_STYLE = """
#caption { position: fixed; inset: auto 0 0 0; display: flex; justify-content: space-between; gap: 15px; height: 40px;
           padding: 10px 15px; font: 15px/20px system-ui, sans-serif; background: #8c1d18; color: #fff; }
#caption span + span { white-space: nowrap; opacity: 0.8; font-size: 13px; font-variant-numeric: tabular-nums; }
"""


class Film:
    """One page in light and one in dark colours, and the pictures that were taken of both at the same moments."""

    def __init__(self, pages: dict[str, Page]) -> None:
        self.pages = pages
        self.aside: Callable[[], str] = str  # what stands beside the caption
        self._text = ""
        self._shots: list[tuple[float, dict[str, bytes]]] = []
        self._still = 0

    def say(self, text: str) -> None:
        """Write below the pages what happens now."""
        self._text = text

    def roll(self, seconds: float = PATIENCE, until: Callable[[], object] = lambda: False) -> None:
        """
        Take pictures for some seconds, or until something holds.

        Raises:
            TimeoutError: It does not hold after :data:`PATIENCE`.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            for page in self.pages.values():
                if self._text:
                    page.evaluate(CAPTION, [self._text, self.aside()])
            self._shots.append((began, {scheme: page.screenshot() for scheme, page in self.pages.items()}))
            if until():
                return
            time.sleep(max(0.0, EVERY + began - time.monotonic()))
        if seconds == PATIENCE:
            raise TimeoutError(f"Waited {seconds:.0f} s in vain while the picture said: {self._text}")

    def keep(self) -> None:
        """Choose the last picture as the one that stands for all of them, where nothing may move."""
        self._still = len(self._shots) - 1

    def save(self, folder: Path, name: str) -> None:
        """
        Write an animation for each scheme, and the picture of :meth:`keep`, which does not move.

        Raises:
            ValueError: A file is too large.
        """
        moments = [at for at, _ in self._shots]
        # What was waited for between two scenes is cut.
        lengths = [min(until - at, 2 * EVERY) for at, until in pairwise([*moments, moments[-1] + EVERY])]
        pace = 1000 * LENGTH / sum(lengths)
        for scheme in SCHEMES:
            files: list[bytes] = []
            milliseconds: list[int] = []
            for length, (_, shot) in zip(lengths, self._shots, strict=True):
                if not files or files[-1] != shot[scheme]:
                    files.append(shot[scheme])
                    milliseconds.append(0)
                milliseconds[-1] += round(pace * length)
            images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
            path = folder / f"{name}-{scheme}.webp"
            images[0].save(
                path,
                save_all=True,
                append_images=images[1:],
                duration=milliseconds,
                loop=0,
                lossless=True,
                method=4,  # a seventh of the size that the default has
            )
            still_path = path.with_suffix(".png")
            chosen = Image.open(io.BytesIO(self._shots[self._still][1][scheme]))
            chosen.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(still_path, optimize=True)
            for written in (path, still_path):
                size = written.stat().st_size
                print(f"{written}: {size / 1000:.0f} kB, {len(images)} pictures of {sum(lengths):.0f} s", flush=True)
                if size > LARGEST:
                    raise ValueError(f"{written} has {size} bytes, more than {LARGEST}.")


@contextmanager
def filming(height: int) -> Iterator[Film]:
    """Open a browser with two pages of that height."""
    with sync_playwright() as playwright:
        browser = start_chromium(playwright)
        if not browser:
            raise SystemExit(MISSING)
        size: Any = {"width": WIDTH, "height": height}
        yield Film(
            {
                scheme: browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=2).new_page()
                for scheme in SCHEMES
            }
        )
        browser.close()
