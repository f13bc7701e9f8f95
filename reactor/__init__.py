"""The memory reactor: rows inserted into Postgres become memories an agent can recall."""

from reactor.db import tenant
from reactor.errors import Permanent, Unavailable
from reactor.job import Handler, Job, Snooze
from reactor.memory import Hit, Hits, Memory

__all__ = ["Handler", "Hit", "Hits", "Job", "Memory", "Permanent", "Snooze", "Unavailable", "tenant"]
