#!/usr/bin/env bash
# The C half under a checker of memory or of threads:
#
#     tools/sanitize.sh address  [pytest arguments]    AddressSanitizer and UndefinedBehaviorSanitizer
#     tools/sanitize.sh thread   [pytest arguments]    ThreadSanitizer
#     tools/sanitize.sh valgrind [pytest arguments]    valgrind's memcheck, slow: the default is a part of the suite
#
# Builds a copy of the last commit in a temporary directory, with an environment of its own. Needs gcc, PyPI, and for
# the last one valgrind. The first report ends the test that caused it; the exit status is pytest's.
#
# UCX is not compiled with these checkers, so they see only what our C code does, and what libc does for it. Leaks are
# not looked for: Python and UCX keep much until the process ends. The tests count what is open instead
# (trio_ucx.testing.assert_no_live_handles).
set -euo pipefail
cd "$(dirname "$0")/.."
tool=${1:?address, thread or valgrind}
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
suppressions=$PWD/tools/suppressions
git clone -q . "$work/source"
"${PYTHON:-python3}" -m venv "$work/venv"
. "$work/venv/bin/activate"

flags="-g -O1 -fno-omit-frame-pointer"
case $tool in
address) flags+=" -fsanitize=address,undefined -fno-sanitize-recover=undefined" ;;
thread) flags+=" -fsanitize=thread" ;;
valgrind) ;;
*)
    echo "unknown: $tool" >&2
    exit 2
    ;;
esac
cd "$work/source"
CFLAGS="$flags" LDFLAGS="$flags" pip install -q -e '.[test]'

# Every object is an allocation of its own, so that the checkers know where it ends. UCX does not replace malloc's hooks
# or handlers of signals, which are the checkers' here.
export PYTHONMALLOC=malloc UCX_MEM_EVENTS=no UCX_ERROR_SIGNALS= TRIO_UCX_SANITIZED=$tool
export UBSAN_OPTIONS=print_stacktrace=1
libraries() { for name in "$@"; do gcc -print-file-name="lib$name.so"; done | paste -sd: -; }
case $tool in
address)
    # UCX reads an abstract Unix address, and jumps over frames, in ways that are no faults of ours.
    export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allow_user_segv_handler=1:suppressions=$suppressions/address.txt
    [ $# -gt 0 ] || set -- tests
    LD_PRELOAD=$(libraries asan ubsan) python -m pytest --timeout 1200 "$@"
    ;;
thread)
    export TSAN_OPTIONS=suppressions=$suppressions/thread.txt:halt_on_error=1:report_signal_unsafe=0
    # Not tests/test_forks.py: ThreadSanitizer ends a forked child that starts a thread ("dup thread with used id").
    [ $# -gt 0 ] || set -- tests/test_threads.py tests/test_ucx_log.py tests/test_serving.py tests/test_polling.py
    # Without random addresses: its shadow memory has a fixed place.
    setarch -R env LD_PRELOAD="$(libraries tsan)" python -m pytest -n 0 --timeout 1200 "$@"
    ;;
valgrind)
    # Without the files for active messages, remote memory and atomics: under memcheck tests are about 30 times slower.
    [ $# -gt 0 ] || set -- tests/test_native_out_of_memory.py tests/test_full_sockets.py tests/test_messages.py \
        tests/test_chains.py tests/test_ucp_streams.py
    status=0
    valgrind --quiet --xml=yes --xml-file="$work/%p.xml" --track-origins=yes --error-limit=no \
        python -m pytest -n 0 --timeout 3600 "$@" || status=$?
    python tools/valgrind_reports.py "$work"/*.xml || status=$?
    exit "$status"
    ;;
esac
