"""What the kustomizations under deploy/kubernetes come to, as kubectl builds them, and the containers in it.

Plain documents as they would be sent to a cluster; nothing of kvlease in here. No assertions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import yaml

from tests.deploy.tools import DEPLOY, program, said

KUBERNETES: Final = DEPLOY / "kubernetes"
OVERLAYS: Final = ("memory", "etcd", "etcd-cert-manager")
FOREIGN: Final = ("cert-manager.io/", "monitoring.coreos.com/")
"""Kinds that a cluster has only with what defines them."""
_VARIABLE: Final = re.compile(r"\$\(([A-Z_]+)\)")

Document = dict[str, Any]


def overlay(name: str) -> str:
    return f"overlays/{name}"


@cache
def _built(folder: str) -> str:
    return said([program("kubectl", "make venv"), "kustomize", KUBERNETES / folder])


def build(folder: str) -> list[Document]:
    """All documents of a kustomization in deploy/kubernetes."""
    return list(yaml.safe_load_all(_built(folder)))


def of_kind(documents: list[Document], kind: str, name: str | None = None) -> list[Document]:
    return [x for x in documents if x["kind"] == kind and name in (None, x["metadata"]["name"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of a workload. `mounts`: secret by the folder that it is mounted at."""

    workload: str
    spec: Document
    pod: Document
    mounts: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """As the process in the workload's first pod sees it; whatever is taken from the pod's fields is its name."""
        name = f"{self.workload}-0"
        return {item["name"]: str(item.get("value", name)) for item in self.spec.get("env", [])}

    @property
    def words(self) -> list[str]:
        """Its arguments, variables put in as Kubernetes does."""
        known = self.environment
        return [_VARIABLE.sub(lambda match: known[match[1]], word) for word in self.spec.get("args", [])]

    def probes(self) -> dict[str, Document]:
        return {name: probe for name, probe in self.spec.items() if name.endswith("Probe")}


def containers(documents: list[Document]) -> Iterator[Container]:
    """Every container of every workload."""
    for document in documents:
        if document["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = document["spec"]["template"]["spec"]
        secrets = {x["name"]: x["secret"]["secretName"] for x in pod.get("volumes", []) if "secret" in x}
        for spec in pod["containers"]:
            mounts = {x["mountPath"]: secrets[x["name"]] for x in spec.get("volumeMounts", []) if x["name"] in secrets}
            yield Container(workload=document["metadata"]["name"], spec=spec, pod=pod, mounts=mounts)
