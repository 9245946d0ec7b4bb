"""The tests' own services: nothing of the user's Prefect, MLflow or Ray is touched."""

import os
import tempfile

# Before anything imports Prefect, Ray or MLflow: they read their settings on import.
for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
    os.environ.pop(name, None)
HOME = tempfile.mkdtemp(prefix="fp8rl-tests-")
os.environ.pop("PREFECT_HOME", None)
os.environ["HOME"] = HOME
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402

from flows.environment import set_environment  # noqa: E402

set_environment(HOME)
# Helpers whose asserts are to say what they saw.
pytest.register_assert_rewrite("tests.comparison_page", "tests.services")


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory):
    """A runs folder for the whole session: warm starts and converted models are made in it once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def run_arm(runs_dir):
    """Runs an arm of the short recipe, once a session."""
    from tests.arms import Arms

    yield Arms(runs_dir)
    import ray

    ray.shutdown()
