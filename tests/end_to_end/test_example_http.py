"""examples/http_server.py and examples/http_client.py."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import select
import signal
import socket
import ssl
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from helpers import resident, until

import trio_ucx
from trio_ucx import ucp

from .programs import DEADLINE, EXAMPLES, Program, load, program, run_here, trio_thread

h11 = pytest.importorskip("h11")
trustme = pytest.importorskip("trustme")

HTTP_SERVER = EXAMPLES / "http_server.py"
HTTP_CLIENT = EXAMPLES / "http_client.py"

http_server: Any = load(HTTP_SERVER)
http_client: Any = load(HTTP_CLIENT)

#: (UCX_TLS; with TLS). The first of them is enough where only HTTP matters.
WAYS = [("tcp,sm,self", False), ("tcp", True)]


# ---- the programs, and a client of our own that knows no manners ----


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
    for name in ["empty", "unknown", "not text.txt.gz"]:
        (root / name).touch()
    (root / "sub" / "below" / "ünï çødé?.html").write_bytes(b"<p>")
    (root / os.fsdecode(b"not \xff utf-8")).write_bytes(b"\xff")
    (tmp_path / "secret").write_bytes(b"secret")
    return root


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
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await self.stream.receive_some())
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.unread = http.trailing_data[0]
                assert head is not None
                return Answer(head.status_code, dict(head.headers), bytes(body))
            else:
                assert isinstance(event, (h11.InformationalResponse, h11.Response)), event
                head = event

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


@attrs.define
class Service:
    """A running server, and how to reach it."""

    server: Program
    worker: ucp.Worker
    certificates: Path
    transports: str | None
    tls: bool

    @property
    def where(self) -> tuple[str, int]:
        host, _, port = self.server.address.rpartition(":")
        return host, int(port)

    def client(self, target: str, *options: object) -> AbstractContextManager[Program]:
        if self.tls:
            options = (*options, "--tls", self.certificates / "ca.pem")
        if self.transports is None:
            options = (*options, "--tcp")
        return program(HTTP_CLIENT, self.server.address, target, *options, transports=self.transports)

    async def fetch(self, target: str, output: Path, *options: object) -> bytes:
        """What the client gets."""
        with self.client(target, "-o", output, *options) as client:
            assert await client.end() == (0, "")
        return output.read_bytes()

    async def open(self) -> trio.abc.Stream:
        """A connection without TLS."""
        if self.transports is None:
            return await trio.open_tcp_stream(*self.where)
        return await trio_ucx.open_ucx_stream(*self.where, worker=self.worker)

    @asynccontextmanager
    async def talk(self) -> AsyncIterator[Talk]:
        with trio.fail_after(DEADLINE):
            stream = await self.open()
            if self.tls:
                context = ssl.create_default_context(cafile=self.certificates / "ca.pem")
                stream = trio.SSLStream(stream, context, server_hostname="127.0.0.1", https_compatible=True)
            async with stream:
                yield Talk(stream)


@asynccontextmanager
async def serving(
    root: Path, certificates: Path, way: tuple[str | None, bool], *options: object, status: int = 130
) -> AsyncIterator[Service]:
    """The server must survive what a test does, log nothing, and end at SIGINT."""
    transports, tls = way
    if tls:
        options = (*options, "--tls", certificates / "cert.pem", certificates / "key.pem")
    if transports is None:
        options = (*options, "--tcp")
    with program(HTTP_SERVER, root, *options, transports=transports) as server:
        await server.wait_address()
        async with ucp.open_worker(config={"TLS": transports or "tcp"}) as worker:
            service = Service(server, worker, certificates, transports, tls)
            yield service
            if server.process.poll() is None:
                async with service.talk() as talk:
                    assert (await talk.get("/small.txt")).body == b"small\n"
                server.process.terminate()
        assert await server.end() == (status, "")


@pytest.fixture(params=WAYS, ids=str)
async def any_service(request: pytest.FixtureRequest, root: Path, certificates: Path) -> AsyncIterator[Service]:
    async with serving(root, certificates, request.param) as service:
        yield service


@pytest.fixture
async def service(root: Path, certificates: Path) -> AsyncIterator[Service]:
    async with serving(root, certificates, WAYS[0]) as service:
        yield service


@pytest.fixture(params=[("tcp,sm,self", False), ("tcp", True)], ids=str)
async def impatient(request: pytest.FixtureRequest, root: Path, certificates: Path) -> AsyncIterator[Service]:
    """A server that waits for a second only."""
    async with serving(root, certificates, request.param, "--timeout", 1) as service:
        yield service


def generated(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


# ---- what one asks for, one gets ----


@pytest.mark.full
async def test_http_gets_files(any_service: Service, root: Path, tmp_path: Path) -> None:
    (root / "large").write_bytes(os.urandom(20_000_001))
    assert await any_service.fetch("/large", tmp_path / "out") == (root / "large").read_bytes()
    assert await any_service.fetch("/empty", tmp_path / "out") == b""
    with any_service.client("/small.txt") as client:
        assert await client.end() == (0, "")
        assert client.output == "small\n"


@pytest.mark.full
async def test_http_echoes_what_is_chunked(service: Service, tmp_path: Path) -> None:
    upload, pipe = os.urandom(1_000_001), tmp_path / "pipe"
    os.mkfifo(pipe)
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.to_thread.run_sync, pipe.write_bytes, upload, abandon_on_cancel=True))
            assert await service.fetch("/echo", tmp_path / "out", "--data", pipe) == upload


@pytest.mark.full
async def test_http_echoes(any_service: Service, tmp_path: Path) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(os.urandom(5_000_001))
    echo = await any_service.fetch("/echo", tmp_path / "out", "--data", upload, "--repeat", 2)
    assert echo == upload.read_bytes() * 2


@pytest.mark.full
async def test_http_client_uses_one_connection(root: Path) -> None:
    handler = partial(http_server.handle, root, None, DEADLINE)
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1"))
        host, port = listener.address
        with program(HTTP_CLIENT, f"{host}:{port}", "/small.txt", "--repeat", 3) as client:
            assert await client.end() == (0, "")
        assert client.output == "small\n" * 3
        assert listener.statistics().accepted == 1
        nursery.cancel_scope.cancel()


@pytest.mark.full
async def test_http_generates(service: Service, tmp_path: Path) -> None:
    assert await service.fetch("/big?bytes=10000000", tmp_path / "out") == generated(10_000_000)
    async with service.talk() as talk:
        for size in [0, 1, 2**18, 10_000_000]:
            assert (await talk.get(f"/big?bytes={size}")).body == generated(size)


@pytest.mark.sample(1)
async def test_http_keeps_alive(any_service: Service) -> None:
    async with any_service.talk() as talk:
        small = await talk.get("/small.txt")
        assert (small.status, small.body) == (200, b"small\n")
        assert small.headers[b"content-length"] == b"6"
        assert small.headers[b"content-type"] == b"text/plain"
        assert b"connection" not in small.headers
        big = await talk.get("/big?bytes=1000")
        assert (big.status, big.body, big.headers[b"transfer-encoding"]) == (200, generated(1000), b"chunked")
        assert (await talk.get("/nothing")).status == 404
        await talk.send("POST /echo HTTP/1.1", "Content-Length: 5", body=b"hello")
        assert (await talk.receive()).body == b"hello"
        assert (await talk.get("/sub/below/%C3%BCn%c3%af%20%C3%A7%C3%B8d%C3%A9%3F.html?query")).body == b"<p>"
        assert (await talk.get("/not%20%ff%20utf-8")).body == b"\xff"
        assert (await talk.get("http://test/small.txt")).body == b"small\n"
        for name in ["unknown", "not%20text.txt.gz"]:
            assert (await talk.get(f"/{name}")).headers[b"content-type"] == b"application/octet-stream"


@pytest.mark.full
async def test_http_head(service: Service, root: Path) -> None:
    (root / "large").write_bytes(bytes(20_000_000))
    async with service.talk() as talk:
        for target, status, header in [
            ("/large", 200, (b"content-length", b"20000000")),
            ("/big?bytes=1000", 200, (b"transfer-encoding", b"chunked")),
            ("/nothing", 404, (b"content-length", b"14")),
            ("/echo", 405, (b"allow", b"POST")),
        ]:
            answer = await talk.get(target, method="HEAD")
            assert (answer.status, answer.body) == (status, b"")
            assert header in answer.headers.items()
        assert (await talk.get("/small.txt")).body == b"small\n"  # nothing of a body was in the way


@pytest.mark.full
async def test_http_pipelines(any_service: Service) -> None:
    """Requests that do not wait for answers; these take more room than there is until they are read."""
    sizes = [0, 70_000, 3, 2_000_000, 1_000_000, 5] * 4
    async with any_service.talk() as talk:
        async with trio.open_nursery() as nursery:
            request = "GET /big?bytes={} HTTP/1.1\r\nHost: test\r\n\r\n"
            post = "POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\n\r\necho"
            requests = "".join(request.format(size) + post for size in sizes)
            nursery.start_soon(talk.stream.send_all, requests.encode())
            for size in sizes:
                assert (await talk.receive()).body == generated(size)
                assert (await talk.receive()).body == b"echo"


@pytest.mark.full
async def test_http_continues(service: Service) -> None:
    async with service.talk() as talk:
        await talk.send("POST /echo HTTP/1.1", "Content-Length: 5", "Expect: 100-continue")
        go_ahead, _, talk.unread = bytes(await talk.stream.receive_some()).partition(b"\r\n\r\n")
        assert go_ahead.startswith(b"HTTP/1.1 100 ")
        await talk.stream.send_all(b"hello")
        assert (await talk.receive()).body == b"hello"
        # It is refused before anything was uploaded.
        await talk.send("POST /small.txt HTTP/1.1", "Content-Length: 5", "Expect: 100-continue")
        assert (await talk.receive()).status == 405


@pytest.mark.full
async def test_http_1_0(service: Service) -> None:
    async with service.talk() as talk:
        await talk.send("GET /big?bytes=100000 HTTP/1.0")
        head, _, body = (await talk.dropped()).partition(b"\r\n\r\n")
        assert body == generated(100_000)
        assert b"chunked" not in head


@pytest.mark.full
async def test_http_connection_close(service: Service) -> None:
    async with service.talk() as talk:
        answer = await talk.get("/small.txt", "Connection: close")
        assert (answer.body, answer.headers[b"connection"]) == (b"small\n", b"close")
        started = trio.current_time()
        assert await talk.dropped() == b""
        assert trio.current_time() - started < http_server.LINGER


@pytest.mark.full
async def test_http_answers_a_client_that_has_ended_its_half(service: Service) -> None:
    async with service.talk() as talk:
        await talk.send("GET /small.txt HTTP/1.1")
        assert isinstance(talk.stream, trio_ucx.Connection)
        await talk.stream.send_eof()
        assert (await talk.receive()).body == b"small\n"
        assert await talk.dropped() == b""


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_http_many_clients(root: Path, certificates: Path, way: tuple[str, bool]) -> None:
    async with serving(root, certificates, way) as service:

        async def ask(number: int) -> None:
            async with service.talk() as talk:
                for size in range(number * 50_000, (number + 3) * 50_000, 50_000):
                    assert (await talk.get(f"/big?bytes={size}")).body == generated(size)
                    body = b"%d" % number * 20_000
                    await talk.send("POST /echo HTTP/1.1", f"Content-Length: {len(body)}", body=body)
                    assert (await talk.receive()).body == body

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(ask, number)


# ---- what one must not ask for ----


def hide(root: Path) -> None:
    """Things in the tree that are no files of it."""
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


@pytest.mark.full
async def test_http_serves_nothing_but_files_of_the_directory(service: Service, root: Path) -> None:
    hide(root)
    up = "/%2e%2e" * 20
    text = """
        / /. /.. /../secret /sub/../../secret /%2e%2e/secret /sub/.%2E/%2e./secret /..%2fsecret /%2e%2e%2fsecret
        /sub/../small.txt //../secret /../root/small.txt http://test/../secret http://test
        /out /up/secret /up /absolute /twice/secret /sibling /zero /loop /nowhere /pipe /socket
        /sub /sub/ /sub/below /small.txt/ /small.txt/x /small.txt%00 /%00 /etc/passwd //etc/passwd /..\\secret
        /proc/self/environ /.. /%252e%252e/secret
    """
    targets = [
        *text.split(),
        f"{up}{root.parent}/secret",
        f"{up}/etc/passwd",
        str(root.parent / "secret"),
        "/" + "n" * 300,
    ]
    async with service.talk() as talk:
        for target in targets:
            answer = await talk.get(target)
            assert (target, answer.status, answer.body) == (target, 404, b"404 Not Found\n")


@pytest.mark.full
async def test_http_follows_links_that_end_inside_the_directory(service: Service, root: Path) -> None:
    (root / "sub" / "link").symlink_to("../small.txt")
    (root / "directory").symlink_to("sub/below")
    (root / "out and in").symlink_to("../root/small.txt")
    (root / "sub" / "below" / "file").write_bytes(b"here")
    async with service.talk() as talk:
        assert (await talk.get("/sub/link")).body == b"small\n"
        assert (await talk.get("/directory/file")).body == b"here"
        assert (await talk.get("/out%20and%20in")).body == b"small\n"


@pytest.mark.full
async def test_http_serves_a_directory_that_is_a_link(root: Path, certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("root")
    hide(root)
    async with serving(tmp_path / "link", certificates, WAYS[0]) as service, service.talk() as talk:
        assert (await talk.get("/small.txt")).body == b"small\n"
        assert (await talk.get("/out")).status == 404


@pytest.mark.full
async def test_http_refuses_to_generate(service: Service) -> None:
    queries = ["", "?", "?bytes", "?bytes=", "?bytes=x", "?bytes=-1", "?bytes=1&bytes=2", "?bytes=" + "9" * 5000]
    async with service.talk() as talk:
        for query in queries:
            assert (query, (await talk.get(f"/big{query}")).status) == (query, 400)


@pytest.mark.full
async def test_http_refuses_methods(service: Service) -> None:
    requests = [(method, "/small.txt", b"GET, HEAD") for method in ["POST", "PUT", "DELETE", "TRACE", "get", "G"]]
    requests += [("GET", "/echo", b"POST"), ("HEAD", "/echo", b"POST"), ("POST", "/big", b"GET, HEAD")]
    requests += [("OPTIONS", "*", b"GET, HEAD"), ("CONNECT", "test:80", b"GET, HEAD")]
    async with service.talk() as talk:
        for method, target, allowed in requests:
            answer = await talk.get(target, method=method)
            assert (method, answer.status, answer.headers[b"allow"]) == (method, 405, allowed)
        assert (await talk.get("/small.txt")).status == 200


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_http_refuses_an_upload_half_way(
    root: Path, certificates: Path, tmp_path: Path, way: tuple[str | None, bool]
) -> None:
    """The client learns why, though the server does not read what it uploads."""
    upload = tmp_path / "upload"
    with open(upload, "wb") as file:
        file.truncate(2**33)
    async with serving(root, certificates, way) as service:
        with service.client("/small.txt", "--data", upload) as client:
            assert await client.end() == (4, "http_client: 405 Method Not Allowed\n")
        async with service.talk() as talk:
            await talk.send("POST /nothing HTTP/1.1", "Content-Length: 100000", body=bytes(20_000))
            for _ in range(2):
                await trio.sleep(0.2)  # TCP would tell us by now that the server does not want it
                await talk.stream.send_all(bytes(20_000))
            assert (await talk.receive()).status == 405


@pytest.mark.full
@pytest.mark.parametrize("way", [("tcp,sm,self", False), ("tcp", True)], ids=str)
async def test_http_refuses_garbage(root: Path, certificates: Path, way: tuple[str, bool]) -> None:
    async with serving(root, certificates, way) as service:
        for garbage, status in [
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
            (b"\r\n\r\n\r\n", 400),
            (b"GET\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
            (b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
            (b"GET / HTTP/1.1\r\nHost: a\r\nCookie: " + b"x" * 100_000, 431),
            (b"GET /" + b"x" * 100_000, 431),
        ]:
            async with service.talk() as talk:
                await talk.stream.send_all(garbage)
                assert (garbage, (await talk.receive()).status) == (garbage, status)


@pytest.mark.full
async def test_http_hangs_up_after_garbage(any_service: Service) -> None:
    async with any_service.talk() as talk:
        await talk.send("GET /small.txt HTTP/1.1", body=b"garbage\r\n\r\n")
        assert (await talk.receive()).body == b"small\n"
        answer = await talk.receive()
        assert (answer.status, answer.body) == (400, b"400 Bad Request\n")
        assert answer.headers[b"connection"] == b"close"
        await talk.send("GET /small.txt HTTP/1.1")
        assert await talk.dropped() == b""


@pytest.mark.full
async def test_http_breaks_off_when_an_upload_is_garbage(service: Service) -> None:
    async with service.talk() as talk:
        await talk.send("POST /echo HTTP/1.1", "Transfer-Encoding: chunked", body=b"2\r\nok\r\nnonsense\r\n")
        came = await talk.dropped()
        assert came.startswith(b"HTTP/1.1 200 ") or came == b""
        assert b"0\r\n\r\n" not in came
    async with service.talk() as talk:  # this one was answered before
        await talk.send("POST /small.txt HTTP/1.1", "Transfer-Encoding: chunked", body=b"nonsense\r\n")
        came = await talk.dropped()
        assert came.startswith(b"HTTP/1.1 405 ") or came == b""


# ---- clients that are slow, or die ----


async def is_dropped_idle(service: Service) -> None:
    async with service.talk() as talk:
        assert (await talk.get("/small.txt")).status == 200
        answer = await talk.receive()
        assert (answer.status, answer.headers[b"connection"]) == (408, b"close")
        assert await talk.dropped() == b""


async def is_dropped_saying_nothing(service: Service) -> None:
    """Not even hello, where TLS expects one."""
    with trio.fail_after(DEADLINE):
        async with await service.open() as stream:
            came = await Talk(stream).dropped()
            assert came == b"" if service.tls else came.startswith(b"HTTP/1.1 408 ")


async def is_dropped_dawdling(service: Service) -> None:
    async def dawdle(stream: trio.abc.Stream) -> None:
        await stream.send_all(b"GET /small.txt HTTP/1.1\r\nHost: ")
        while True:
            await stream.send_all(b"x")
            await trio.sleep(0.1)

    async with service.talk() as talk, trio.open_nursery() as nursery:
        nursery.start_soon(dawdle, talk.stream)
        assert (await talk.receive()).status == 408
        nursery.cancel_scope.cancel()


async def is_dropped_half_way(service: Service) -> None:
    async with service.talk() as talk:
        await talk.send("POST /echo HTTP/1.1", "Content-Length: 10", body=b"half")
        came = await talk.dropped()
        assert b"4\r\nhalf\r\n" in came or came == b""
        assert b"0\r\n\r\n" not in came


@pytest.mark.full
async def test_http_drops_slow_clients(impatient: Service) -> None:
    """All at once: each has a connection of its own."""
    async with trio.open_nursery() as nursery:
        for slow in is_dropped_idle, is_dropped_saying_nothing, is_dropped_dawdling, is_dropped_half_way:
            nursery.start_soon(slow, impatient)


@pytest.mark.full
async def test_http_drops_a_client_that_does_not_read(impatient: Service) -> None:
    async with impatient.talk() as talk:
        assert (await talk.get("/big?bytes=10000000")).status == 200
        before = resident(impatient.server.process.pid)
        await talk.send("GET /big?bytes=1000000000000 HTTP/1.1")
        await trio.sleep(0.8)
        assert resident(impatient.server.process.pid) < before + 50 * 2**20
        await trio.sleep(1)
        came = await talk.dropped()
        assert len(came) < 50 * 2**20


@pytest.mark.full
async def test_http_waits_for_a_slow_reader(root: Path, certificates: Path) -> None:
    """It moves, and takes longer than the timeout altogether."""
    async with serving(root, certificates, ("tcp,sm,self", False), "--timeout", 1.5) as service:
        async with service.talk() as talk:
            await talk.send("GET /big?bytes=50000000 HTTP/1.1", "Connection: close")
            started, came = trio.current_time(), 0
            while trio.current_time() < started + 2.5:
                came += len(await talk.stream.receive_some(100_000))
                await trio.sleep(0.05)
            assert came < 20_000_000, "there was nothing to wait for"
            assert came + len(await talk.dropped()) > 50_000_000


async def wait_moving(path: Path) -> None:
    """Until a program has written some of a file."""
    await until(lambda: path.exists() and path.stat().st_size, within=DEADLINE)


async def wait_stuck(pipe: int, process: int) -> None:
    """Until a program has filled a pipe, and does nothing more."""
    with trio.fail_after(DEADLINE):
        await until(lambda: select.select([pipe], [], [], 0)[0] and os.read(pipe, 1))
        before = None
        while before != (before := Path(f"/proc/{process}/stat").read_text().split()[13:15]):
            await trio.sleep(0.3)


def open_files(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


@pytest.mark.full
@pytest.mark.parametrize("way", [("tcp", False), ("tcp", True), (None, False)], ids=str)
async def test_http_survives_killed_clients(
    root: Path, certificates: Path, tmp_path: Path, way: tuple[str | None, bool]
) -> None:
    upload, one, two = tmp_path / "upload", tmp_path / "one", tmp_path / "two"
    with open(upload, "wb") as file:
        file.truncate(2**33)
    async with serving(root, certificates, way) as service, service.talk() as talk:
        assert (await talk.get("/small.txt")).status == 200
        before = open_files(service.server.process.pid)
        for _ in range(2):
            with (
                service.client("/big?bytes=20000000000", "-o", one) as reader,
                service.client("/echo", "-o", two, "--data", upload) as writer,
            ):
                for output, client in (one, reader), (two, writer):
                    await wait_moving(output)
                    client.process.kill()
                    await client.end()
                    output.unlink()
            assert (await talk.get("/small.txt")).body == b"small\n"
        await until(lambda: open_files(service.server.process.pid) <= before)


@pytest.mark.full
@pytest.mark.parametrize("tls", [False, True])
async def test_http_survives_killed_clients_over_shared_memory(
    root: Path, certificates: Path, tmp_path: Path, tls: bool
) -> None:
    """Half-way, but not while it writes to the server's memory: see docs/guide.md, "What UCX cannot do"."""
    upload, output = tmp_path / "upload", tmp_path / "pipe"
    with open(upload, "wb") as file:
        file.truncate(2**33)
    os.mkfifo(output)
    async with serving(root, certificates, ("tcp,sm,self", tls)) as service, service.talk() as talk:
        for arguments in ["/big?bytes=20000000000"], ["/echo", "--data", upload]:
            pipe = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
            try:
                with service.client(str(arguments[0]), "-o", output, *arguments[1:]) as client:
                    await wait_stuck(pipe, client.process.pid)
                    client.process.kill()
                    await client.end()
            finally:
                os.close(pipe)
            assert (await talk.get("/small.txt")).body == b"small\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "way"), [*((signal.SIGKILL, way) for way in WAYS), *((signal.SIGTERM, way) for way in WAYS)], ids=str
)
async def test_http_server_ends_in_the_middle(
    root: Path, certificates: Path, tmp_path: Path, number: signal.Signals, way: tuple[str | None, bool]
) -> None:
    status = -number if number == signal.SIGKILL else 130
    output = tmp_path / "out"
    async with serving(root, certificates, way, status=status) as service:
        with service.client("/big?bytes=20000000000", "-o", output) as client:
            await wait_moving(output)
            service.server.process.send_signal(number)
            status, errors = await client.end()
            assert status == 1
            assert errors.startswith("http_client: ") and errors.count("\n") == 1, errors
        assert (await service.server.end())[1] == ""
    output.unlink()


