"""examples/http_server.py and examples/http_client.py.

What the server makes of requests is tested without UCX, as any stream will do: without delay, and in exact order.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from helpers import serving, until

import trio_ucx

from .programs import DEADLINE, EXAMPLES, Program, assert_complaint, load, program, run_here

h11 = pytest.importorskip("h11")
trustme = pytest.importorskip("trustme")

HTTP_SERVER = EXAMPLES / "http_server.py"
HTTP_CLIENT = EXAMPLES / "http_client.py"

http_server: Any = load(HTTP_SERVER)
http_client: Any = load(HTTP_CLIENT)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and what it signed: cert.pem, key.pem. other.pem did not sign it."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    trustme.CA().cert_pem.write_to_path(directory / "other.pem")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    for part in issued.cert_chain_pems:
        part.write_to_path(directory / "cert.pem", append=True)
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory to serve. Beside it is a secret."""
    root = tmp_path / "root"
    (root / "sub" / "below").mkdir(parents=True)
    (root / "small.txt").write_bytes(b"small\n")
    for name in ["unknown", "not text.txt.gz"]:
        (root / name).touch()
    (root / "sub" / "below" / "ünï çødé?.html").write_bytes(b"<p>")
    (root / os.fsdecode(b"not \xff utf-8")).write_bytes(b"\xff")
    (tmp_path / "secret").write_bytes(b"secret")
    return root


