"""The manifests in docs/operation/kubernetes.md can be read, and fit each other and the programs beside them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from documents import blocks

yaml = pytest.importorskip("yaml")

PAGE = blocks("docs/operation/kubernetes.md")
SERVER = next(block.text for block in PAGE if block.file == "server.py")
MANIFESTS: dict[str, Any] = {
    manifest["kind"]: manifest
    for block in PAGE
    if block.language == "yaml"
    for manifest in yaml.safe_load_all(block.text)
}


def test_manifests_fit_the_server() -> None:
    pod = MANIFESTS["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    drain, port = (re.search(pattern, SERVER) for pattern in (r"drain_on_signal=(\d+)", r"handler, (\d+)"))
    assert drain is not None and int(drain[1]) < pod["spec"]["terminationGracePeriodSeconds"]
    assert port is not None and container["ports"] == [{"name": "control", "containerPort": int(port[1])}]
    [service_port] = MANIFESTS["Service"]["spec"]["ports"]
    assert (service_port["port"], service_port["targetPort"]) == (int(port[1]), "control")
    labels = pod["metadata"]["labels"]
    for name, selector in {"Deployment": "selector", "NetworkPolicy": "podSelector"}.items():
        assert MANIFESTS[name]["spec"][selector]["matchLabels"].items() <= labels.items()
    assert MANIFESTS["Service"]["spec"]["selector"].items() <= labels.items()


def test_manifests_open_the_data_ports_in_both_directions() -> None:
    pod, policy = MANIFESTS["Deployment"]["spec"]["template"]["spec"], MANIFESTS["NetworkPolicy"]["spec"]
    variables = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    [rule] = policy["ingress"]
    assert rule["from"] == [{"podSelector": policy["podSelector"]}]
    opened = [f"{one['port']}-{one['endPort']}" for one in rule["ports"] if "endPort" in one]
    assert opened == [variables["UCX_TCP_PORT_RANGE"]]


def test_manifests_give_the_key_to_the_process_alone() -> None:
    pod = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
    [volume], [mount] = pod["volumes"], pod["containers"][0]["volumeMounts"]
    assert volume["name"] == mount["name"] and volume["secret"]["defaultMode"] & ~0o640 == 0
    variables = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert variables["TRIO_UCX_AUTHKEY_FILE"] == f"{mount['mountPath']}/key"
