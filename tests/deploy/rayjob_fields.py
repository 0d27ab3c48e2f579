"""Defines a JSON schema of the fields of `ray.io/v1` RayJob that the manifests use.

It is closed, so that a misspelt field is an error and not something that the operator drops. Written by hand after the
API of KubeRay `RELEASE`; where that release's own definition is at hand, `test_manifests` holds the manifests and this
schema against it.
"""

from __future__ import annotations

from typing import Any

RELEASE = "v1.6.2"
CRD_URL = (
    "https://raw.githubusercontent.com/ray-project/kuberay/v1.6.2/helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml"
)
CRD_SHA256 = "ecae45d9a5dc1be68f1074ba784c495ef9d439d295253b61e1bd51f7b08522f5"


def closed(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT = {"type": "string"}
WHOLE = {"type": "integer", "minimum": 0}
YES_OR_NO = {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
AMOUNTS = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^[0-9.]+(m|[KMGT]i?)?$"}}
RESOURCES = closed(requests=AMOUNTS, limits=AMOUNTS)

CONTAINER = closed(
    ("name", "image", "resources"),
    name=TEXT,
    image=TEXT,
    ports={"type": "array", "items": closed(("containerPort",), name=TEXT, containerPort=WHOLE)},
    env={"type": "array", "items": closed(("name", "value"), name=TEXT, value=TEXT)},
    envFrom={"type": "array", "items": closed(secretRef=closed(("name",), name=TEXT, optional=YES_OR_NO))},
    resources=RESOURCES,
    securityContext=closed(
        allowPrivilegeEscalation=YES_OR_NO, capabilities=closed(drop={"type": "array", "items": TEXT})
    ),
    volumeMounts={"type": "array", "items": closed(("name", "mountPath"), name=TEXT, mountPath=TEXT)},
)
POD = closed(
    ("spec",),
    metadata=closed(annotations=TEXTS, labels=TEXTS),
    spec=closed(
        ("containers",),
        restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
        terminationGracePeriodSeconds=WHOLE,
        securityContext=closed(
            runAsNonRoot=YES_OR_NO, runAsUser=WHOLE, fsGroup=WHOLE, seccompProfile=closed(("type",), type=TEXT)
        ),
        tolerations={"type": "array", "items": closed(key=TEXT, operator=TEXT, effect=TEXT)},
        containers={"type": "array", "minItems": 1, "items": CONTAINER},
        volumes={
            "type": "array",
            "items": closed(("name",), name=TEXT, emptyDir=closed(medium=TEXT, sizeLimit=TEXT)),
        },
    ),
)
CLUSTER = closed(
    ("rayVersion", "headGroupSpec", "workerGroupSpecs"),
    rayVersion=TEXT,
    authOptions=closed(("mode",), mode={"enum": ["token", "disabled"]}),
    enableInTreeAutoscaling=YES_OR_NO,
    autoscalerOptions=closed(
        version={"enum": ["v1", "v2"]},
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        idleTimeoutSeconds=WHOLE,
        resources=RESOURCES,
    ),
    headGroupSpec=closed(("rayStartParams", "template"), rayStartParams=TEXTS, template=POD),
    workerGroupSpecs={
        "type": "array",
        "items": closed(
            ("groupName", "minReplicas", "maxReplicas", "template"),
            groupName=TEXT,
            replicas=WHOLE,
            minReplicas=WHOLE,
            maxReplicas=WHOLE,
            rayStartParams=TEXTS,
            template=POD,
        ),
    },
)
RAY_JOB = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed(("name",), name={"type": "string", "pattern": "^[a-z][a-z0-9-]{0,46}$"}, labels=TEXTS),
    spec=closed(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode"]},
        backoffLimit=WHOLE,
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        preRunningDeadlineSeconds={"type": "integer", "minimum": 1},
        shutdownAfterJobFinishes=YES_OR_NO,
        ttlSecondsAfterFinished=WHOLE,
        rayClusterSpec=CLUSTER,
    ),
)
