"""The manifests as kubectl builds them: valid, complete in themselves, and with settings that the programs really take.

Secrets are made by the commands of deploy/README.md, so that page, script and manifests cannot part. What needs a
cluster to show is not shown here.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from cryptography import x509
from kvlease.cli.commands import _parser
from kvlease.connector.settings import ConnectorSettings
from kvlease.registry.identity import Identity
from kvlease.registry.settings import RegistrySettings
from kvlease.registry.settings import load as load_registry
from kvlease.router.settings import RouterSettings
from kvlease.router.settings import load as load_router
from pydantic_settings import BaseSettings

from tests.deploy.manifests import FOREIGN, OVERLAYS, Container, Document, build, containers, of_kind, overlay
from tests.deploy.page import commands
from tests.deploy.tools import ROOT, program, said

EXAMPLES = "examples"
VERSIONS = ("1.31", "1.37")
"""The oldest and the newest Kubernetes that the manifests are checked against."""
NAMESPACE = "kvlease"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each secret that the page's commands make, by name."""
    folder = tmp_path_factory.mktemp("secrets")
    made = folder / "made.json"
    kubectl = program("kubectl", "make venv")
    # Without a cluster: what would be sent to one goes to a file.
    stand_in = f'kubectl() {{ "{kubectl}" "$@" --dry-run=client --output=json >>"{made}"; }}\n'
    script = stand_in + f'cd "{folder}"\n' + commands("create secret").replace("deploy/", f"{ROOT}/deploy/")
    said(["bash", "-euc", script])
    found: dict[str, Path] = {}
    for document in _json_documents(made.read_text()):
        assert document["metadata"]["namespace"] == NAMESPACE
        found[document["metadata"]["name"]] = _lay_out(document, folder)
    return found


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith("KVLEASE_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", [*map(overlay, OVERLAYS), EXAMPLES])
def test_a_cluster_would_take_it(folder: str, version: str) -> None:
    documents = [x for x in build(folder) if not x["apiVersion"].startswith(FOREIGN)]
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("folder", [*map(overlay, OVERLAYS), EXAMPLES])
def test_workloads_are_what_services_budgets_and_policies_look_for(folder: str) -> None:
    documents = build(folder)
    labels = [
        x["spec"]["template"]["metadata"]["labels"] for x in documents if x["kind"] in ("Deployment", "StatefulSet")
    ]
    ports = {p.get("name") for c in containers(documents) for p in c.spec["ports"]}
    for document in documents:
        spec = document.get("spec", {})
        selector = {
            "Service": spec.get("selector"),
            "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels"),
            "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
            "PodMonitor": spec.get("selector", {}).get("matchLabels"),
        }.get(document["kind"])
        if selector is not None:
            assert any(selector.items() <= x.items() for x in labels), document["metadata"]["name"]
        if document["kind"] == "Service":
            assert {x["targetPort"] for x in spec["ports"]} <= ports
        if document["kind"] == "NetworkPolicy":
            assert {x["port"] for rule in spec["ingress"] for x in rule["ports"]} <= ports


@pytest.mark.parametrize("name", OVERLAYS)
def test_settings_are_taken_by_the_programs(
    name: str, secrets: dict[str, Path], clean_environment: pytest.MonkeyPatch
) -> None:
    load: dict[str, Callable[[list[str]], BaseSettings]] = {"registry": load_registry, "router": load_router}
    loaded: dict[str, BaseSettings] = {}
    for container in containers(build(overlay(name))):
        if container.spec["name"] == "etcd":
            continue
        for key, value in container.environment.items():
            clean_environment.setenv(key, value)
        command, *flags = _with_files(container, secrets)
        loaded[command] = load[command](flags)
        for key in container.environment:
            clean_environment.delenv(key)
    registry, router = loaded["registry"], loaded["router"]
    assert isinstance(registry, RegistrySettings)
    assert isinstance(router, RouterSettings)
    assert registry.store == ("memory" if name == "memory" else f"etcd://{','.join(_members(2379))}")
    assert router.registry == "kvlease-registry:7411"
    assert router.tls_cert


