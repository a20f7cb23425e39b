"""The PEP 517 backend: setuptools, told what a build needs only where it does.

A build compiles against the headers of the oldest libucx-cu12 that is supported, whichever is installed where it will
run: UCX only ever appends to its structures, so such a module runs with every later one. With ``TRIO_UCX_SYSTEM_UCX=1``
it takes the system's headers, and libucx-cu12 is not fetched.
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

OLDEST_LIBUCX = "libucx-cu12==1.17.*"


def get_requires_for_build_wheel(config_settings: Mapping[str, object] | None = None) -> list[str]:
    return [] if use_system_ucx() else [OLDEST_LIBUCX]


#: An sdist, too: setuptools runs setup.py for it.
get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel
