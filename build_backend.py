"""The PEP 517 backend: setuptools, and libucx-cu12 as a build requirement where the build needs it.

A build compiles against the headers of the oldest libucx-cu12 that is supported. UCX only ever appends to its
structures, so the compiled module runs with every later release, too. With ``TRIO_UCX_SYSTEM_UCX=1`` a build compiles
against the system's headers, and libucx-cu12 is not fetched.
"""

from __future__ import annotations

from collections.abc import Mapping

from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from build_ffi import use_system_ucx

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

OLDEST_LIBUCX = "libucx-cu12==1.21.*"


def get_requires_for_build_wheel(config_settings: Mapping[str, object] | None = None) -> list[str]:
    return [] if use_system_ucx() else [OLDEST_LIBUCX]


#: An sdist needs the same, because setuptools runs setup.py for it.
get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel
