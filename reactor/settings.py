"""Every knob with its unit and bound, read once at start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from reactor.errors import Misuse

LOCAL_MODEL = "use-multilingual"
VOYAGE_MODEL = "voyage-4"


def _postgres_address(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().startswith(("postgresql://", "postgres://")):
        raise ValueError("not a postgresql://user:password@host/database address")
    return value


def _http_address(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("not an http:// or https:// address")
    return value


def _secret_http_address(value: SecretStr) -> SecretStr:
    _http_address(value.get_secret_value())
    return value


class Settings(BaseSettings):
    """The environment, checked. A blank variable counts as absent."""

    model_config = SettingsConfigDict(env_prefix="REACTOR_", frozen=True, populate_by_name=True)

    database_url: Annotated[SecretStr, AfterValidator(_postgres_address)] | None = Field(
        None, validation_alias=AliasChoices("DATABASE_URL", "database_url")
    )
    voyage_api_key: SecretStr | None = Field(None, validation_alias=AliasChoices("VOYAGE_API_KEY", "voyage_api_key"))
    home: Path = Path(".reactor")
    embedding_model: str | None = None
    voyage_base_url: Annotated[str, AfterValidator(_http_address)] | None = None
    cache_capacity: int = Field(100, ge=1, le=1_000_000)  # entries of one process
    cache_ttl_s: float = Field(300.0, gt=0, le=86_400)
    search_deadline_s: float = Field(0.8, gt=0, le=60)
    lease_s: float = Field(30.0, ge=1, le=3600)  # heartbeats extend it while a handler runs
    poll_s: float = Field(5.0, gt=0, le=600)  # the floor under a lost NOTIFY
    drain_s: float = Field(20.0, ge=0, le=600)  # how long SIGTERM lets running handlers finish
    reconcile_s: float = Field(3600.0, ge=1, le=604_800)  # between two scheduled looks for rows that bypassed triggers
    job_retention_d: float = Field(7.0, gt=0, le=3650)  # days that done jobs, rejected rows, resolved alerts stay
    snooze_limit_d: float = Field(7.0, gt=0, le=365)  # a job that has only snoozed for longer is dead
    stuck_s: float = Field(900.0, ge=1, le=604_800)  # a job due for longer is an alert
    pool_size: int = Field(10, ge=2, le=200)  # connections of one process, the listener's apart
    integrations: Path | None = None  # a TOML file of integrations, over the built-in strategies
    token_key: SecretStr | None = None  # private keys of `reactor keygen`, comma-separated: the first one seals
    alert_webhook: Annotated[SecretStr, AfterValidator(_secret_http_address)] | None = None
    handlers: Path | None = None  # a folder of handler modules beside the built-in ones
    http_host: str = "127.0.0.1"
    http_port: int = Field(8787, ge=0, le=65_535)  # 0: any that is free
    http_token: SecretStr | None = None  # the operator's, for everything over HTTP but health

    @model_validator(mode="before")
    @classmethod
    def _blank_is_absent(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A value loses the spaces and line ends that files leave around it; a blank one counts as absent."""
        stripped = {name: value.strip() if isinstance(value, str) else value for name, value in values.items()}
        return {name: value for name, value in stripped.items() if value != ""}

    def target_model(self) -> str:
        """The embedding model new tenants get."""
        return self.embedding_model or (VOYAGE_MODEL if self.voyage_api_key else LOCAL_MODEL)


def load_settings(**overrides: object) -> Settings:
    """The environment as Settings.

    Raises:
        Misuse: A value is wrong; the message names the variable, what is wrong, and never a secret's value.
    """
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as exc:
        first = exc.errors(include_input=False, include_url=False)[0]
        field = str(first["loc"][0]).upper()
        name = field if field in {"DATABASE_URL", "VOYAGE_API_KEY"} else f"REACTOR_{field}"
        more = f" (and {exc.error_count() - 1} more)" if exc.error_count() > 1 else ""
        raise Misuse(f"{name}: {first['msg'].removeprefix('Value error, ')}{more}") from None
