"""The files in `deploy/` match their readers: the operator's fields, Ray's launcher, this project's commands."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray._private import ray_constants
from ray.dashboard.modules.job import job_supervisor

from configs.load import load_job
from configs.presets import job_names
from jobs import caption
from jobs.submit import STOP_WAIT_VARIABLE
from pipeline.cluster import code_archive
from pipeline.cluster.signals import CLUSTER_WAIT_S, GRACE_S
from pipeline.resources import autoscaler
from pipeline.resources.capacity import Capacity, Node
from pipeline.resources.gpu_shares import share_gpus
from pipeline.resources.refusals import refuse_cpus, refuse_gpus, refuse_unknown_nodes
from pipeline.resources.requests import actors_of, tasks_of
from tests.deploy.rayjob_fields import CRD_SHA256, CRD_URL, RAY_JOB, RELEASE

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CRD_VARIABLE = "KUBERAY_RAYJOB_CRD"
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Environment variable with the seconds that a node drains itself after SIGTERM."""


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())


@pytest.fixture(scope="module")
def launcher() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "cluster.yaml").read_text())


def complaints(value: Any, schema: dict[str, Any]) -> list[str]:
    errors = jsonschema.Draft7Validator(schema).iter_errors(value)
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message}"[:300] for error in errors)


# --- Kubernetes ----------------------------------------------------------------------------------------------------


def test_the_manifest_has_only_known_fields_of_the_right_types(manifest: dict[str, Any]) -> None:
    assert complaints(manifest, RAY_JOB) == []


def pods(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterSpec"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {name: group["template"]["spec"] for name, group in {"head": cluster["headGroupSpec"], **groups}.items()}


def test_the_head_node_runs_no_tasks_and_worker_groups_scale_from_zero(manifest: dict[str, Any]) -> None:
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["enableInTreeAutoscaling"] is True
    start = cluster["headGroupSpec"]["rayStartParams"]
    assert (start["num-cpus"], start["num-gpus"]) == ("0", "0")
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] == 0 < group["replicas"] <= group["maxReplicas"]
    gpus = {
        name: pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for name, pod in pods(manifest).items()
    }
    assert gpus == {"head": None, "cpu": None, "gpu": "1"}


def test_pods_have_no_privileges_and_no_credentials_in_the_text(manifest: dict[str, Any]) -> None:
    for name, pod in pods(manifest).items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {variable["name"] for variable in container.get("env", [])} <= {"HF_HOME", DRAIN, STOP_WAIT_VARIABLE}
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}, name
        assert container["ports"][-1]["containerPort"] == 8080  # where the annotation sends Prometheus


def test_a_terminated_pod_has_the_grace_period_that_draining_needs(manifest: dict[str, Any]) -> None:
    assert hasattr(ray_constants, DRAIN), "Ray reads it by another name"
    for name, pod in pods(manifest).items():
        (drain_s,) = [
            float(variable["value"]) for variable in pod["containers"][0].get("env", []) if variable["name"] == DRAIN
        ] or [0]
        assert (drain_s > 0) == (name != "head"), name
        assert drain_s + 5 <= pod.get("terminationGracePeriodSeconds", 30), f"{name} is killed before it has drained"


def test_the_driver_has_a_grace_period_to_save_when_it_is_stopped(manifest: dict[str, Any]) -> None:
    head = pods(manifest)["head"]
    variables = {variable["name"]: variable["value"] for variable in head["containers"][0]["env"]}
    assert int(variables[STOP_WAIT_VARIABLE]) == CLUSTER_WAIT_S > GRACE_S
    assert head["terminationGracePeriodSeconds"] >= CLUSTER_WAIT_S + 5
    supervisor = Path(job_supervisor.__file__).read_text()
    assert STOP_WAIT_VARIABLE in supervisor, "Ray reads it by another name"


