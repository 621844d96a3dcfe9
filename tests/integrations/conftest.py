"""Tests against the real libraries run where these are; see ``test_beside_trl``."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("trl") else ["real"]
