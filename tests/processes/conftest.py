"""What several of these tests need: a running etcd."""

from collections.abc import Iterator

import pytest

from keepstep.runtime.etcd_server import EmbeddedEtcd


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedEtcd, str]]:
    folder = tmp_path_factory.mktemp("etcd")
    etcd = EmbeddedEtcd(folder / "data", folder / "log")
    url = etcd.start()
    yield etcd, url
    etcd.stop()
    assert etcd.poll() is not None