def generated(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


# ---- the programs ----


@attrs.define
class Service:
    """A running server, and the options with which clients reach it."""

    server: Program
    options: list[object]

    def client(self, target: str, *options: object) -> AbstractContextManager[Program]:
        return program(HTTP_CLIENT, self.server.address, target, *options, *self.options)

    async def run_client(self, target: str, *options: object) -> int:
        return await run_client(self.server.address, target, *options, *self.options)


async def run_client(*arguments: object) -> int:
    """Runs the client in a thread: its exit status."""
    return await trio.to_thread.run_sync(run_here, http_client, *arguments)


@pytest.fixture
async def service(
    request: pytest.FixtureRequest, root: Path, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """A server, which must survive what a test does, log nothing, and end at SIGTERM. See ``over``."""
    way: str = request.param
    monkeypatch.setenv("UCX_TLS", way if way == "tcp,sm,self" else "tcp")
    key = "--tls", certificates / "cert.pem", certificates / "key.pem"
    server_options: list[object] = [*key] if way == "tls" else ["--tcp"] if way == "--tcp" else []
    client_options = ["--tls", certificates / "ca.pem"] if way == "tls" else server_options
    link = tmp_path / "link to root"
    link.symlink_to("root")
    with program(HTTP_SERVER, link, *server_options) as server:
        await server.wait_address()
        service = Service(server, client_options)
        yield service
        if server.process.poll() is None:
            assert await service.run_client("/small.txt", "-o", tmp_path / "last") == 0
            server.process.terminate()
            assert await server.end() == (130, "")


#: Values of UCX_TLS, "tls" under UCX over TCP, or the programs' option.
def over(*ways: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("service", ways, indirect=True)


@pytest.mark.sample(1)
@over("tcp,sm,self", "tls", "--tcp")
async def test_programs(service: Service, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (root / "large").write_bytes(os.urandom(20_000_001))
    output, pipe = tmp_path / "out", tmp_path / "pipe"
    assert await service.run_client("/large", "-o", output) == 0
    assert output.read_bytes() == (root / "large").read_bytes()
    assert await service.run_client("/echo", "-o", output, "--data", root / "large", "--repeat", 2) == 0
    assert output.read_bytes() == (root / "large").read_bytes() * 2
    os.mkfifo(pipe)  # whose length is not known before, which makes the request chunked
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.to_thread.run_sync, pipe.write_bytes, b"x" * 10**6, abandon_on_cancel=True))
        assert await service.run_client("/echo", "-o", output, "--data", pipe) == 0
    assert output.read_bytes() == b"x" * 10**6
    with service.client("/small.txt") as client:
        assert await client.end() == (0, "")
    assert client.output == "small\n"


@pytest.mark.full
@over("tcp,sm,self", "tls", "--tcp")
async def test_upload_that_is_refused(service: Service, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The client learns why, though the server does not read what it uploads."""
    with open(tmp_path / "upload", "wb") as file:
        file.truncate(2**33)
    assert await service.run_client("/small.txt", "--data", tmp_path / "upload") == 4
    assert capfd.readouterr().err == "http_client: 405 Method Not Allowed\n"


async def wait_moving(path: Path) -> None:
    """Until a program has written some of a file."""
    await until(lambda: path.exists() and path.stat().st_size)


@pytest.mark.full
@over("tcp", "tls")
async def test_survives_killed_clients(service: Service, tmp_path: Path) -> None:
    upload, one, two = tmp_path / "upload", tmp_path / "one", tmp_path / "two"
    with open(upload, "wb") as file:
        file.truncate(2**33)
    files = Path(f"/proc/{service.server.process.pid}/fd")
    assert await service.run_client("/small.txt", "-o", one) == 0
    one.unlink()
    before = len([*files.iterdir()])
    with (
        service.client("/big?bytes=20000000000", "-o", one) as reader,
        service.client("/echo", "-o", two, "--data", upload) as writer,
    ):
        for output, client in (one, reader), (two, writer):
            await wait_moving(output)
            client.process.kill()
            await client.end()
            output.unlink()
    await until(lambda: len([*files.iterdir()]) <= before)


@pytest.mark.full
@over("tcp,sm,self", "tls")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
async def test_one_side_ends_in_the_middle(service: Service, tmp_path: Path, number: signal.Signals | None) -> None:
    """The server by a signal, or the client, which is interrupted."""
    output = tmp_path / "out"
    with service.client("/big?bytes=20000000000", "-o", output) as client:
        await wait_moving(output)
        if number is None:
            client.process.send_signal(signal.SIGINT)
            assert await client.end() == (130, "")
        else:
            service.server.process.send_signal(number)
            status, errors = await client.end()
            assert status == 1
            assert_complaint(errors, HTTP_CLIENT)
            assert await service.server.end() == (-number if number == signal.SIGKILL else 130, "")
    output.unlink()


# ---- what one asks the server for, one gets ----


@attrs.frozen
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@attrs.define
class Talk:
    """One connection, on which a test says what it likes."""

    stream: trio.abc.Stream
    unread: bytes = b""

    async def send(self, *lines: str, body: bytes = b"") -> None:
        """Lines of a request's head, and the empty line after them."""
        await self.stream.send_all("".join(f"{line}\r\n" for line in (*lines, "Host: test", "")).encode() + body)

    async def receive(self, method: str = "GET") -> Answer:
        """The next answer."""
        http = h11.Connection(h11.CLIENT)
        http.send(h11.Request(method=method, target="/", headers=[("Host", "test")]))
        if self.unread:
            http.receive_data(self.unread)
        head, body = None, bytearray()
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                http.receive_data(await self.stream.receive_some())
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                assert isinstance(event, (h11.InformationalResponse, h11.Response)), event
                head = event
        self.unread = http.trailing_data[0]
        assert head is not None
        return Answer(head.status_code, dict(head.headers), bytes(body))

    async def get(self, target: str, *headers: str, method: str = "GET") -> Answer:
        await self.send(f"{method} {target} HTTP/1.1", *headers)
        return await self.receive(method)

    async def dropped(self) -> bytes:
        """What comes until the server has left us."""
        came = bytearray(self.unread)
        with suppress(trio.BrokenResourceError):
            while data := await self.stream.receive_some():
                came += data
        return bytes(came)


Pair = Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]]
#: Streams without a buffer: what is sent waits until it is read.
LOCKSTEP: Pair = trio.testing.lockstep_stream_pair


@asynccontextmanager
async def talking(
    root: Path, *, pair: Pair = trio.testing.memory_stream_pair, timeout: float = DEADLINE / 3, tls: Any = None
) -> AsyncIterator[Talk]:
    """A connection to the server, which must not fail, and must be done with it at the end."""
    ours, its = pair()
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(http_server.handle, root, tls, timeout, its)
            async with ours:
                yield Talk(ours)


@pytest.fixture
async def talk(root: Path) -> AsyncIterator[Talk]:
    async with talking(root) as talk:
        yield talk


async def test_keeps_alive(talk: Talk) -> None:
    small = await talk.get("/small.txt")
    assert (small.status, small.body) == (200, b"small\n")
    assert small.headers[b"content-length"] == b"6"
    assert small.headers[b"content-type"] == b"text/plain"
    assert b"connection" not in small.headers
    for size in 0, 1, 1000, 2**18, 10**6:
        big = await talk.get(f"/big?bytes={size}")
        assert (big.status, big.body, big.headers[b"transfer-encoding"]) == (200, generated(size), b"chunked")
    assert (await talk.get("/nothing")).status == 404
    await talk.send("POST /echo HTTP/1.1", "Content-Length: 5", body=b"hello")
    assert (await talk.receive()).body == b"hello"
    assert (await talk.get("/sub/below/%C3%BCn%c3%af%20%C3%A7%C3%B8d%C3%A9%3F.html?query")).body == b"<p>"
    assert (await talk.get("/not%20%ff%20utf-8")).body == b"\xff"
    assert (await talk.get("http://test/small.txt")).body == b"small\n"
    for name in ["unknown", "not%20text.txt.gz"]:
        assert (await talk.get(f"/{name}")).headers[b"content-type"] == b"application/octet-stream"


async def test_head(talk: Talk) -> None:
    for target, status, header in [
        ("/small.txt", 200, (b"content-length", b"6")),
        ("/big?bytes=1000", 200, (b"transfer-encoding", b"chunked")),
        ("/nothing", 404, (b"content-length", b"14")),
        ("/echo", 405, (b"allow", b"POST")),
    ]:
        answer = await talk.get(target, method="HEAD")
        assert (answer.status, answer.body) == (status, b"")
        assert header in answer.headers.items()
    assert (await talk.get("/small.txt")).body == b"small\n"  # nothing of a body was in the way


async def test_pipelines(root: Path) -> None:
    """Requests that do not wait for answers."""
    sizes = [0, 70_000, 3, 2_000_000, 1_000_000, 5]
    async with talking(root, pair=LOCKSTEP) as talk, trio.open_nursery() as nursery:
        request = "GET /big?bytes={} HTTP/1.1\r\nHost: test\r\n\r\n"
        post = "POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\n\r\necho"
        nursery.start_soon(talk.stream.send_all, "".join(request.format(size) + post for size in sizes).encode())
        for size in sizes:
            assert (await talk.receive()).body == generated(size)
            assert (await talk.receive()).body == b"echo"


async def test_echo_begins_before_the_upload_ends(talk: Talk) -> None:
    await talk.send("POST /echo HTTP/1.1", "Content-Length: 5", "Expect: 100-continue")
    go_ahead, _, rest = bytes(await talk.stream.receive_some()).partition(b"\r\n\r\n")
    assert go_ahead.startswith(b"HTTP/1.1 100 ")
    await talk.stream.send_all(b"hel")
    while b"hel" not in rest:
        rest += await talk.stream.receive_some()
    talk.unread = rest
    await talk.stream.send_all(b"lo")
    assert (await talk.receive()).body == b"hello"
    # It is refused before anything was uploaded.
    await talk.send("POST /small.txt HTTP/1.1", "Content-Length: 5", "Expect: 100-continue")
    assert (await talk.receive()).status == 405


async def test_hangs_up_when_asked_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LINGER", 1000)  # there is nothing to wait for
    async with talking(root) as talk:
        answer = await talk.get("/small.txt", "Connection: close")
        assert (answer.body, answer.headers[b"connection"]) == (b"small\n", b"close")
        assert await talk.dropped() == b""
    async with talking(root) as talk:
        await talk.send("GET /big?bytes=100000 HTTP/1.0")
        head, _, body = (await talk.dropped()).partition(b"\r\n\r\n")
        assert body == generated(100_000)
        assert b"chunked" not in head
    async with talking(root) as talk:  # this client has ended its half
        await talk.send("GET /small.txt HTTP/1.1")
        assert isinstance(talk.stream, trio.abc.HalfCloseableStream)
        await talk.stream.send_eof()
        assert (await talk.receive()).body == b"small\n"
        assert await talk.dropped() == b""


# ---- what one must not ask for ----


async def test_serves_nothing_but_files_of_the_directory(talk: Talk, root: Path) -> None:
    (root / "out").symlink_to("../secret")
    (root / "up").symlink_to("..")
    (root / "absolute").symlink_to(root.parent / "secret")
    (root / "twice").symlink_to("up")
    (root / "loop").symlink_to("loop")
    (root / "nowhere").symlink_to("nothing")
    (root / "zero").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe")
    (root.parent / "root and more").mkdir()
    (root.parent / "root and more" / "file").write_bytes(b"secret")
    (root / "sibling").symlink_to("../root and more/file")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(root / "socket"))
    text = """
        / /. /.. /../secret /sub/../../secret /%2e%2e/secret /sub/.%2E/%2e./secret /..%2fsecret /%2e%2e%2fsecret
        /sub/../small.txt //../secret /../root/small.txt http://test/../secret http://test
        /out /up/secret /up /absolute /twice/secret /sibling /zero /loop /nowhere /pipe /socket
        /sub /sub/ /sub/below /small.txt/ /small.txt/x /small.txt%00 /%00 /etc/passwd //etc/passwd /..\\secret
        /proc/self/environ /.. /%252e%252e/secret
    """
    up = "/%2e%2e" * 20
    targets = [f"{up}{root.parent}/secret", f"{up}/etc/passwd", str(root.parent / "secret"), "/" + "n" * 300]
    for target in [*text.split(), *targets]:
        answer = await talk.get(target)
        assert (target, answer.status, answer.body) == (target, 404, b"404 Not Found\n")


