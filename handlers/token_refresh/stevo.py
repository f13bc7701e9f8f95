"""A key of a Stevo instance (account: the instance), which speaks as an Evolution gateway does.

https://doc.evolution-api.com/v2/api-reference/instance-controller/connection-state
Stevo publishes no address that serves everyone: base_url is the one its panel shows.
"""

from __future__ import annotations

from reactor.strategy import Strategy

from .evolution import probe, read_state

STRATEGY = Strategy(probe=probe, read_probe=read_state)
