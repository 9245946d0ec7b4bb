"""Real engines, started once a session: each takes a quarter of a minute."""

import pytest

from fp8rl.rollout.engine import Engine


@pytest.fixture(scope="session", autouse=True)
def engines_stay():
    """No engine ends before the session: with the first one go vLLM's process groups, which the others
    in this process need."""
    kept = []
    make = Engine.__init__

    def keep(self, *args, **options):
        make(self, *args, **options)
        kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", keep)
        yield


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """pairs(arm): an engine and a learner of the arm, for all tests that want one."""
    from tests.contract.pairs import Pair

    made = {}

    def get(arm: str) -> Pair:
        if arm not in made:
            made[arm] = Pair(arm, tmp_path_factory.mktemp(arm))
        return made[arm]

    return get