async def test_follows_links_that_end_inside_the_directory(talk: Talk, root: Path) -> None:
    (root / "sub" / "link").symlink_to("../small.txt")
    (root / "directory").symlink_to("sub/below")
    (root / "out and in").symlink_to("../root/small.txt")
    (root / "sub" / "below" / "file").write_bytes(b"here")
    assert (await talk.get("/sub/link")).body == b"small\n"
    assert (await talk.get("/directory/file")).body == b"here"
    assert (await talk.get("/out%20and%20in")).body == b"small\n"


async def test_refuses_to_generate(talk: Talk) -> None:
    for query in ["", "?bytes", "?bytes=", "?bytes=x", "?bytes=-1", "?bytes=1&bytes=2", "?bytes=" + "9" * 5000]:
        assert (query, (await talk.get(f"/big{query}")).status) == (query, 400)


async def test_refuses_methods(talk: Talk) -> None:
    requests = [(method, "/small.txt", b"GET, HEAD") for method in ["POST", "PUT", "get", "G"]]
    requests += [("GET", "/echo", b"POST"), ("HEAD", "/echo", b"POST"), ("POST", "/big", b"GET, HEAD")]
    requests += [("OPTIONS", "*", b"GET, HEAD"), ("CONNECT", "test:80", b"GET, HEAD")]
    for method, target, allowed in requests:
        answer = await talk.get(target, method=method)
        assert (method, answer.status, answer.headers[b"allow"]) == (method, 405, allowed)
    assert (await talk.get("/small.txt")).status == 200


