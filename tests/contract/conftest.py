"""Real engines, started once a session: each takes a quarter of a minute."""

import pytest


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
