"""`reactor jobs`, `jobs show` and `retry`: an operator looks at the queue and brings what died back."""

from __future__ import annotations

import json
import re

import asyncpg
import pytest
from conftest import command, eventually

from reactor import db

AWAY = "postgresql://reactor:hunter2@127.0.0.1:1/nowhere"
TOO_BIG = ("9223372036854775808", "99999999999999999999999999")


async def enqueue(
    conn: asyncpg.Connection, type_: str = "publicar", tenant: str = "padaria-sol", **payload: object
) -> int:
    return await conn.fetchval("select reactor.enqueue($1, $2, $3)", type_, payload, tenant)


async def claim(conn: asyncpg.Connection, type_: str) -> list[asyncpg.Record]:
    return await conn.fetch("select * from reactor.claim_jobs(array[$1], array[100], 'w', '30 s')", type_)


async def bury(conn: asyncpg.Connection, *ids: int, type_: str = "publicar", error: str = "ValueError: line 7") -> None:
    """End jobs as their last attempt would."""
    claimed = await claim(conn, type_)
    assert {row["id"] for row in claimed} == set(ids)
    await conn.fetch(
        "select * from reactor.settle_jobs($1, $2, $3, null, $4)",
        list(ids),
        [row["claim_token"] for row in sorted(claimed, key=lambda row: ids.index(row["id"]))],
        ["dead"] * len(ids),
        [error] * len(ids),
    )


async def status_of(conn: asyncpg.Connection, job: int) -> str:
    return await conn.fetchval("select status from reactor.jobs where id = $1", job)


@pytest.fixture
async def queue(conn: asyncpg.Connection) -> dict[str, int]:
    """A job of every status, oldest first; its id by its status."""
    dead = await enqueue(conn, post=1)
    await bury(conn, dead)
    failed = await enqueue(conn, "traduzir", post=2)
    [row] = await claim(conn, "traduzir")
    await conn.fetch(
        "select * from reactor.settle_jobs($1, $2, array['failed'], null, array['TimeoutError: line 3'])",
        [failed],
        [row["claim_token"]],
    )
    done = await enqueue(conn, "resumir", "loja-da-ção", post=3)
    [row] = await claim(conn, "resumir")
    await conn.fetch(
        "select * from reactor.settle_jobs($1, $2, array['done'], $3)", [done], [row["claim_token"]], [{"palavras": 12}]
    )
    running = await enqueue(conn, "indexar", post=4)
    await claim(conn, "indexar")
    pending = await enqueue(conn, "publicar", "loja-da-ção", post=5)
    return {"dead": dead, "failed": failed, "done": done, "running": running, "pending": pending}


# --- reactor jobs ---


async def test_it_lists_the_newest_jobs_first_as_data(dsn, queue):
    listed = command("jobs", "--json", dsn=dsn)

    assert (listed.returncode, listed.stderr) == (0, "")
    rows = json.loads(listed.stdout)
    assert [row["id"] for row in rows] == sorted(queue.values(), reverse=True)
    assert {row["status"]: row["id"] for row in rows} == queue
    assert rows[0]["tenant_id"] == "loja-da-ção"
    assert set(rows[0]) >= {
        "id",
        "type",
        "tenant_id",
        "lane",
        "status",
        "attempts",
        "max_attempts",
        "run_after",
        "last_error",
    }


async def test_down_a_pipe_it_is_a_line_a_job_without_a_box(dsn, queue):
    listed = command("jobs", dsn=dsn)

    lines = listed.stdout.splitlines()
    assert lines[0].split() == ["id", "type", "tenant", "status", "attempts", "run", "after", "last", "error"]
    assert [int(line.split()[0]) for line in lines[1:]] == sorted(queue.values(), reverse=True)
    assert re.search("[│┃─━┏]", listed.stdout) is None
    assert "loja-da-ção" in listed.stdout


