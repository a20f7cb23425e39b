"""RDMA has no key gate: UCX uses it only if the program or the environment names it. The log says what is left out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from trio_ucx import ucp
from trio_ucx.ucp._quirks import rdma

LEFT_OUT = rdma.LEFT_OUT
NO_RDMACM = {"SOCKADDR_TLS_PRIORITY": "tcp"}
#: Where there are devices: some releases keep these transports although "ib" is excluded.
THERE, OLD = {**LEFT_OUT, "TLS": "^ib,srd,rc_gda"}, {**LEFT_OUT, "TLS": "^ib,ud:aux"}


@pytest.fixture(autouse=True)
def new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "WORKS", True)
    monkeypatch.setattr(rdma, "_ALL", ("ib", "srd", "rc_gda"))


@pytest.fixture
def too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "WORKS", False)
    monkeypatch.setattr(rdma, "_ALL", ("ib", "ud:aux"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine with one device that UCX could use, and one without a link."""
    for device, state in ("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"):
        port = tmp_path / "sys/class/infiniband" / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    monkeypatch.setattr(rdma, "has_module", lambda name: name == "ib")
    monkeypatch.setattr(rdma, "_warned", False)
    found = rdma.usable_devices
    monkeypatch.setattr(rdma, "usable_devices", lambda: found(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, LEFT_OUT),
        ({"TLS": ""}, LEFT_OUT),
        ({"TLS": "^posix"}, {**LEFT_OUT, "TLS": "^posix,ib"}),
        ({"TLS": "^posix,^cma"}, {**LEFT_OUT, "TLS": "^posix,cma,ib"}),
        ({"TLS": "^ud"}, {**LEFT_OUT, "TLS": "^ud,ib"}),
        ({"TLS": "^ib"}, NO_RDMACM),
        ({"TLS": "tcp,sm,self"}, NO_RDMACM),
        ({"TLS": "tcp", "SOCKADDR_TLS_PRIORITY": "rdmacm"}, {}),
        ({"TLS": "all"}, {}),
        ({"TLS": "tcp, rc_verbs"}, {}),
        ({"TLS": "ud"}, {}),
        ({"TLS": "tcp,ib"}, {}),
        ({"TLS": "srd,sm"}, {}),
        ({"TLS": "tcp,\\rc_verbs"}, {}),
        ({"NET_DEVICES": "all"}, LEFT_OUT),
        ({"NET_DEVICES": "eth0,lo"}, LEFT_OUT),
        ({"NET_DEVICES": "^mlx5_1:1,mlx5_2:1"}, LEFT_OUT),
        ({"NET_DEVICES": "eth0,mlx5_0:1"}, {}),
        ({"NET_DEVICES": "mlx5_0:1", "TLS": "^ud"}, {}),
        ({"NET_DEVICES": "mlx5_0:1", "TLS": "tcp"}, NO_RDMACM),
    ],
    ids=str,
)
def test_what_names_it(options: Mapping[str, str], changes: Mapping[str, str]) -> None:
    assert rdma.restrict(options) == changes


