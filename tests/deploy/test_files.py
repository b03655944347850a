"""Every file of deploy/ by the tools that its kind has: YAML, Dockerfiles, shell, compose, alert rules.

Whether what they describe works is for the other tests here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from kvlease.registry import metrics

from tests.deploy.tools import DEPLOY, ROOT, compose_command, program, said

COMPOSE = DEPLOY / "compose" / "compose.yaml"
RULES = DEPLOY / "prometheus" / "kvlease-alerts.yml"
PROMETHEUS = "apt-get install prometheus"


def test_yaml() -> None:
    said([program("yamllint", "make venv"), "--strict", DEPLOY])


@pytest.mark.parametrize("name", ["Dockerfile", "vllm.Dockerfile"])
def test_dockerfiles(name: str) -> None:
    said([program("hadolint", "make venv"), DEPLOY / "image" / name])


@pytest.mark.parametrize("name", ["Dockerfile", "vllm.Dockerfile"])
def test_images_copy_what_is_there_and_is_let_into_the_build(name: str) -> None:
    image = DEPLOY / "image" / name
    copied = [line.split()[1:-1] for line in image.read_text().splitlines() if re.match(r"COPY (?!--)", line)]
    paths = [path for paths in copied for path in paths]
    let_in = [line[1:] for line in Path(f"{image}.dockerignore").read_text().splitlines() if line.startswith("!")]
    assert set(paths) <= set(let_in)
    assert all((ROOT / path).exists() for path in paths)


def test_shell() -> None:
    scripts = list(DEPLOY.rglob("*.sh"))
    assert scripts
    said([program("shellcheck", "make venv"), *scripts])


def test_compose() -> None:
    config = yaml.safe_load(said([*compose_command(), "--file", str(COMPOSE), "config"]))
    assert {"certificates", "etcd-0", "etcd-1", "etcd-2", "registry-0", "registry-1", "router"} == set(
        config["services"]
    )


def test_alert_rules() -> None:
    said([program("promtool", PROMETHEUS), "check", "rules", RULES])
    said([program("promtool", PROMETHEUS), "test", "rules", RULES.with_name("kvlease-alerts-test.yml")])


def test_alert_rules_ask_for_metrics_that_there_are() -> None:
    """etcd's are looked for at a running member, in test_compose_runs.py."""
    asked = set(re.findall(r"\bkvlease_\w+", " ".join(_expressions())))
    there = {value.name for value in vars(metrics).values() if isinstance(value, metrics.Metric)}
    assert asked
    assert asked <= there


def _expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]