def test_all_nodes_run_one_image_and_the_ray_that_it_holds(manifest: dict[str, Any], launcher: dict[str, Any]) -> None:
    images = {container["image"] for pod in pods(manifest).values() for container in pod["containers"]}
    assert images == {launcher["docker"]["image"]}
    version = manifest["spec"]["rayClusterSpec"]["rayVersion"]
    assert f'"ray[data,default]=={version}"' in (DEPLOY / "Dockerfile").read_text()
    required = re.search(r"ray\[data,default\]>=([\d.]+),<([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert required
    assert numbers(required[1]) <= numbers(version) < numbers(required[2])


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_command_of_the_manifest_is_valid_and_its_job_file_is_in_the_image(manifest: dict[str, Any]) -> None:
    command = shlex.split(manifest["spec"]["entrypoint"])
    assert command[:2] == ["draftfleet", "caption"]
    arguments = caption.COMMAND.parse(command[2:])
    assert str(arguments.config) in job_names()
    job = load_job(caption.COMMAND.model, arguments.config, tuple(arguments.overrides))
    assert job.job.ray_address == "auto"
    groups = {group["groupName"]: group for group in manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    assert job.pool.max_size == groups["gpu"]["maxReplicas"]


def test_engines_of_jobs_fit_on_the_clusters_of_both_files(manifest: dict[str, Any], launcher: dict[str, Any]) -> None:
    """`num_gpus: auto` on the head alone: the workers are those that the autoscaler can add."""
    ray_cluster = {"metadata": {"name": "a", "namespace": "b"}, "spec": manifest["spec"]["rayClusterSpec"]}
    job = load_job(caption.COMMAND.model, ROOT / "configs/jobs/caption_webdataset.yaml", ("pool.max_size=8",))
    for config in (launcher, autoscaler.derived(ray_cluster)):
        assert config is not None
        types = autoscaler.addable(autoscaler.types_of(config) or [], [], config["max_workers"])
        capacity = Capacity("the cluster", (Node({"CPU": 0, "GPU": 0}, {}), *types))
        pools, tasks = actors_of(job), list(tasks_of(job))
        refuse_unknown_nodes(pools, tasks, capacity)
        shares = share_gpus(pools, capacity)
        assert shares == {"pool": 1}
        refuse_gpus(pools, shares, capacity)
        refuse_cpus(pools, tasks, shares, capacity, "job.ray_address")


def release_schema() -> dict[str, Any]:
    """The schema of `v1` in the release's own definition, closed: an operator drops unknown fields without a word."""
    text = Path(os.environ[CRD_VARIABLE]).read_bytes()
    assert hashlib.sha256(text).hexdigest() == CRD_SHA256, f"not the definition of KubeRay {RELEASE}: {CRD_URL}"
    versions = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"]
    schema["properties"]["metadata"] = {"type": "object"}
    return close(schema)


def close(node: Any) -> Any:
    """The schema with `additionalProperties: false` wherever properties are listed."""
    if isinstance(node, list):
        return [close(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    made = {name: close(inner) for name, inner in node.items()}
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    return made


def leaves(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and type of every field that a schema knows."""
    for name, inner in schema.get("properties", {}).items():
        yield (*path, name), inner.get("type", "")
        yield from leaves(inner, (*path, name))
    if "items" in schema:
        yield from leaves(schema["items"], (*path, "[]"))


@pytest.mark.skipif(CRD_VARIABLE not in os.environ, reason=f"{CRD_VARIABLE} names no file; see {CRD_URL}")
def test_the_releases_own_definition_accepts_the_manifest_and_knows_every_field_of_our_schema(
    manifest: dict[str, Any],
) -> None:
    schema = release_schema()
    assert complaints(manifest, schema) == []
    spoilt = copy.deepcopy(manifest)
    spoilt["spec"]["rayClusterSpec"]["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]["imagePolicy"] = "x"
    assert any("'imagePolicy' was unexpected" in complaint for complaint in complaints(spoilt, schema))
    known = dict(leaves(schema))
    ours = {path: kind for path, kind in leaves(RAY_JOB) if path[0] != "metadata"}
    wrong = {path: kind for path, kind in ours.items() if kind and known.get(path, "none") not in (kind, "")}
    assert wrong == {}


# --- virtual machines ----------------------------------------------------------------------------------------------


def test_the_launcher_file_is_valid_by_the_schema_of_ray(launcher: dict[str, Any]) -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    assert complaints(launcher, schema) == []
    assert complaints({**launcher, "max_worker": 3}, schema) != []


def test_the_node_groups_of_the_launcher_file_are_consistent(launcher: dict[str, Any]) -> None:
    kinds = launcher["available_node_types"]
    assert launcher["head_node_type"] in kinds
    assert kinds["head"]["resources"] == {"CPU": 0, "GPU": 0}
    workers = {name: kind for name, kind in kinds.items() if name != "head"}
    assert {name: "GPU" in kind["resources"] for name, kind in workers.items()} == {"cpu": False, "gpu": True}
    assert sum(kind["max_workers"] for kind in workers.values()) == launcher["max_workers"]
    assert [kind["min_workers"] for kind in workers.values()] == [0, 0]
    starts = [shlex.split(launcher[f"{node}_start_ray_commands"][-1]) for node in ("head", "worker")]
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    [token_file] = launcher["file_mounts"]
    for words in starts:
        assert words[:4] == ["RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={token_file}", "ray", "start"]
        assert {word.split("=")[0] for word in words[4:]} <= known


# --- the image -----------------------------------------------------------------------------------------------------


def docker_steps() -> list[tuple[str, str]]:
    """Instruction and the rest of every step of the Dockerfile."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def instruction(steps: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for name, rest in steps if name == word]


def test_the_image_holds_what_a_job_needs_and_nothing_else_of_the_checkout() -> None:
    copied = [rest.split() for rest in instruction(docker_steps(), "COPY")]
    sources = [words[0] for words in copied if not words[0].startswith("--from")]
    of_the_build = {"wheel_layout.py", "README.md", "LICENSE"}
    assert {*sources} == {*code_archive.SHIPPED_FOLDERS, *code_archive.SHIPPED_FILES, *of_the_build}
    assert all((ROOT / source).exists() for source in sources)
    assert all(words[-1] in ("./", f"./{words[0]}") for words in copied if not words[0].startswith("--from"))
    sent = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert sent[1] == "*"
    assert {line[1:] for line in sent if line.startswith("!")} == set(sources)


def test_the_image_is_pinned_and_runs_without_privileges() -> None:
    steps = docker_steps()
    bases = {rest.split()[0] for rest in instruction(steps, "FROM")}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-[a-z]+", bases.pop())
    assert instruction(steps, "USER") == ["1000"]
    assert [name for name, _ in steps].index("USER") > max(
        index for index, (name, _) in enumerate(steps) if name == "RUN"
    )
    assert instruction(steps, "ADD") == []


def test_the_image_can_run_every_job_from_any_folder_and_holds_no_secret() -> None:
    steps = docker_steps()
    environment = " ".join(instruction(steps, "ENV"))
    declared = re.findall(r"(\w+)=", " ".join([environment, *instruction(steps, "ARG")]))
    assert set(declared) == {
        *("PATH", "PYTHONUNBUFFERED", "RAY_USAGE_STATS_ENABLED", "DRAFTFLEET_REVISION"),
        *("TORCH_INDEX", "REVISION"),
    }
    (command,) = instruction(steps, "CMD")
    assert json.loads(command) == ["draftfleet", "caption", "--help"]


def test_the_image_installs_extras_that_the_project_has() -> None:
    (install,) = [step for step in instruction(docker_steps(), "RUN") if "pip install" in step]
    extras = re.search(r'"\.\[([a-z0-9,]+)\]"', install)
    assert extras
    declared = re.search(r"\[project\.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.S)
    assert declared
    assert set(extras[1].split(",")) <= set(re.findall(r"^(\w+) = \[", declared[1], re.M))
