"""A hostile peer over real UCX takes random steps of ``docs/wire.md``. Nobody but itself is harmed."""

from __future__ import annotations