@pytest.mark.parametrize(
    ("words", "statuses"),
    [
        *((["--status", status], [status]) for status in ("dead", "failed", "done", "running", "pending")),
        (["--type", "publicar"], ["pending", "dead"]),
        (["--tenant", "loja-da-ção"], ["pending", "done"]),
        (["--tenant", "loja-da-ção", "--status", "done"], ["done"]),
        (["--type", "publicar", "--status", "dead", "--tenant", "padaria-sol"], ["dead"]),
        (["--tenant", "loja"], []),
        (["--tenant", ""], []),
        (["--tenant", "' or true --"], []),
        (["-n", "2"], ["pending", "running"]),
        (["--status", "dead", "-n", "1"], ["dead"]),
    ],
)
async def test_it_lists_only_what_was_asked_for(dsn, queue, words, statuses):
    listed = command("jobs", *words, "--json", dsn=dsn)

    assert [row["status"] for row in json.loads(listed.stdout)] == statuses


async def test_an_empty_queue_is_an_empty_list(dsn):
    assert command("jobs", "--json", dsn=dsn).stdout == "[]\n"
    assert command("jobs", dsn=dsn).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("jobs", "--status", "morto"),
        ("jobs", "--status", "dead'"),
        ("jobs", "-n", "0"),
        ("jobs", "-n", "muitos"),
        ("jobs", "7"),
        ("jobs", "show"),
        ("jobs", "show", "sete"),
        ("jobs", "show", "0"),
        ("jobs", "show", "-1"),
        *(("jobs", "show", number) for number in TOO_BIG),
        *(("retry", "7", number) for number in TOO_BIG),
        ("retry", "sete"),
        ("retry",),
        ("retry", "7", "--all"),
        ("retry", "--type", "publicar", "--all"),
        ("retry", "7", "--type", "publicar"),
    ],
)
async def test_wrong_words_are_exit_code_2_without_asking_postgres(words):
    done = command(*words, dsn=AWAY)

    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


@pytest.mark.parametrize("number", ["sete", *TOO_BIG])
async def test_what_is_no_id_is_said_in_one_line(number):
    for words in (("jobs", "show", number), ("retry", number)):
        assert re.fullmatch(rf"reactor: {number} is no job's id: [^\n]+\n", command(*words, dsn=AWAY).stderr)


@pytest.mark.parametrize("words", [("jobs",), ("jobs", "show", "7"), ("retry", "7"), ("schedules",)])
async def test_without_postgres_they_are_exit_code_1_in_one_line_without_the_password(words):
    done = command(*words, dsn=AWAY)

    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"reactor: Postgres is out of reach[^\n]*\n", done.stderr)
    assert "hunter2" not in done.stderr


async def test_a_type_that_is_no_text_is_no_traceback(dsn):
    for words in (("jobs", "--type", "\udcff"), ("retry", "--type", "\udcff")):
        done = command(*words, dsn=dsn)

        assert done.returncode in {1, 2}
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1


async def blocks_touched(conn: asyncpg.Connection) -> int:
    """Of the jobs' table and its indexes, by sessions that have ended."""
    return await conn.fetchval(
        "select heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit from pg_statio_user_tables where relname = 'jobs'"
    )


@pytest.mark.parametrize("words", [(), ("--status", "dead"), ("--status", "running"), ("--status", "done")])
async def test_a_long_history_costs_nothing(dsn, conn, words):
    """What is dead or runs may be far down it: here beneath every done job."""
    await conn.execute("alter table reactor.jobs set (autovacuum_enabled = off)")
    for status, jobs in (("dead", 3000), ("running", 3000), ("done", 100_000)):
        await conn.execute(
            "insert into reactor.jobs (type, tenant_id, lane, status) "
            "select 'resumir', 't' || n % 100, 'resumir', $1 from generate_series(1, $2) n",
            status,
            jobs,
        )
    await conn.execute("analyze reactor.jobs")
    await conn.execute("select pg_stat_force_next_flush()")
    before = await blocks_touched(conn)

    listed = command("jobs", *words, "--json", dsn=dsn)

    async def after():
        return (
            await conn.fetchval(
                "select not exists (select from pg_stat_activity where application_name = 'memory-reactor command' and datname = current_database())"
            )
            and (await blocks_touched(conn)) > before
        )

    await eventually(after)
    assert len(json.loads(listed.stdout)) == 20
    assert await blocks_touched(conn) - before < 500


# --- reactor jobs show ---