async def test_refuses_garbage(root: Path) -> None:
    for garbage, status in [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"\r\n\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET /" + b"x" * 100_000, 431),
    ]:
        async with talking(root) as talk:
            await talk.stream.send_all(garbage)
            assert (garbage, (await talk.receive()).status) == (garbage, status)


async def test_hangs_up_after_garbage(root: Path, autojump_clock: object) -> None:
    async with talking(root) as talk:
        await talk.send("GET /big?bytes=1 HTTP/1.1", body=b"garbage\r\n\r\n")
        assert (await talk.receive()).body == b"\0"
        answer = await talk.receive()
        assert (answer.status, answer.body) == (400, b"400 Bad Request\n")
        assert answer.headers[b"connection"] == b"close"
        await talk.send("GET /big?bytes=1 HTTP/1.1")
        assert await talk.dropped() == b""
    async with talking(root) as talk:
        await talk.send("POST /echo HTTP/1.1", "Transfer-Encoding: chunked", body=b"2\r\nok\r\nnonsense\r\n")
        came = await talk.dropped()
        assert came.startswith(b"HTTP/1.1 200 ") and b"0\r\n\r\n" not in came
    async with talking(root) as talk:  # this one was answered before
        await talk.send("POST /small.txt HTTP/1.1", "Transfer-Encoding: chunked", body=b"nonsense\r\n")
        assert (await talk.dropped()).startswith(b"HTTP/1.1 405 ")


