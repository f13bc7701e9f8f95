"""A key of a Stevo instance (account: the instance), which speaks as an Evolution gateway does.

https://doc.evolution-api.com/v2/api-reference/instance-controller/connection-state
Stevo publishes no address that serves everyone: base_url is the one its panel shows.
"""

from __future__ import annotations

from .evolution import STRATEGY

__all__ = ["STRATEGY"]
