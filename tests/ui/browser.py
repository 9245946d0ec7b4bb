"""A browser with a page to press buttons on. Needs the extra `ui` (playwright) and a Chromium;
FP8RL_CHROMIUM names one that is not in the PATH. FP8RL_SCREENSHOTS names a folder for the pictures of
the docs.
"""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

CHROMIUM = os.environ.get("FP8RL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")  # as the server, so that a skip comes before its start
def page():
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed: .venv/bin/pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium or google-chrome in the PATH: install one, or set FP8RL_CHROMIUM")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)
    # In a container there is neither a sandbox nor a graphics card, and little shared memory.
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page = browser.new_page(viewport={"width": 1440, "height": 1300})
        page.set_default_timeout(60_000)
        yield page
        browser.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    return Path(os.environ.get("FP8RL_SCREENSHOTS") or tmp_path_factory.mktemp("pictures"))
