"""The manifests against what will read them: Serve's schema, this project's configuration, KubeRay's definitions."""

import gzip
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from actors.config import load_config

FOLDER = Path(__file__).parents[2] / "k8s"
MANIFESTS = [m for f in sorted(FOLDER.glob("*.yaml")) for m in yaml.safe_load_all(f.read_text(encoding="utf-8"))]
SERVICES = [m for m in MANIFESTS if m["kind"] == "RayService"]


@pytest.mark.parametrize("manifest", SERVICES, ids=lambda m: m["metadata"]["name"])
def test_the_serve_configuration_has_only_keys_that_serve_knows_and_a_valid_app(manifest: dict[str, Any]) -> None:
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(config)
    assert set(config) <= set(ServeDeploySchema.model_fields)  # the schema itself lets unknown keys pass
    for application, parsed in zip(config["applications"], schema.applications, strict=True):
        assert set(application) <= set(type(parsed).model_fields)
        assert application["import_path"] == "deploy.app:build"
        assert load_config(application["args"]).app == application["name"]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_kuberay_accepts_the_manifest(manifest: dict[str, Any]) -> None:
    folder = os.environ.get("KUBERAY_CRDS")
    if not folder:
        pytest.skip("KUBERAY_CRDS names no folder with KubeRay's CustomResourceDefinitions (ray.io_*.yaml.gz)")
    file = Path(folder) / f"ray.io_{manifest['kind'].lower()}s.yaml.gz"
    definition = yaml.safe_load(gzip.decompress(file.read_bytes()))
    version = manifest["apiVersion"].split("/")[1]
    schema = next(v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == version)
    jsonschema.validate(_with_defaults(manifest, schema), _strict(schema))


def _strict(schema: Any) -> Any:
    """JSON schema of an OpenAPI v3 one: unknown keys refused, int-or-string spelt out."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items() if key != "default"}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    free = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema and not free:
        made["additionalProperties"] = False
        if "kind" in schema["properties"] and "apiVersion" in schema["properties"]:  # the API server owns these
            made["properties"]["metadata"] = {"type": "object"}
    return made


def _with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """What the API server fills in before it validates."""
    if isinstance(value, list):
        return [_with_defaults(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    filled = {key: _with_defaults(item, properties.get(key, {})) for key, item in value.items()}
    defaults = {key: p["default"] for key, p in properties.items() if isinstance(p, dict) and "default" in p}
    return {**defaults, **filled}