@pytest.mark.parametrize("name", OVERLAYS)
def test_probes_are_commands_that_there_are(name: str, secrets: dict[str, Path]) -> None:
    (registry,) = [x for x in containers(build(overlay(name))) if x.spec["name"] == "registry"]
    probes = registry.probes()
    assert set(probes) == {"readinessProbe", "startupProbe", "livenessProbe"}
    for kind, probe in probes.items():
        command, *words = _with_files(registry, secrets, probe["exec"]["command"])
        assert command == "kvlease"
        options = _parser().parse_args(words)
        assert options.command == "health"
        assert options.live == (kind != "readinessProbe")
        assert options.timeout_ms < probe["timeoutSeconds"] * 1_000
        assert all(Path(x).is_file() for x in (options.tls_ca, options.tls_cert, options.tls_key))


@pytest.mark.parametrize("name", OVERLAYS)
def test_containers_may_do_nothing_that_they_need_not(name: str) -> None:
    for container in containers(build(overlay(name))):
        assert container.pod["securityContext"]["runAsNonRoot"]
        assert container.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not container.pod["automountServiceAccountToken"]
        assert container.spec["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "limits" in container.spec["resources"]
        assert not container.spec["image"].endswith(":latest")
        assert ":" in container.spec["image"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_there_is_time_to_stop(name: str) -> None:
    for container in containers(build(overlay(name))):
        if container.spec["name"] == "etcd":
            continue
        wait_s = int(container.spec["lifecycle"]["preStop"]["exec"]["command"][1])
        stop_s = {"registry": 5, "router": 30}[container.spec["name"]]
        assert container.pod["terminationGracePeriodSeconds"] >= wait_s + stop_s + 5


def test_replicas_go_one_at_a_time() -> None:
    documents = build(overlay("etcd"))
    (registry,) = of_kind(documents, "Deployment", "kvlease-registry")
    assert registry["spec"]["replicas"] == 2
    assert registry["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    (etcd,) = of_kind(documents, "StatefulSet", "kvlease-etcd")
    assert etcd["spec"]["replicas"] == 3
    budgets = {x["metadata"]["name"] for x in of_kind(documents, "PodDisruptionBudget")}
    assert budgets == {"kvlease-registry", "kvlease-router", "kvlease-etcd"}
    (alone,) = of_kind(build(overlay("memory")), "Deployment", "kvlease-registry")
    assert (alone["spec"]["replicas"], alone["spec"]["strategy"]) == (1, {"type": "Recreate"})


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_secret_is_made_by_the_page(name: str, secrets: dict[str, Path]) -> None:
    mounted = {secret for x in containers(build(overlay(name))) for secret in x.mounts.values()}
    assert mounted <= set(secrets)


def test_cert_manager_makes_the_same_certificates_as_the_page(secrets: dict[str, Path]) -> None:
    documents = build(overlay("etcd-cert-manager"))
    issuers = {x["metadata"]["name"]: x["spec"] for x in of_kind(documents, "Issuer")}
    certificates = {x["spec"]["secretName"]: x["spec"] for x in of_kind(documents, "Certificate")}
    assert set(secrets) <= set(certificates)
    examples = {secret for x in containers(build(EXAMPLES)) for secret in x.mounts.values()}
    assert examples <= set(certificates)
    for spec in certificates.values():
        assert spec["issuerRef"]["name"] in issuers
    for issuer in issuers.values():
        assert "selfSigned" in issuer or certificates[issuer["ca"]["secretName"]]["isCA"]
    for secret, folder in secrets.items():
        spec, made = certificates[secret], _names(folder)
        assert spec["issuerRef"]["name"] == ("kvlease-etcd" if "etcd" in secret else "kvlease"), secret
        assert set(spec.get("dnsNames", [])) == made[x509.DNSName], secret
        assert set(spec.get("uris", [])) == made[x509.UniformResourceIdentifier], secret
        if secret == "kvlease-etcd-peer":  # the one whose common name says who is let in
            (etcd,) = [x for x in containers(documents) if x.spec["name"] == "etcd"]
            assert f"--peer-cert-allowed-cn={spec['commonName']}" in etcd.spec["args"]


def test_whoever_is_called_has_a_certificate_for_that_name(secrets: dict[str, Path]) -> None:
    served = {
        2379: _names(secrets["kvlease-etcd-server"])[x509.DNSName],
        2380: _names(secrets["kvlease-etcd-peer"])[x509.DNSName],
        7411: _names(secrets["kvlease-registry-tls"])[x509.DNSName],
    }
    called = 0
    for container in [*containers(build(overlay("etcd"))), *containers(build(EXAMPLES))]:
        for text in [*container.words, *container.environment.values()]:
            for host, port in re.findall(r"([a-z][a-z0-9.-]+):(2379|2380|7411)\b", text):
                called += 1
                assert host in served[int(port)], text
    assert called > 10


def test_etcd_keeps_ten_minutes_and_lets_in_certificates_only() -> None:
    (etcd,) = [x for x in containers(build(overlay("etcd"))) if x.spec["name"] == "etcd"]
    flags = set(etcd.spec["args"])
    assert {"--client-cert-auth", "--peer-client-cert-auth", "--auto-compaction-retention=10m"} <= flags
    (initial,) = [x for x in flags if x.startswith("--initial-cluster=")]
    assert re.findall(r"https://([^,]+)", initial) == _members(2380)


def test_the_engines_of_the_example_start_with_these_settings(
    clean_environment: pytest.MonkeyPatch, secrets: dict[str, Path]
) -> None:
    from vllm.config import KVTransferConfig  # takes seconds

    documents = build(overlay("etcd-cert-manager"))
    granted = {x["spec"]["secretName"]: x["spec"].get("uris", []) for x in of_kind(documents, "Certificate")}
    kinds = set()
    for container in containers(build(EXAMPLES)):
        for key, value in container.environment.items():
            clean_environment.setenv(
                key, value.replace("/certificates", str(secrets[container.mounts["/certificates"]]))
            )
        (text,) = [x.partition("=")[2] for x in container.words if x.startswith("--kv-transfer-config=")]
        transfer = KVTransferConfig(**json.loads(text))
        settings = ConnectorSettings.load(transfer.kv_connector_extra_config.get("kvlease", {}))
        assert transfer.kv_connector_module_path == "kvlease.connector"
        assert transfer.kv_load_failure_policy == "recompute"
        assert settings.registry == "kvlease-registry:7411"
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in container.environment
        identity = Identity.parse(granted[container.mounts["/certificates"]])
        kinds.add(transfer.kv_role)
        if transfer.kv_role == "kv_consumer":
            assert settings.api_url == f"http://{transfer.engine_id}.decode:8200"
            assert f"kvlease://lender/{transfer.engine_id}?tenant=*" in granted[container.mounts["/certificates"]]
        assert identity.name
        for key in container.environment:
            clean_environment.delenv(key)
    assert kinds == {"kv_consumer", "kv_producer"}
    # The router's engines are those of the example.
    (router,) = [x for x in containers(build(overlay("etcd"))) if x.spec["name"] == "router"]
    ports = {x["metadata"]["name"]: x["spec"]["ports"][0]["port"] for x in of_kind(build(EXAMPLES), "Service")}
    assert router.environment["KVLEASE_ROUTER_PREFILL"] == f"http://prefill:{ports['prefill']}"
    assert router.environment["KVLEASE_ROUTER_DECODE"].startswith(f"http://decode-0.decode:{ports['decode']},")


def _members(port: int) -> list[str]:
    return [f"kvlease-etcd-{number}.kvlease-etcd:{port}" for number in range(3)]


def _with_files(container: Container, secrets: dict[str, Path], words: list[str] | None = None) -> list[str]:
    """Arguments, or other words, with the folders of this machine in place of those that secrets are mounted at."""
    found = container.words if words is None else list(words)
    for mount in sorted(container.mounts, key=len, reverse=True):
        found = [word.replace(mount, str(secrets[container.mounts[mount]])) for word in found]
    return found


def _lay_out(secret: Document, folder: Path) -> Path:
    place = folder / "secrets" / str(secret["metadata"]["name"])
    place.mkdir(parents=True)
    assert set(secret["data"]) == {"ca.crt", "tls.crt", "tls.key"}
    for name, content in secret["data"].items():
        (place / name).write_bytes(base64.b64decode(content))
        (place / name).chmod(0o440)
    return place


def _names(folder: Path) -> dict[type[x509.GeneralName], set[str]]:
    certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    kinds: tuple[Any, ...] = (x509.DNSName, x509.UniformResourceIdentifier)
    return {kind: set(names.get_values_for_type(kind)) for kind in kinds}


def _json_documents(text: str) -> Iterator[Document]:
    """Each of several JSON objects, one after the other."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text.rstrip()):
        document, at = decoder.raw_decode(text, at)
        while at < len(text) and text[at].isspace():
            at += 1
        yield document