@pytest.mark.parametrize("options", [{}, {"TLS": "^posix"}, {"NET_DEVICES": "eth0"}], ids=str)
def test_nobody_loses_it_in_silence(
    options: Mapping[str, str], machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one line in a process. It names the devices, and what to set."""
    for _ in range(2):
        rdma.restrict(options)
    [record] = caplog.records
    assert (record.name, record.levelname) == ("trio_ucx", "WARNING")
    assert record.message.startswith("UCX does without RDMA (mlx5_0:1): with UCX_TLS=all, whoever reaches these")
    assert "UCX_TLS=rc_mlx5,tcp,sm,self" in record.message and "UCX_TLS=^ib" in record.message


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, OLD),
        ({"TLS": "^posix"}, {**LEFT_OUT, "TLS": "^posix,ib,ud:aux"}),
        ({"TLS": "all"}, OLD),
        ({"TLS": "tcp, rc_verbs,\\ud_verbs,\\self"}, {**LEFT_OUT, "TLS": "tcp,\\self"}),
        ({"TLS": "rc,sm,self"}, {**LEFT_OUT, "TLS": "sm,self"}),
        ({"TLS": "rc,sm", "NET_DEVICES": "^eth0,mlx5_1:1"}, {**LEFT_OUT, "TLS": "sm"}),
        ({"NET_DEVICES": "eth0,mlx5_0:1"}, {**OLD, "NET_DEVICES": "eth0"}),
        ({"NET_DEVICES": "eth0,mlx5_0:1", "TLS": "rc,tcp"}, {**LEFT_OUT, "TLS": "tcp", "NET_DEVICES": "eth0"}),
        ({"NET_DEVICES": "eth0,mlx5_0:1", "TLS": "^cma"}, {**LEFT_OUT, "TLS": "^cma,ib,ud:aux", "NET_DEVICES": "eth0"}),
    ],
    ids=str,
)
def test_an_old_ucx_does_without_it(
    options: Mapping[str, str],
    changes: Mapping[str, str],
    too_old: None,
    machine: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        assert rdma.restrict(options) == changes
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(
        "UCX does without RDMA (mlx5_0:1): trio_ucx needs UCX 1.19 or newer for it, and this"
    )


@pytest.mark.parametrize(
    ("options", "changes"),
    [({"TLS": "tcp"}, NO_RDMACM), ({"TLS": "tcp,self", "NET_DEVICES": "eth0"}, NO_RDMACM), ({"TLS": "^ib"}, OLD)],
    ids=str,
)
def test_an_old_ucx_without_rdma(
    options: Mapping[str, str],
    changes: Mapping[str, str],
    too_old: None,
    machine: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert rdma.restrict(options) == changes
    assert caplog.records == []
    (machine / "dev/infiniband/uverbs0").unlink()  # where there is none, UCX would warn of what does not exist
    assert rdma.restrict({}) == LEFT_OUT


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"TLS": "rc"}, "TLS=rc"),
        ({"TLS": "ud,rc_verbs"}, "TLS=ud,rc_verbs"),
        ({"NET_DEVICES": "mlx5_0:1", "TLS": "all"}, "NET_DEVICES=mlx5_0:1"),
    ],
    ids=str,
)
def test_an_old_ucx_has_nothing_else(config: Mapping[str, str], text: str, too_old: None) -> None:
    with pytest.raises(
        ValueError, match=f"^UCX's option {text} names only RDMA: trio_ucx needs UCX 1.19 or newer for it"
    ):
        with ucp.open_context(config):
            pass


@pytest.mark.parametrize(
    "options", [{"TLS": "^ib"}, {"TLS": "tcp"}, {"TLS": "all"}, {"NET_DEVICES": "mlx5_0:1"}], ids=str
)
def test_a_choice_is_not_warned_of(options: Mapping[str, str], machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    rdma.restrict(options)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("devices", "changes"),
    [("mlx5_1", {}), ("eth0, mlx5_0", {}), ("mlx5_2", THERE), ("", THERE), ("^mlx5_0", THERE)],
)
def test_devices_without_a_port(
    devices: str, changes: Mapping[str, str], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "DEVICES", machine / "sys/class/infiniband")
    assert rdma.restrict({"NET_DEVICES": devices}) == changes


def test_devices_that_cannot_be_used_are_no_loss(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rdma.usable_devices() == ["mlx5_0:1"]
    with monkeypatch.context() as closed:
        closed.setattr(os, "access", lambda *_: False)
        assert rdma.usable_devices() == []
    state = machine / "sys/class/infiniband/mlx5_0/ports/1/state"
    state.unlink()
    state.mkdir()  # it cannot be read
    assert rdma.usable_devices() == []
    state.rmdir()
    state.write_text("4: ACTIVE")
    monkeypatch.setattr(rdma, "has_module", lambda name: False)
    assert rdma.usable_devices() == []


@pytest.mark.parametrize(("value", "expected"), [(None, "^ib"), ("all", "all"), ("tcp,self", "tcp,self")])
async def test_what_ucx_gets(value: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with ucp.open_context(config={} if value is None else {"TLS": value}) as context:
        config = {line.partition("=")[0]: line.partition("=")[2] for line in context._config_text().splitlines()}
    assert config["UCX_TLS"] == expected
    assert config["UCX_SOCKADDR_TLS_PRIORITY"] == ("rdmacm,tcp,sockcm" if value == "all" else "tcp")
