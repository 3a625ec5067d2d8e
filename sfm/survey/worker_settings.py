"""Header overrides that bring our settings along into the processes multidimio spawns."""

from segy.config import SegyHeaderOverrides

import sfm.survey.clients  # noqa: F401 - quietens aiohttp about the sessions that multidimio's workers leave open


class Overrides(SegyHeaderOverrides):
    """As its parent. A worker that unpickles one imports this module, and there is no other way to reach it."""
