"""launch/kubernetes: fields that KubeRay has, what both overlays come to, and that they fit their experiments."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo.config.compose import compose
from dapo.config.derived import gpus_per_engine

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch/kubernetes"
# KubeRay's API ray.io/v1, as its Go types have it (1.5.1).
JOB = """
entrypoint shutdownAfterJobFinishes ttlSecondsAfterFinished backoffLimit rayClusterSpec submitterConfig
submitterPodTemplate runtimeEnvYAML activeDeadlineSeconds submissionMode suspend
"""
CLUSTER = "rayVersion authOptions headGroupSpec workerGroupSpecs enableInTreeAutoscaling"
HEAD = "rayStartParams template serviceType"
WORKERS = "rayStartParams template groupName replicas minReplicas maxReplicas numOfHosts"


def read(path: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / path).read_text())


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_only_fields_that_kuberay_has_and_the_images_ray() -> None:
    from ray.scripts.scripts import start

    options = {option.removeprefix("--") for parameter in start.params for option in parameter.opts}
    cluster, job = read("cluster/raycluster.yaml")["spec"], read("job/rayjob.yaml")["spec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for found, known in ((job, JOB), (cluster, CLUSTER), (head, HEAD), *((each, WORKERS) for each in workers)):
        assert set(found) <= set(known.split())
    assert cluster["authOptions"] == {"mode": "token"}
    assert all(group["minReplicas"] == group["replicas"] == group["maxReplicas"] for group in workers)
    assert all(set(group["rayStartParams"]) <= options for group in (head, *workers))
    assert f"\nray=={cluster['rayVersion']}\n" in (ROOT / "docker/gpu.lock").read_text()


def test_pods_are_unprivileged_see_the_shared_volume_and_hold_no_secret() -> None:
    claim = read("cluster/volume.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    user = re.search(r"^USER (\d+)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    submitter = read("job/rayjob.yaml")["spec"]["submitterPodTemplate"]["spec"]
    cluster = pods(read("cluster/raycluster.yaml")["spec"])
    for pod in (*cluster, submitter):
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert set(container["resources"]) == {"requests", "limits"}
        memory = int(container["resources"]["requests"].get("memory", "0Gi").removesuffix("Gi"))
        assert memory <= 950, "a node of 1 TiB has less to give"
    for pod in cluster:
        (container,) = pod["containers"]
        assert user and pod["securityContext"]["runAsUser"] == int(user[1])
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        secret = [one for one in container["env"] if re.search("TOKEN|KEY|SECRET", one["name"])]
        assert secret and all("value" not in one for one in secret)


def test_a_gpu_pod_that_is_told_to_go_has_time_to_hand_over() -> None:
    """Ray itself tells the cluster at SIGTERM."""
    from ray._private import ray_constants

    name = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    assert hasattr(ray_constants, name)
    (pod,) = [pod for pod in pods(read("cluster/raycluster.yaml")["spec"]) if "tolerations" in pod]
    (value,) = [one["value"] for one in pod["containers"][0]["env"] if one["name"] == name]
    assert 60 <= int(value) < pod["terminationGracePeriodSeconds"]


def test_no_capability_is_added_to_a_user_for_whom_it_has_no_effect() -> None:
    """Kubernetes has no ambient capabilities: what is added to a container whose user is not root is in no mask that
    counts. Its manifests must then get locked memory from the node."""
    texts = [path.read_text() for path in FOLDER.rglob("*.yaml")]
    root = any(re.search(r"runAsUser(: |\n +value: )0\b", text) for text in texts)
    adds = [text for text in texts if re.search(r"capabilities/add|^ +add: ", text, re.MULTILINE)]
    assert root or not adds
    assert "LimitMEMLOCK=infinity" in (FOLDER / "rdma/kustomization.yaml").read_text()


def patched(overlay: str) -> tuple[str, int]:
    """The entry point and the number of GPU nodes that an overlay gives its job."""
    found = {"/entrypoint": read("job/rayjob.yaml")["spec"]["entrypoint"], "/replicas": 1}
    for patch in read(f"{overlay}/kustomization.yaml")["patches"]:
        if patch["target"]["kind"] == "RayJob":
            found |= {"/" + each["path"].rsplit("/")[-1]: each["value"] for each in yaml.safe_load(patch["patch"])}
    return found["/entrypoint"], found["/replicas"]


@pytest.mark.parametrize("overlay", ["one-node", "sixteen-nodes"])
def test_an_overlay_has_the_gpus_of_its_experiment(overlay: str) -> None:
    entrypoint, nodes = patched(overlay)
    start, *arguments = entrypoint.split(" +", 1)
    assert start == "python -m dapo.doctor --run"
    cfg = compose(["+" + word if word.startswith("experiment") else word for word in arguments[0].split()])
    assert cfg.trainer.output_dir.startswith("/shared/"), "every pod sees it"
    engines, ranks = cfg.rollout.num_engines * gpus_per_engine(cfg.rollout.vllm), cfg.actor.num_workers
    (worker,) = [pod for pod in pods(read("cluster/raycluster.yaml")["spec"]) if "tolerations" in pod]
    there = nodes * int(worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert there == (max(engines, ranks) if cfg.trainer.colocate != "none" else engines + ranks)