async def test_goes_on_reading_for_a_while_after_a_refusal(root: Path, autojump_clock: trio.testing.MockClock) -> None:
    """Else TCP may drop the answer, when more comes after the server has left."""
    async with talking(root, pair=LOCKSTEP) as talk:
        await talk.send("POST /nothing HTTP/1.1", "Content-Length: 100000", body=bytes(20_000))
        assert (await talk.receive()).status == 405
        for _ in range(2):
            await talk.stream.send_all(bytes(20_000))
        assert await talk.dropped() == b""


# ---- clients that are slow, and other trouble ----


async def test_drops_slow_clients(root: Path, certificates: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with talking(root, timeout=10) as talk:
        assert (await talk.get("/big?bytes=1")).status == 200
        answer = await talk.receive()
        assert (answer.status, answer.headers[b"connection"]) == (408, b"close")
        assert await talk.dropped() == b""
    # This one does not even say hello, where TLS expects that.
    tls = http_server.load_certificate(certificates / "cert.pem", certificates / "key.pem")
    async with talking(root, tls=tls, timeout=10) as talk:
        assert await talk.dropped() == b""
    async with talking(root, timeout=10) as talk:
        await talk.stream.send_all(b"GET /small.txt HTTP/1.1\r\nHost: ")
        for _ in range(3):
            await talk.stream.send_all(b"x")
            await trio.sleep(4)
        assert (await talk.receive()).status == 408
    async with talking(root, timeout=10) as talk:
        await talk.send("POST /echo HTTP/1.1", "Content-Length: 10", body=b"half")
        assert (await talk.dropped()).endswith(b"\r\n4\r\nhalf\r\n")


async def test_timeout_of_the_command_line(root: Path) -> None:
    with program(HTTP_SERVER, root, "--tcp", "--timeout", "0.1") as server:
        await server.wait_address()
        host, _, port = server.address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            with trio.fail_after(20):  # less than without the option
                assert b" 408 " in b"".join([part async for part in stream])


async def test_drops_a_client_that_does_not_read(root: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with talking(root, pair=LOCKSTEP, timeout=10) as talk:
        await talk.send("GET /big?bytes=100000000 HTTP/1.1")
        await trio.sleep(11)
        assert len(await talk.dropped()) < 10**6


async def test_waits_for_a_slow_reader(root: Path, autojump_clock: trio.testing.MockClock) -> None:
    """It moves, and takes longer than the timeout altogether."""
    async with talking(root, pair=LOCKSTEP, timeout=3) as talk:
        await talk.send("GET /big?bytes=1000000 HTTP/1.0")
        came = bytearray()
        while data := await talk.stream.receive_some():
            came += data
            await trio.sleep(2)
        assert came.endswith(b"\r\n\r\n" + generated(1_000_000))


async def test_does_not_pretend_that_a_file_is_whole(root: Path) -> None:
    (root / "file").write_bytes(bytes(1_000_000))
    async with talking(root, pair=LOCKSTEP) as talk:
        await talk.send("GET /file HTTP/1.1")
        assert (await talk.stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        os.truncate(root / "file", 10)
        assert len(await talk.dropped()) < 1_000_000


async def test_survives_its_own_trouble(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bad(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, "this disk is broken")

    async with talking(root) as talk:
        with monkeypatch.context() as patch:
            patch.setattr(http_server.os, "open", lambda *_: os.dup(2**30))  # EBADF
            assert (await talk.get("/small.txt")).status == 503
        monkeypatch.setattr(http_server, "open_file", lambda *_: Bad(root / "small.txt"))
        await talk.send("GET /small.txt HTTP/1.1")
        assert (await talk.dropped()).endswith(b"\r\n\r\n")
    assert capsys.readouterr().err == "http_server: [Errno 5] this disk is broken\n"


# ---- the client, and servers of our own ----


async def fetch(handler: Callable[[trio_ucx.Connection], Awaitable[object]], *arguments: object) -> int:
    async with serving(handler) as listener:
        return await run_client("{}:{}".format(*listener.address), *arguments)


@pytest.mark.parametrize(
    ("answer", "status", "complaint"),
    [
        (b"", 1, "the server hung up"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", 1, "the server hung up"),
        (b"garbage\r\n\r\n", 1, "illegal status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", 1, "without sending complete message body"),
        (b"HTTP/1.1 404 \x1b[2J\r\nContent-Length: 0\r\n\r\n", 4, "404 ?[2J"),
        (b"HTTP/1.1 301 Moved\r\nLocation: /\r\n\r\n", 3, "301 Moved"),
        (b"HTTP/1.1 500 Oh\r\n\r\n", 5, "500 Oh"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", 1, "the server took 1 of 2 requests"),
    ],
)
async def test_client_complains_in_one_line(
    answer: bytes, status: int, complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        with suppress(trio.BrokenResourceError):  # the client goes when it has read
            await connection.receive_some()
            await connection.send_all(answer)

    assert await fetch(handler, "/", "--repeat", 2) == status
    assert_complaint(capfd.readouterr().err, HTTP_CLIENT, complaint)


async def test_client_takes_what_ends_with_the_connection(capfd: pytest.CaptureFixture[str]) -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        await connection.receive_some()
        await connection.send_all(b"HTTP/1.1 100 Go on\r\n\r\nHTTP/1.0 200 OK\r\n\r\n" + b"x" * 100_000)

    assert await fetch(handler, "/") == 0
    assert capfd.readouterr() == ("x" * 100_000, "")


async def test_client_uses_one_connection(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(partial(http_server.handle, root, None, DEADLINE)) as listener:
        assert await run_client("{}:{}".format(*listener.address), "/small.txt", "--repeat", 3) == 0
        assert listener.statistics().accepted == 1
    assert capfd.readouterr() == ("small\n" * 3, "")


async def test_client_gives_up_when_nothing_moves(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_client, "STALL_TIMEOUT", 0.3)
    assert await fetch(lambda connection: trio.sleep_forever(), "/") == 1
    assert_complaint(capfd.readouterr().err, HTTP_CLIENT, "nothing moved for 0.3 seconds")


async def test_client_waits_while_something_moves(autojump_clock: trio.testing.MockClock) -> None:
    ours, its = trio.testing.memory_stream_pair()
    got: list[bytes] = []

    async def write(data: bytes) -> None:
        got.append(data)

    with trio.fail_after(http_client.STALL_TIMEOUT) as watchdog:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(http_client.Server(ours, "test", watchdog).fetch, "/", None, write)
            await its.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
            for _ in range(5):
                await trio.sleep(http_client.STALL_TIMEOUT - 1)
                await its.send_all(b"x")
    assert got == [b"x"] * 5


async def test_client_checks_the_certificate(root: Path, certificates: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tls = http_server.load_certificate(certificates / "cert.pem", certificates / "key.pem")
    for server, client, host, complaint in [
        (tls, ["--tls", certificates / "other.pem"], "127.0.0.1", "certificate verify failed"),
        (tls, ["--tls", certificates / "ca.pem"], "localhost", "Hostname mismatch"),
        (tls, [], "127.0.0.1", ""),
        (None, ["--tls", certificates / "ca.pem"], "127.0.0.1", ""),
    ]:
        async with serving(partial(http_server.handle, root, server, DEADLINE)) as listener:
            assert await run_client(f"{host}:{listener.address[1]}", "/small.txt", *client) == 1
        output, errors = capfd.readouterr()
        assert output == ""
        assert_complaint(errors, HTTP_CLIENT, complaint)


async def test_client_s_files(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for options, complaint in [
        (["--data", tmp_path / "nothing"], "nothing"),
        (["--data", tmp_path], "Is a directory"),
        (["-o", tmp_path], "Is a directory"),
        (["-o", "/dev/full"], "No space left on device"),
    ]:
        assert await fetch(partial(http_server.handle, root, None, DEADLINE), "/small.txt", *options) == 1
        assert_complaint(capfd.readouterr().err, HTTP_CLIENT, complaint)