@pytest.mark.full
async def test_http_does_not_pretend_that_a_file_is_whole(service: Service, root: Path) -> None:
    (root / "file").write_bytes(bytes(30_000_000))
    async with service.talk() as talk:
        await talk.send("GET /file HTTP/1.1")
        assert (await talk.stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        os.truncate(root / "file", 10)
        assert len(await talk.dropped()) < 30_000_000


async def test_http_survives_its_own_trouble(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any stream will do. Without UCX, the system's failures can be imitated."""

    class Bad(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, "this disk is broken")

    ours, its = trio.testing.memory_stream_pair()
    talk = Talk(ours)
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(http_server.handle, root, None, DEADLINE, its)
            with monkeypatch.context() as patch:
                patch.setattr(http_server.os, "open", lambda *_: os.dup(2**30))  # EBADF
                assert (await talk.get("/small.txt")).status == 503
            monkeypatch.setattr(http_server, "open_file", lambda *_: Bad(root / "small.txt"))
            await talk.send("GET /small.txt HTTP/1.1")
            assert (await talk.dropped()).endswith(b"\r\n\r\n")
    assert capsys.readouterr().err == "http_server: [Errno 5] this disk is broken\n"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C, and so do its children: these tests may run there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.full
async def test_http_client_is_interrupted(interruptible: None, service: Service, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with service.client("/big?bytes=20000000000", "-o", output) as client:
        await wait_moving(output)
        client.process.send_signal(signal.SIGINT)
        assert await client.end() == (130, "")
    output.unlink()


# ---- the client and servers that are not ours ----


@pytest.mark.parametrize(
    ("answer", "status", "complaint"),
    [
        (b"", 1, "the server hung up"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", 1, "the server hung up"),
        (b"garbage\r\n\r\n", 1, "illegal status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", 1, "without sending complete message body"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
            1,
            "without sending complete message body",
        ),
        (b"HTTP/1.1 404 \x1b[2J\r\nContent-Length: 0\r\n\r\n", 4, "404 ?[2J"),
        (b"HTTP/1.1 418 Tea\tPot\r\nContent-Length: 0\r\n\r\n", 4, "418 Tea?Pot"),
        (b"HTTP/1.1 301 Moved\r\nLocation: /\r\n\r\n", 3, "301 Moved"),
        (b"HTTP/1.1 500 Oh\r\n\r\n", 5, "500 Oh"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", 1, "the server took 1 of 2 requests"),
    ],
)
def test_http_client_complains_in_one_line(
    answer: bytes, status: int, complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def serve(said: queue.SimpleQueue[Any]) -> None:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
        async with listener:
            said.put("{}:{}".format(*listener.address))
            with trio.fail_after(DEADLINE), contextlib.suppress(trio.BrokenResourceError):  # it goes when it has read
                async with await listener.accept() as connection:
                    await connection.receive_some()
                    await connection.send_all(answer)

    with trio_thread(serve) as said:
        code = run_here(http_client, said.get(timeout=DEADLINE), "/", "--repeat", 2)
    errors = capfd.readouterr().err
    assert errors.startswith("http_client: ") and errors.count("\n") == 1, errors
    assert code == status
    assert complaint in errors


@pytest.mark.full
async def test_http_client_takes_what_ends_with_the_connection() -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        await connection.receive_some()
        await connection.send_all(b"HTTP/1.1 100 Go on\r\n\r\nHTTP/1.0 200 OK\r\n\r\n" + b"x" * 100_000)

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1"))
        host, port = listener.address
        with program(HTTP_CLIENT, f"{host}:{port}", "/") as client:
            assert await client.end() == (0, "")
        assert client.output == "x" * 100_000
        nursery.cancel_scope.cancel()


async def get_from(handler: Callable[[trio_ucx.Connection], Awaitable[object]], output: Path) -> bytes:
    """What the client, in this process, gets from a server of our own."""
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1"))
        options = Namespace(address=listener.address, target="/", data=None, output=output, tls=None, tcp=False)
        options.repeat = 1
        with trio.fail_after(DEADLINE):
            await http_client.run(options)
        nursery.cancel_scope.cancel()
    return output.read_bytes()


async def test_http_client_gives_up_when_nothing_moves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(http_client, "STALL_TIMEOUT", 0.3)
    with pytest.raises(ExceptionGroup) as caught:
        await get_from(lambda connection: trio.sleep_forever(), tmp_path / "out")
    [error] = caught.value.exceptions
    assert http_client.explain(error) == "nothing moved for 0.3 seconds"


@pytest.mark.full
async def test_http_client_waits_while_something_moves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        await connection.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        for _ in range(5):
            await trio.sleep(0.5)
            await connection.send_all(b"x")

    monkeypatch.setattr(http_client, "STALL_TIMEOUT", 2)
    assert await get_from(handler, tmp_path / "out") == b"xxxxx"


@pytest.mark.full
@pytest.mark.parametrize("transports", ["tcp,sm,self", None], ids=str)
async def test_http_client_checks_the_certificate(root: Path, certificates: Path, transports: str | None) -> None:
    options = ["--tcp"] if transports is None else []
    async with serving(root, certificates, (transports, True)) as service:
        host, port = service.where
        for authority, address, complaint in [
            ("other.pem", f"{host}:{port}", "certificate verify failed"),
            ("ca.pem", f"localhost:{port}", "Hostname mismatch"),
        ]:
            arguments = [address, "/small.txt", "--tls", certificates / authority, *options]
            with program(HTTP_CLIENT, *arguments, transports=transports) as client:
                status, errors = await client.end()
            assert status == 1
            assert errors.startswith("http_client: ") and errors.count("\n") == 1, errors
            assert complaint in errors


@pytest.mark.full
async def test_http_tls_on_one_side_only(root: Path, certificates: Path) -> None:
    for server, client in [(False, True), (True, False)]:
        async with serving(root, certificates, ("tcp,sm,self", server)) as service:
            with attrs.evolve(service, tls=client).client("/small.txt") as running:
                status, errors = await running.end()
            assert (status, running.output) == (1, "")
            assert errors.startswith("http_client: ") and errors.count("\n") == 1, errors


# ---- the command lines ----


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["127.0.0.1:9", "/"], 1, "127.0.0.1:9"),
        (["127.0.0.1:9", "/", "--tcp"], 1, "127.0.0.1"),
        (["no.such.host.invalid:9", "/"], 1, "[Errno "),
        (["127.0.0.1:9", "/", "--tls", "/does/not/exist"], 1, "/does/not/exist: No such file or directory"),
        (["127.0.0.1:9", "/", "--tls", HTTP_CLIENT], 1, "no certificate or crl found"),
        (["nonsense", "/"], 2, "HOST:PORT"),
        (["127.0.0.1:65536", "/"], 2, "HOST:PORT"),
    ],
)
def test_http_client_s_command_line(
    arguments: list[object], status: int, complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(http_client, *arguments) == status
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    assert complaint in errors
    if status != 2:
        assert errors.startswith("http_client: ") and errors.count("\n") == 1, errors


@pytest.mark.full
async def test_http_client_s_files(service: Service, tmp_path: Path) -> None:
    for options, complaint in [
        (["--data", tmp_path / "nothing"], "nothing"),
        (["--data", tmp_path], "Is a directory"),
        (["-o", tmp_path], "Is a directory"),
        (["-o", "/dev/full"], "No space left on device"),
    ]:
        with service.client("/small.txt", *options) as client:
            status, errors = await client.end()
        assert status == 1
        assert errors.startswith("http_client: ") and errors.count("\n") == 1, errors
        assert complaint in errors


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["/does/not/exist"], 2, "/does/not/exist: no such directory"),
        ([HTTP_SERVER], 2, "no such directory"),
        ([EXAMPLES, "--listen", "nonsense"], 2, "HOST:PORT"),
        ([EXAMPLES, "--listen", "192.0.2.1:0"], 1, "192.0.2.1"),
        ([EXAMPLES, "--tls", "/does/not", "/exist"], 1, "/does/not, /exist: No such file or directory"),
        ([EXAMPLES, "--tls", HTTP_SERVER, HTTP_SERVER], 1, "PEM"),
    ],
)
def test_http_server_s_command_line(
    arguments: list[object], status: int, complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(http_server, *arguments) == status
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    assert complaint in errors
    if status != 2:
        assert errors.startswith("http_server: ") and errors.count("\n") == 1, errors


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_http_server_is_told_to_end_while_nobody_calls(number: signal.Signals, root: Path) -> None:
    with program(HTTP_SERVER, root) as server:
        await server.wait_address()
        server.process.send_signal(number)
        assert await server.end() == (130, "")
