"""The S3 server of the tier: started once, by the first test that asks for it."""

from collections.abc import Iterator
from itertools import count

import pytest
from tests.seaweedfs import BUCKET, SeaweedFS

_numbers = count()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    server = SeaweedFS(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def s3_url(s3_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a store that is empty; the environment holds what its clients need."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/test-{next(_numbers)}"
