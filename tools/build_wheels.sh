#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel for a processor, and checks both. Linux, glibc 2.28 or newer.
#
#     tools/build_wheels.sh [FOLDER [PROCESSOR]]   all of it, without a container; results into FOLDER (dist). PROCESSOR
#                                                  (this machine's) is x86_64 or aarch64
#     tools/build_wheels.sh repair WHEEL FOLDER    what cibuildwheel has built: gives it its tag, and checks it
#     tools/build_wheels.sh check FILE...          what must hold for every sdist and wheel before it is published
#
# .github/workflows/wheels.yml runs the last two; there cibuildwheel compiles in manylinux's containers. Without one,
# zig (a wheel on PyPI) compiles for either processor, against the symbols of glibc 2.28, and links with the processor's
# libucx-cu12. PYTHON names a Python 3.11 or newer with Python.h.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset TRIO_UCX_SYSTEM_UCX TRIO_UCX_LIBUCX # a published wheel depends on libucx-cu12

tools_of() { # GROUP: a virtual environment with a dependency group of pyproject.toml
    "${PYTHON:-python3}" -m venv "$work/tools"
    PATH=$work/tools/bin:$PATH
    python -m pip install -q --disable-pip-version-check 'pip>=25.1' # the first that knows --group
    python -m pip install -q --group "$root/pyproject.toml:$1"
}

build() { # FOLDER PROCESSOR: the sdist, and from it a wheel without a tag for manylinux, in $work
    # From a copy: setuptools writes into the tree that it packs, which may be another user's.
    mkdir "$work/source"
    tar -C "$root" --exclude-vcs --exclude-vcs-ignores -c . | tar -C "$work/source" --no-same-owner -x
    python -m build --sdist --outdir "$1" "$work/source"
    # The release of libucx-cu12 that build_backend.py names; without isolation, as pip would fetch this processor's.
    python -m pip install -q --no-deps --only-binary=:all: --platform "manylinux_2_28_$2" --target "$work/ucx" \
        "$(cd "$root" && python -c 'import build_backend; print(build_backend.OLDEST_LIBUCX)')"
    # Debian's pyconfig.h includes <x86_64-linux-gnu/...>: /usr/include, too, but after the headers of glibc 2.28. For
    # another processor it includes a file that is not here; this one's suits it, too.
    mkdir "$work/include"
    ln -s "/usr/include/$(uname -m)-linux-gnu" "$work/include/$2-linux-gnu"
    printf '#!/bin/sh\nexec %q cc -target %s-linux-gnu.2.28 "$@" -idirafter %q -idirafter /usr/include\n' \
        "$(python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))')" \
        "$2" "$work/include" >"$work/cc"
    chmod +x "$work/cc"
    # LDSHARED, because Python's own may name folders of this machine; and Debian's looks for UCX there first.
    _PYTHON_HOST_PLATFORM=linux-$2 PYTHONPATH=$work/ucx CC=$work/cc \
        LDSHARED="$work/cc -shared -L$work/ucx/libucx/lib" LDFLAGS=-Wl,--strip-debug \
        python -m pip wheel --no-deps --no-build-isolation --wheel-dir "$work" "$1"/trio_ucx-*.tar.gz
}

audit() { # PROCESSOR ARGUMENT...: auditwheel, which knows only the platforms of its own processor
    python -c 'import platform, sys
platform.machine = lambda machine=sys.argv.pop(1): machine
from auditwheel.main import main
sys.exit(main())' "$@"
}

repair() { # WHEEL FOLDER: UCX is not bundled, as libucx-cu12 has it; newer symbols than the platform's are refused
    local name=${1##*/} processor wheel path
    processor=${name#*-linux_} processor=${processor%.whl}
    wheel=$2/${name%-linux_*}-manylinux_2_28_$processor.whl
    audit "$processor" repair --only-plat --plat "manylinux_2_28_$processor" --exclude 'libuc*.so*' --wheel-dir "$2" "$1"
    audit "$processor" show --ldpaths "$work" "$wheel" # not the system's UCX, whose symbols are newer
    abi3audit --strict "$wheel"
    python -m zipfile -e "$wheel" "$work/unpacked"
    path=$(patchelf --print-rpath "$work"/unpacked/trio_ucx/_native/_ucx.abi3.so)
    [ -z "$path" ] || { echo "the compiled module looks for libraries in $path" >&2; exit 1; }
    check "$wheel"
}

check() {
    twine check --strict "$@"
    for file in "$@"; do
        [[ $file != *.whl ]] || check-wheel-contents "$file"
    done
}

case ${1:-} in
repair | check)
    tools_of check-wheels
    "$@"
    ;;
*)
    folder=${1:-dist}
    mkdir -p "$folder"
    rm -f "$folder"/trio_ucx-*
    tools_of build-wheels
    build "$folder" "${2:-$(uname -m)}" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    repair "$work"/trio_ucx-*.whl "$folder"
    check "$folder"/*.tar.gz
    ;;
esac