async def test_show_prints_one_job_in_full_with_the_history_of_its_attempts(dsn, queue):
    shown = command("jobs", "show", str(queue["dead"]), "--json", dsn=dsn)

    job = json.loads(shown.stdout)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert (job["id"], job["type"], job["status"], job["payload"]) == (queue["dead"], "publicar", "dead", {"post": 1})
    assert [(entry["attempt"], entry["error"]) for entry in job["history"]] == [(1, "ValueError: line 7")]
    assert "claim_token" not in job


async def test_show_says_for_people_what_it_says_as_data(dsn, queue):
    shown = command("jobs", "show", str(queue["done"]), dsn=dsn)

    lines = dict(line.strip().split(None, 1) for line in shown.stdout.splitlines())
    assert lines["tenant_id"].strip() == "loja-da-ção"
    assert json.loads(lines["result"]) == {"palavras": 12}
    assert lines["last_error"].strip() == "-"


async def test_json_may_be_said_before_show(dsn, queue):
    shown = command("jobs", "--json", "show", str(queue["done"]), dsn=dsn)

    assert json.loads(shown.stdout)["id"] == queue["done"]


@pytest.mark.parametrize("number", ["9223372036854775807", "123456"])
async def test_show_of_a_job_that_is_not_there_is_exit_code_1(dsn, number):
    shown = command("jobs", "show", number, dsn=dsn)

    assert (shown.returncode, shown.stdout) == (1, "")
    assert re.fullmatch(rf"reactor: there is no job {number} [^\n]+\n", shown.stderr)


async def test_the_claim_s_token_is_shown_to_nobody(dsn, conn, queue):
    token = str(await conn.fetchval("select claim_token from reactor.jobs where id = $1", queue["running"]))

    for words in (["jobs"], ["jobs", "--json"], ["jobs", "show", str(queue["running"])]):
        assert token not in command(*words, dsn=dsn).stdout


# --- reactor retry ---


async def test_retry_brings_a_dead_job_back_with_all_its_attempts_and_its_history(dsn, conn, queue):
    retried = command("retry", str(queue["dead"]), dsn=dsn)

    job = await conn.fetchrow("select * from reactor.jobs where id = $1", queue["dead"])
    assert (retried.returncode, retried.stdout, retried.stderr) == (0, "", "1 job will run again\n")
    assert (job["status"], job["attempts"], job["last_error"]) == ("pending", 0, "ValueError: line 7")
    assert [entry.get("error", "retried") for entry in job["history"]] == ["ValueError: line 7", "retried"]
    assert {row["id"] for row in await claim(conn, "publicar")} == {queue["dead"], queue["pending"]}


async def test_retry_closes_the_alert_of_the_jobs_it_brings_back(dsn, conn, queue):
    assert (
        await conn.fetchval("select count(*) from reactor.alerts where cause = 'dead_jobs' and resolved_at is null")
        == 1
    )

    command("retry", "--all", dsn=dsn)

    assert await conn.fetchval("select count(*) from reactor.alerts where resolved_at is null") == 0


async def test_retry_by_id_also_hastens_a_failed_job(dsn, conn, queue):
    assert command("retry", str(queue["failed"]), dsn=dsn).returncode == 0

    assert [row["id"] for row in await claim(conn, "traduzir")] == [queue["failed"]]


async def test_retry_by_type_or_all_takes_the_dead_ones_only(dsn, conn, queue):
    other = await enqueue(conn, "outro")
    await bury(conn, other, type_="outro", error="KeyError: line 1")

    by_type = command("retry", "--type", "publicar", "--json", dsn=dsn)
    everything = command("retry", "--all", "--json", dsn=dsn)
    nothing = command("retry", "--all", "--json", dsn=dsn)

    assert json.loads(by_type.stdout) == [queue["dead"]]
    assert json.loads(everything.stdout) == [other]
    assert (nothing.stdout, nothing.returncode) == ("[]\n", 0)
    assert await status_of(conn, queue["failed"]) == "failed"


