"""Clusters that the tests of this folder share, since one takes seconds to start; and what a test must leave behind.

Each test writes under a prefix of its own and finds the members running. Invariant: a test leaves no asyncio task.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from kvlease.etcd import EtcdClient

from tests.etcd.cluster import Cluster, ClusterSettings

SETTLE_S = 2.0


@pytest.fixture(scope="package")
def solo_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(ClusterSettings(folder=tmp_path_factory.mktemp("solo"), hosts=("127.0.0.1",)))
    yield cluster
    cluster.close()


@pytest.fixture(scope="package")
def trio_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(ClusterSettings(folder=tmp_path_factory.mktemp("trio")))
    yield cluster
    cluster.close()


@pytest.fixture
async def solo(solo_process: Cluster) -> Cluster:
    """One member."""
    await solo_process.heal()
    return solo_process


@pytest.fixture
async def trio(trio_processes: Cluster) -> Cluster:
    """Three members."""
    await trio_processes.heal()
    return trio_processes


@pytest.fixture
async def etcd(solo: Cluster) -> AsyncIterator[EtcdClient]:
    """A client of the one member."""
    async with EtcdClient(solo.endpoints) as client:
        yield client


@pytest.fixture
def prefix() -> bytes:
    """Keys of this test."""
    return f"/{uuid.uuid4().hex}/".encode()


@pytest.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    """Fails a test that leaves tasks: those of gRPC get a moment to end, ours must not be there."""
    yield
    ours = asyncio.current_task()
    async with asyncio.timeout(SETTLE_S):
        while left := [task for task in asyncio.all_tasks() if task is not ours]:
            assert not [task for task in left if "etcd" in task.get_name()], left
            await asyncio.sleep(0.01)
