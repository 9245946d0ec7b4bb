"""PostgreSQL in place of SQLite, for Prefect and for MLflow."""

import importlib.util

from fp8rl.services.config import UpConfig, UpError

PREFECT, MLFLOW = "fp8rl_prefect", "fp8rl_mlflow"


def prefect_url(config: UpConfig) -> str | None:
    """What Prefect's server takes; None with SQLite."""
    url = config.database_url(PREFECT)
    return None if url is None else url.replace("postgresql://", "postgresql+asyncpg://", 1)


def mlflow_url(config: UpConfig) -> str | None:
    """What MLflow's server takes; None with SQLite."""
    url = config.database_url(MLFLOW)
    return None if url is None else url.replace("postgresql://", "postgresql+psycopg2://", 1)


def require_reachable(config: UpConfig, *, prefect: bool, mlflow: bool) -> None:
    """Connects once to each database that is to be used. prefect, mlflow: whether that server is to be
    started here. Raises UpError naming the driver or the database that is missing.
    """
    if config.database is None:
        return
    for driver, name in (("psycopg2", "MLflow"), ("asyncpg", "Prefect")):
        if importlib.util.find_spec(driver) is None:
            raise UpError(
                f"database: {name} needs the driver {driver} for PostgreSQL. Install it: "
                ".venv/bin/pip install -e '.[postgres]'"
            )
    from sqlalchemy import create_engine
    from sqlalchemy.exc import OperationalError

    for name, used in ((PREFECT, prefect), (MLFLOW, mlflow)):
        url = config.database_url(name)
        assert url is not None
        if not used:
            continue
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg2://", 1))
        try:
            engine.connect().close()
        except OperationalError as error:
            raise UpError(
                f"database: {engine.url.render_as_string()} cannot be used: {str(error.orig).strip()}. "
                f"Is the server there, and was the database made (createdb {name})?"
            ) from None
        finally:
            engine.dispose()
