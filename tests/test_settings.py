"""The environment, read once: a wrong value is one clear line that names the variable as it was set and shows no secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import command, drained, running_reactor

from reactor.errors import Misuse
from reactor.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith(("REACTOR_", "VOYAGE_", "DATABASE_")):
            monkeypatch.delenv(name)


async def test_an_empty_environment_has_the_documented_defaults():
    settings = load_settings()

    assert (settings.database_url, settings.voyage_api_key, settings.handlers) == (None, None, None)
    assert settings.home == Path(".reactor")
    assert (settings.cache_capacity, settings.cache_ttl_s, settings.search_deadline_s, settings.lease_s) == (
        100,
        300,
        0.8,
        30,
    )
    assert settings.target_model() == "use-multilingual"


async def test_a_voyage_key_makes_voyage_the_target_unless_another_model_is_named(monkeypatch):
    monkeypatch.setenv("VOYAGE_API_KEY", "pa-key")
    assert load_settings().target_model() == "voyage-4"

    monkeypatch.setenv("REACTOR_EMBEDDING_MODEL", "voyage-3.5-lite")
    assert load_settings().target_model() == "voyage-3.5-lite"


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"REACTOR_{field.upper()}"
            for field in Settings.model_fields
            if field not in {"database_url", "voyage_api_key"}
        ),
        "DATABASE_URL",
        "VOYAGE_API_KEY",
    ],
)
@pytest.mark.parametrize("blank", ["", "  \n"])
async def test_a_blank_variable_counts_as_absent(monkeypatch, name, blank):
    absent = load_settings()
    monkeypatch.setenv(name, blank)

    assert load_settings() == absent


async def test_the_line_end_of_a_secret_read_from_a_file_is_no_part_of_it(monkeypatch):
    monkeypatch.setenv("VOYAGE_API_KEY", " pa-key\n")
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:p@h/d\n")

    settings = load_settings()

    assert settings.voyage_api_key.get_secret_value() == "pa-key"
    assert settings.database_url.get_secret_value() == "postgresql://u:p@h/d"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REACTOR_CACHE_CAPACITY", "0"),
        ("REACTOR_CACHE_CAPACITY", "1.5"),
        ("REACTOR_CACHE_CAPACITY", "many"),
        ("REACTOR_CACHE_TTL_S", "0"),
        ("REACTOR_SEARCH_DEADLINE_S", "-1"),
        ("REACTOR_SEARCH_DEADLINE_S", "nan"),
        ("REACTOR_SEARCH_DEADLINE_S", "61"),
        ("REACTOR_LEASE_S", "0.5"),
        ("REACTOR_POLL_S", "inf"),
        ("REACTOR_DRAIN_S", "-0.1"),
        ("REACTOR_RECONCILE_S", "0"),
        ("REACTOR_POOL_SIZE", "1"),
        ("REACTOR_VOYAGE_BASE_URL", "api.voyageai.com/v1"),
        ("DATABASE_URL", "mysql://root:hunter2@h/d"),
        ("DATABASE_URL", "host=h password=hunter2"),
    ],
)
async def test_a_wrong_value_is_one_line_with_the_variables_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)

    with pytest.raises(Misuse) as caught:
        load_settings()

    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "edges"),
    [
        ("REACTOR_POOL_SIZE", ("2", "200")),
        ("REACTOR_LEASE_S", ("1", "3600")),
        ("REACTOR_CACHE_CAPACITY", ("1", "1000000")),
    ],
)
async def test_the_bounds_themselves_are_allowed(monkeypatch, name, edges):
    for edge in edges:
        monkeypatch.setenv(name, edge)
        assert getattr(load_settings(), name.removeprefix("REACTOR_").lower()) == float(edge)


async def test_several_wrong_values_are_still_one_line(monkeypatch):
    monkeypatch.setenv("REACTOR_POLL_S", "often")
    monkeypatch.setenv("REACTOR_LEASE_S", "long")

    with pytest.raises(Misuse, match=r"^REACTOR_\w+_S: .* \(and 1 more\)$"):
        load_settings()


async def test_secrets_are_not_shown_when_the_settings_are_printed():
    settings = load_settings(database_url="postgresql://u:hunter2@h/d", voyage_api_key="hunter2")

    assert "hunter2" not in f"{settings!r} {settings}"


@pytest.mark.parametrize("words", [("status",), ("run",), ("up",), ("search", "sol", "café"), ("demo",)])
async def test_every_command_ends_with_2_on_a_wrong_value(words):
    done = command(*words, REACTOR_POLL_S="often")

    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "reactor: REACTOR_POLL_S: Input should be a valid number, unable to parse string as a number\n"
    )


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"REACTOR_HANDLERS": "/nowhere"}, "reactor: REACTOR_HANDLERS: /nowhere is not a folder\n"),
        ({"REACTOR_EMBEDDING_MODEL": "word2vec"}, "reactor: REACTOR_EMBEDDING_MODEL: "),
        (
            {"REACTOR_EMBEDDING_MODEL": "voyage-4"},
            "reactor: REACTOR_EMBEDDING_MODEL: a Voyage model needs VOYAGE_API_KEY\n",
        ),
    ],
)
async def test_what_a_reactor_cannot_work_with_is_said_at_start(dsn, env, line):
    done = command("run", dsn=dsn, **env)

    assert done.returncode == 2
    assert done.stderr.startswith(line), done.stderr
    assert done.stderr.count("\n") == 1


async def test_handlers_of_ones_own_are_found_by_reactor_handlers(dsn, conn, tmp_path, monkeypatch):
    folder = tmp_path / "my handlers"
    folder.mkdir()
    (folder / "greet.py").write_text(
        "async def greet(job):\n    return {'said': 'oi ' + job.payload['name']}\n\nHANDLERS = {'greet': greet}\n"
    )
    monkeypatch.setenv("REACTOR_HANDLERS", f"{folder}\n")
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setenv("REACTOR_POLL_S", "1")
    job = await conn.fetchval("""select reactor.enqueue('greet', '{"name": "Ana"}', 'sol')""")

    async with running_reactor(load_settings()):
        await drained(conn)

    assert await conn.fetchval("select result from reactor.jobs where id = $1", job) == {"said": "oi Ana"}
