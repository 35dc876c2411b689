"""The service on several machines: the manifest is valid and consistent with itself; replicas in Ray answer."""

from __future__ import annotations

import http.client
import json
import socket

import pytest
import yaml

from ftk.serving.guard import OPEN_ROUTES
from ftk_cli.serve import ServedConfig
from tests.paths import ROOT

MANIFEST = ROOT / "examples" / "serve" / "kubernetes.yaml"


@pytest.fixture(scope="module")
def objects():
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_manifest_is_what_kubernetes_takes(objects):
    validator = pytest.importorskip("kubernetes_validate")
    for one in objects.values():
        validator.validate(one, validator.latest_version(), strict=True)
    with pytest.raises(validator.ValidationError):  # it does look
        validator.validate({**objects["Service"], "spec": {"ports": "http"}}, validator.latest_version(), strict=True)


def test_the_parts_of_the_manifest_fit_each_other_and_the_service(objects):
    pod = objects["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    given = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    for name in set(given) - {"num-threads"}:
        assert name.replace("-", "_") in ServedConfig.__dataclass_fields__
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause + float(given["drain-timeout"])
    probed = {name: one["httpGet"]["path"] for name, one in container.items() if name.endswith("Probe")}
    assert probed == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    assert set(probed.values()) <= set(OPEN_ROUTES)
    labels = pod["metadata"]["labels"]
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == objects["Service"]["spec"]["selector"] == labels
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert ports == {"http": given["port"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert given["api-key-file"].startswith(mounts["keys"])
    assert given["path"].startswith(mounts["models"])


@pytest.mark.slow
def test_two_replicas_in_ray_answer(place, monkeypatch):
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from examples.serve.ray_serve import application

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application({"path": str(place / "run"), "replicas": 2, "max_len": 8, "device": "cpu"}))
        body = {"prompt": "the quick brown", "temperature": 0, "max_tokens": 4}
        texts = set()
        for _ in range(4):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200
            texts.add(json.loads(response.read())["choices"][0]["text"])
            connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
            events = connection.getresponse().read().split(b"\n\n")
            connection.close()
            assert events[-2] == b"data: [DONE]"
            texts.add("".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]))
        assert len(texts) == 1
        assert len(serve.status().applications["default"].deployments["ftk"].replica_states) == 1  # all running
        assert serve.status().applications["default"].deployments["ftk"].replica_states["RUNNING"] == 2
    finally:
        serve.shutdown()
        ray.shutdown()