async def test_retry_says_which_ids_it_could_not_and_does_the_others(dsn, conn, queue):
    wrong = [queue["done"], queue["running"], queue["pending"], 9223372036854775807]

    retried = command("retry", str(queue["dead"]), *map(str, wrong), "--json", dsn=dsn)

    assert retried.returncode == 1
    assert json.loads(retried.stdout) == [queue["dead"]]
    assert retried.stderr.splitlines()[0] == "1 job will run again"
    assert all(str(number) in retried.stderr.splitlines()[1] for number in wrong)
    assert [await status_of(conn, number) for number in wrong[:3]] == ["done", "running", "pending"]


async def test_ids_given_twice_are_one_job(dsn, queue):
    retried = command("retry", *[str(queue["dead"])] * 3, "--json", dsn=dsn)

    assert (retried.returncode, json.loads(retried.stdout)) == (0, [queue["dead"]])


async def test_a_retried_job_wakes_a_sleeping_reactor(dsn, conn, queue):
    heard = []
    await conn.add_listener("reactor_wake", lambda *_: heard.append(True))
    await conn.fetchval("select reactor.arm()")

    command("retry", str(queue["dead"]), dsn=dsn)

    async def rung():
        return heard

    await eventually(rung)
    await conn.remove_listener("reactor_wake", lambda *_: None)
    await conn.reset()


# --- reactor schedules ---


async def test_schedules_lists_what_runs_when_in_its_own_zone(dsn, conn):
    await conn.execute(
        """insert into reactor.schedules (name, type, cron, timezone, next_at, last_at, is_enabled, tenant_id) values
           ('diário', 'digest', '0 7 * * *', 'America/Sao_Paulo', '2030-01-01 10:00+00', '2029-12-31 10:00+00', true, 'padaria-sol'),
           ('pausado', 'digest', '@daily', 'UTC', null, null, false, '')"""
    )

    for_people, data = command("schedules", dsn=dsn), command("schedules", "--json", dsn=dsn)

    assert (for_people.returncode, for_people.stderr, data.stderr) == (0, "", "")
    lines = for_people.stdout.splitlines()
    assert re.split(r"\s{2,}", lines[1].strip()) == [
        "diário",
        "digest",
        "0 7 * * *",
        "America/Sao_Paulo",
        "2029-12-31 07:00",
        "2030-01-01 07:00",
    ]
    assert lines[2].split()[-1] == "off"
    rows = json.loads(data.stdout)
    assert [row["name"] for row in rows] == ["diário", "pausado"]
    assert rows[0]["next_at"].startswith("2030-01-01T10:00")
    assert rows[0]["tenant_id"] == "padaria-sol"


async def test_schedules_says_which_one_is_wrong_and_why(dsn, conn):
    await conn.execute(
        "insert into reactor.schedules (name, type, cron, timezone) values ('torto', 'digest', '0 25 * * *', 'UTC'), ('longe', 'digest', '@daily', 'Marte')"
    )

    for_people, data = command("schedules", dsn=dsn), command("schedules", "--json", dsn=dsn)

    assert for_people.returncode == 0
    assert for_people.stderr.splitlines() == ["longe: there is no time zone 'Marte'", "torto: '0 25 * * *': bad hour"]
    assert for_people.stdout.count("never: wrong") == 2
    assert [row["error"] is not None for row in json.loads(data.stdout)] == [True, True]


async def test_no_schedule_is_an_empty_list(dsn):
    assert command("schedules", "--json", dsn=dsn).stdout == "[]\n"


# --- help ---


@pytest.mark.parametrize("words", [("jobs",), ("jobs", "show"), ("retry",), ("schedules",), ("dev",)])
async def test_help_says_what_it_does_with_an_example_as_it_is_typed(words):
    helped = command(*words, "--help", COLUMNS="80")

    assert (helped.returncode, helped.stderr) == (0, "")
    assert f"reactor {' '.join(words)}" in helped.stdout.split("Example:\n")[1]
    assert "…" not in helped.stdout


async def test_a_table_of_another_release_is_said_in_one_line(empty_dsn):
    done = command("jobs", dsn=empty_dsn)

    assert done.returncode == 2
    assert done.stderr == "reactor: this database has no reactor schema yet: run `reactor migrate`\n"
    assert db.sql_files()
