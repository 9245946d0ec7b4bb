"""Waiting on Ray, and the environment its workers get."""

import asyncio
import signal

import pytest

from fp8rl.device import compute_environment
from fp8rl.recipe.load import load_recipe
from tasks.ray_runtime import start_ray, wait
from tests.arms import TINY

pytestmark = pytest.mark.pipeline


@pytest.fixture(scope="module", autouse=True)
def ray():
    import ray

    signal.signal(signal.SIGTERM, handler := lambda *_: None)
    start_ray()
    assert signal.getsignal(signal.SIGTERM) is handler  # Ray's own would exit at once
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return ray


def test_wait_returns_raises_and_times_out(ray):
    @ray.remote
    def work(seconds: float, fail: bool) -> int:
        import time

        time.sleep(seconds)
        if fail:
            raise ValueError("planted")
        return 7

    assert asyncio.run(wait(work.remote(0.0, False))) == 7
    with pytest.raises(ValueError, match="planted"):
        asyncio.run(wait(work.remote(0.0, True)))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(wait(work.remote(5.0, False)), 0.2))


def test_wait_can_be_cancelled(ray):
    @ray.remote
    def work() -> None:
        import time

        time.sleep(5)

    async def cancelled() -> None:
        waiting = asyncio.ensure_future(wait(work.remote()))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_workers_get_the_threads_that_the_bits_depend_on(ray):
    recipe = load_recipe(TINY / "bf16.yaml", ["threads=1"]).recipe

    @ray.remote(runtime_env={"env_vars": compute_environment(recipe)})
    def seen() -> tuple[str, str]:
        import os

        return os.environ["OMP_NUM_THREADS"], os.environ["MKL_CBWR"]

    assert asyncio.run(wait(seen.remote())) == ("1", "AUTO")
