"""Configures structlog once: JSON on a pipe, colour at a terminal; silent inside somebody else's program.

Events go through the standard logger "reactor", so a program that imports `Memory` decides itself what to show.
No event carries tenant text, a vector or a secret: they carry ids, counts, lengths and codes.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog

_LOGGER_NAME = "reactor"
logging.getLogger(_LOGGER_NAME).addHandler(logging.NullHandler())

_SHARED: list[structlog.typing.Processor] = [
    structlog.stdlib.filter_by_level,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
]

Log = structlog.stdlib.BoundLogger


def get_log(**bound: Any) -> Log:
    """A logger with `bound` fields on every event."""
    log: Log = structlog.wrap_logger(
        logging.getLogger(_LOGGER_NAME), processors=_SHARED, wrapper_class=structlog.stdlib.BoundLogger, **bound
    )
    return log


def shows(level: int) -> bool:
    """Whether anybody would see an event of `level`: asked before the cost of one on a path of microseconds."""
    return logging.getLogger(_LOGGER_NAME).isEnabledFor(level)


def configure(stream: TextIO = sys.stdout, level: int = logging.INFO) -> None:
    """Send the reactor's events to `stream`, one a line: JSON, or colour where `stream` is a terminal."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if stream.isatty() else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
    )
    logger = logging.getLogger(_LOGGER_NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
