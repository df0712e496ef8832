"""Merging of the user's pod template."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit_provisioners.kubernetes.pod_template import merge_pod_template

SHM = "/dev/shm/"  # noqa: S108  # of a pod
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"spotfit.dev/run": "x"}, "annotations": {"a": "1"}},
    "spec": {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "agent",
                "command": ["python"],
                "env": [{"name": "SPOTFIT_HOST", "value": "1"}],
                "resources": {"limits": {"cpu": "1", "memory": "2Gi"}},
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {}}],
    },
}


def merge(**overrides: Any) -> dict[str, Any]:
    return merge_pod_template(TEMPLATE, overrides, container="agent")


def test_no_overrides_leave_the_template() -> None:
    assert merge() == TEMPLATE


def test_objects_are_merged_and_null_removes_a_field() -> None:
    merged = merge(
        metadata={"annotations": {"b": "2", "a": None}, "labels": {"team": "vision"}},
        spec={"hostIPC": True},
    )
    assert merged["metadata"] == {
        "labels": {"spotfit.dev/run": "x", "team": "vision"},
        "annotations": {"b": "2"},
    }
    assert merged["spec"] == {**TEMPLATE["spec"], "hostIPC": True}


def test_lists_are_merged_by_their_key() -> None:
    merged = merge(
        spec={
            "containers": [
                {
                    "name": "agent",
                    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                    "resources": {"limits": {"cpu": None}},
                    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                },
                {"name": "monitor", "image": "dcgm"},
            ],
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
        }
    )
    agent, monitor = merged["spec"]["containers"]
    assert [entry["name"] for entry in agent["env"]] == ["SPOTFIT_HOST", "NCCL_DEBUG"]
    assert agent["command"] == ["python"]
    assert agent["resources"] == {"limits": {"memory": "2Gi"}}
    assert agent["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert monitor == {"name": "monitor", "image": "dcgm"}
    assert [volume["name"] for volume in merged["spec"]["volumes"]] == ["shm", "data"]


def test_the_template_is_not_changed() -> None:
    before = str(TEMPLATE)
    merge(spec={"containers": [{"name": "agent", "resources": {"limits": {"cpu": "9"}}}]})
    assert str(TEMPLATE) == before


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"kind": "Pod"}, "has no field kind"),
        ({"spec": None}, "must be objects"),
        ({"metadata": {"labels": None}}, "must be objects"),
        ({"metadata": {"name": "x"}}, "metadata.name cannot be set"),
        ({"metadata": {"labels": {"spotfit.dev/token": "y"}}}, "belongs to spotfit"),
        ({"spec": {"restartPolicy": "Always"}}, "restartPolicy of spec cannot be overridden"),
        ({"spec": {"tolerations": []}}, "tolerations of spec cannot be overridden"),
        ({"spec": {"containers": None}}, "spec.containers must be a list"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers must be a list"),
        ({"spec": {"volumes": [{"name": "shm", "emptyDir": {}}]}}, "the volume shm belongs"),
        ({"spec": {"containers": [{"name": "agent", "command": []}]}}, "command of the container"),
        ({"spec": {"containers": [{"name": "agent", "envFrom": []}]}}, "envFrom of the container"),
        ({"spec": {"containers": [{"name": "agent", "env": None}]}}, "env of the container"),
        (
            {"spec": {"containers": [{"name": "agent", "env": [{"name": "SPOTFIT_HOST"}]}]}},
            "SPOTFIT_HOST belongs to spotfit",
        ),
        (
            {"spec": {"containers": [{"name": "agent", "volumeMounts": [{"mountPath": SHM}]}]}},
            f"{SHM} belongs to spotfit",
        ),
    ],
)
def test_overrides_of_what_agents_need_are_rejected(
    overrides: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        merge_pod_template(TEMPLATE, overrides, container="agent")
    assert caught.value.do


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        merge(spec={"subdomain": "x", "containers": [{"name": "agent", "args": []}]})
    assert "subdomain" in str(caught.value)
    assert "args" in str(caught.value)
