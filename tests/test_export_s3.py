"""Export to an object store, restored from there: a moto server on loopback stands for S3.

Orbax 0.12.8 opens ``gs://`` and local paths only: an ``s3://`` path goes to its ``file`` driver. So
what it restores here is a plain copy of the objects, and the arrays are also read straight from the
store through tensorstore, as Orbax would.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sharded_ckpt import UsageError
from tests.make_set import make_set
from tests.test_export import export

ts = pytest.importorskip("tensorstore")
boto3 = pytest.importorskip("boto3")
moto = pytest.importorskip("moto.server")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, dict[str, str]]]:
    """An S3 client and the kvstore spec of a fresh bucket."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        _, port = server.get_host_and_port()
        endpoint = f"http://127.0.0.1:{port}"
        reset = urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset, timeout=30).close()  # its objects live in this process
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        spec = {
            "driver": "s3",
            "bucket": "bucket",
            "endpoint": endpoint,
            "path": "run/step",
            "aws_region": "us-east-1",
        }
        yield client, spec
    finally:
        server.stop()


def test_orbax_restores_bitwise_what_was_written_to_an_object_store(
    tmp_path: Path, bucket: tuple[Any, dict[str, str]]
) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    client, spec = bucket
    saved = {
        "w": torch.randn(30, 4),
        "half": torch.randn(17, 3).to(torch.bfloat16),
        "zeros": torch.zeros(5, 5),
        "count": torch.arange(3),
    }
    manifest = make_set(tmp_path / "set", {f"model/{n}": t for n, t in saved.items()}, world_size=2)
    export(tmp_path / "set", manifest, json.dumps(spec), format="orbax")

    for name, tensor in saved.items():
        base = {**spec, "path": "run/step/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        array = ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
        assert bits(array) == bits(tensor), name

    copy = tmp_path / "copied"
    for item in client.list_objects_v2(Bucket="bucket", Prefix="run/step/")["Contents"]:
        target = copy / item["Key"].removeprefix("run/step/")
        target.parent.mkdir(parents=True, exist_ok=True)
        client.download_file("bucket", item["Key"], str(target))
    restored = ocp.PyTreeCheckpointer().restore(copy)
    assert set(restored) == set(saved)
    for name, tensor in saved.items():
        assert str(restored[name].dtype) == str(tensor.dtype).removeprefix("torch.")
        assert bits(np.asarray(restored[name])) == bits(tensor), name


def test_a_store_that_holds_something_is_not_written_over(
    tmp_path: Path, bucket: tuple[Any, dict[str, str]]
) -> None:
    client, spec = bucket
    manifest = make_set(tmp_path, {"model/w": torch.ones(3)})
    export(tmp_path, manifest, json.dumps(spec), format="orbax")
    before = client.list_objects_v2(Bucket="bucket")["KeyCount"]
    with pytest.raises(UsageError, match="not empty"):
        export(tmp_path, manifest, json.dumps(spec), format="orbax")
    assert client.list_objects_v2(Bucket="bucket")["KeyCount"] == before


def bits(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(value).tobytes()
