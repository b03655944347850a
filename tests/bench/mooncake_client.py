"""Mooncake's own client behind two pipes: `put KEY SIZE` or `get KEY` a line in, `@ok` or what went wrong a line out.

Runs in a Python that has mooncake-transfer-engine-non-cuda and needs nothing of ours. `get` asks the master where the
replicas of a key are, which is what a resolve is; the bytes themselves lie in this process. MASTER is a port here, or
etcd://HOST:PORT;HOST:PORT where several masters are.
"""

from __future__ import annotations

import os
import sys

SEGMENT_BYTES = 512 << 20
BUFFER_BYTES = 16 << 20


def main(port: str, master: str) -> None:
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

    store = MooncakeDistributedStore()
    address = f"127.0.0.1:{port}"
    where = master if "://" in master else f"127.0.0.1:{master}"
    failed = store.setup(address, "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", where)
    payload = os.urandom(1 << 20)
    for line in sys.stdin:
        match line.split():
            case ["put", key, size]:
                good = not failed and store.put(key, payload[: int(size)]) == 0
            case ["get", key]:
                good = not failed and bool(store.get_replica_desc(key))
            case _:
                good = False
        sys.stdout.write("@ok\n" if good else "@failed\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
