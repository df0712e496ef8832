"""Simulated clouds answer malformed requests as the vendor does, and keep serving."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest

from spotfit.core.codec import encode
from spotfit_localsim.clouds import azure_batch, gcp_batch
from spotfit_localsim.clouds.cloud_host import SimulatedMachine
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse
from spotfit_localsim.clouds.options import SimOptions
from spotfit_localsim.clouds.simulator import Simulator

_LIBRARIES = {
    "aws_batch": "boto3",
    "gcp_batch": "google.cloud.batch_v1",
    "azure_batch": "azure.batch",
    "kubernetes": "kubernetes.client",
    "plain": "msgspec",
}
_CONTAINER = {
    "image": "i",
    "command": ["true"],
    "resourceRequirements": [
        {"type": "VCPU", "value": "1"},
        {"type": "MEMORY", "value": "2048"},
        {"type": "GPU", "value": "1"},
    ],
}
_RETRIES = {"attempts": 2, "evaluateOnExit": [{"onExitCode": "85", "action": "RETRY"}]}
_JOBS = f"/v1/projects/{gcp_batch.PROJECT}/locations/{gcp_batch.REGION}/jobs"
_POD = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": 3,
    "containers": [
        {
            "name": "agent",
            "image": "i",
            "command": ["true"],
            "env": [{"name": "A", "value": "b"}],
            "envFrom": [
                {"secretRef": {"name": "known"}},
                # Created by one of the requests.
                {"secretRef": {"name": "s", "optional": True}},
            ],
            "resources": {"limits": {"memory": "2Gi", "nvidia.com/gpu": "1"}},
        }
    ],
}


class Call(NamedTuple):
    """A valid request."""

    method: str
    path: str
    body: Any
    query: Mapping[str, str] = MappingProxyType({})
    headers: Mapping[str, str] = MappingProxyType({})
    is_refused: bool = False
    """Whether it gets an error although it is well-formed, for example since a job is unknown."""

    def request(self, body: bytes) -> WireRequest:
        return WireRequest(self.method, self.path, self.query, self.headers, body)


_AZURE = {"api-version": "2024-07-01.20.0"}
_K8S = "/apis/batch/v1/namespaces/default/jobs"
_REVIEWS = "/apis/authorization.k8s.io/v1"
_ATTRIBUTES = {"resourceAttributes": {"verb": "create", "resource": "jobs", "group": "batch"}}
CALLS: dict[str, list[Call]] = {
    "aws_batch": [
        Call(
            "POST",
            "/v1/registerjobdefinition",
            {
                "jobDefinitionName": "d",
                "type": "container",
                "containerProperties": _CONTAINER,
                "retryStrategy": _RETRIES,
                "timeout": {"attemptDurationSeconds": 60},
                "tags": {"a": "b"},
            },
        ),
        Call(
            "POST",
            "/v1/submitjob",
            {
                "jobName": "j",
                "jobQueue": "spot",
                "jobDefinition": "known",
                "arrayProperties": {"size": 2},
                "containerOverrides": {"environment": [{"name": "A", "value": "b"}]},
                "retryStrategy": _RETRIES,
                "tags": {"a": "b"},
            },
        ),
        Call(
            "POST",
            "/v1/listjobs",
            {"jobQueue": "spot", "filters": [{"name": "JOB_NAME", "values": ["j*"]}]},
        ),
        Call("POST", "/v1/listjobs", {"jobQueue": "spot", "maxResults": 1, "nextToken": "1"}),
        Call("POST", "/v1/describejobs", {"jobs": ["x", "x:1"]}),
        Call("POST", "/v1/terminatejob", {"jobId": "x", "reason": "y"}, is_refused=True),
        Call("POST", "/v1/canceljob", {"jobId": "x", "reason": "y"}, is_refused=True),
        Call("POST", "/v1/describejobqueues", {"jobQueues": ["spot"]}),
        Call("POST", "/v1/describecomputeenvironments", {"computeEnvironments": ["spot"]}),
        Call("POST", "/v1/describejobdefinitions", {"jobDefinitionName": "d", "status": "ACTIVE"}),
        Call(
            "POST",
            "/",
            {"logGroupName": "g", "logStreamName": "s", "limit": 3},
            headers={"x-amz-target": "Logs_20140328.GetLogEvents"},
            is_refused=True,
        ),
        Call(
            "POST",
            "/",
            {"repositoryName": "worker", "imageIds": [{"imageTag": "sim"}]},
            headers={"x-amz-target": "AmazonEC2ContainerRegistry_V20150921.DescribeImages"},
        ),
        Call(
            "POST",
            "/",
            {
                "ServiceCode": "AmazonEC2",
                "Filters": [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": "us-east-1"}],
                "MaxResults": 1,
                "NextToken": "1",
            },
            headers={
                "x-amz-target": "AWSPriceListService.GetProducts",
                "authorization": "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/pricing/x, x",
            },
        ),
    ],
    "gcp_batch": [
        Call(
            "POST",
            _JOBS,
            {
                "priority": 1,
                "taskGroups": [
                    {
                        "taskCount": "2",
                        "parallelism": "2",
                        "taskSpec": {
                            "runnables": [{"container": {"imageUri": "i", "commands": ["true"]}}],
                            "computeResource": {"cpuMilli": "1000"},
                            "maxRetryCount": 2,
                            "maxRunDuration": "60s",
                            "lifecyclePolicies": [
                                {"action": "RETRY_TASK", "actionCondition": {"exitCodes": [85]}}
                            ],
                            "environment": {"variables": {"A": "b"}},
                        },
                    }
                ],
                "allocationPolicy": {
                    "location": {"allowedLocations": [f"regions/{gcp_batch.REGION}"]},
                    "instances": [{"policy": {"provisioningModel": "SPOT"}}],
                    "labels": {"a": "b"},
                },
                "labels": {"a": "b"},
                "logsPolicy": {"destination": "CLOUD_LOGGING"},
            },
            {"jobId": "j", "requestId": "11111111-1111-4111-8111-111111111111"},
        ),
        Call("GET", _JOBS, {}, {"pageSize": "1", "pageToken": "1"}),
        Call(
            "GET",
            "/v1/services/6F81-5844-456A/skus",
            {},
            {"pageSize": "5000", "pageToken": "4", "currencyCode": "USD"},
        ),
        Call("POST", "/v2/entries:list", {"filter": 'labels.task_id:"j-group0-0/"', "pageSize": 5}),
        Call(
            "POST",
            f"/v1/projects/{gcp_batch.PROJECT}:testIamPermissions",
            {"permissions": ["batch.jobs.create"]},
        ),
    ],
    "azure_batch": [
        Call(
            "POST",
            "/pools",
            {
                "id": "p",
                "vmSize": "standard_d4s_v5",
                "enableAutoScale": True,
                "autoScaleFormula": "$TargetLowPriorityNodes = 2;",
            },
            _AZURE,
        ),
        Call("POST", "/pools/known/resize", {"targetLowPriorityNodes": 1}, _AZURE),
        Call(
            "POST",
            "/pools/known/enableautoscale",
            {"autoScaleFormula": "$TargetLowPriorityNodes = 2;"},
            _AZURE,
        ),
        Call(
            "PUT",
            f"{azure_batch.ACCOUNT_ID}/pools/q",
            {
                "identity": {"type": "UserAssigned", "userAssignedIdentities": {"i": {}}},
                "properties": {
                    "vmSize": "s",
                    "deploymentConfiguration": {
                        "virtualMachineConfiguration": {
                            "imageReference": {"publisher": "p", "offer": "o", "sku": "s"},
                            "nodeAgentSkuId": "a",
                        }
                    },
                    "scaleSettings": {"autoScale": {"formula": "$TargetLowPriorityNodes = 2;"}},
                },
            },
            _AZURE,
        ),
        Call(
            "POST",
            "/jobs",
            {
                "id": "j",
                "poolInfo": {"poolId": "known"},
                "onAllTasksComplete": "noaction",
                "metadata": [{"name": "a", "value": "b"}],
            },
            _AZURE,
        ),
        Call("PATCH", "/jobs/known", {"onAllTasksComplete": "terminatejob"}, _AZURE),
        Call("POST", "/jobs/known/terminate", {"terminateReason": "x"}, _AZURE),
        Call(
            "POST",
            "/jobs/known/addtaskcollection",
            {
                "value": [
                    {
                        "id": "0",
                        "commandLine": "true",
                        "environmentSettings": [{"name": "A", "value": "b"}],
                        "constraints": {"maxTaskRetryCount": 0, "retentionTime": "P1D"},
                    }
                ]
            },
            _AZURE,
        ),
        Call("POST", "/jobs/known/tasks", {"id": "0", "commandLine": "true"}, _AZURE),
        Call("GET", "/jobs", {}, {**_AZURE, "maxresults": "1", "$skiptoken": "0"}),
        Call(
            "GET",
            "/api/retail/prices",
            {},
            {"$filter": "serviceName eq 'Virtual Machines'", "$skip": "3"},
        ),
    ],
    "kubernetes": [
        Call(
            "POST",
            _K8S,
            {
                "metadata": {"name": "j", "labels": {"a": "b"}},
                "spec": {
                    "completionMode": "Indexed",
                    "completions": 2,
                    "parallelism": 2,
                    "backoffLimitPerIndex": 0,
                    "podFailurePolicy": {
                        "rules": [
                            {
                                "action": "Ignore",
                                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                            },
                            {
                                "action": "FailIndex",
                                "onExitCodes": {"operator": "In", "values": [1]},
                            },
                        ]
                    },
                    "template": {"metadata": {"labels": {"a": "b"}}, "spec": _POD},
                },
            },
        ),
        Call("POST", "/api/v1/namespaces/default/pods", {"metadata": {"name": "p"}, "spec": _POD}),
        Call(
            "POST",
            "/api/v1/namespaces/default/secrets",
            {"metadata": {"name": "s"}, "stringData": {"a": "b"}},
        ),
        Call(
            "POST",
            "/api/v1/namespaces/default/services",
            {"metadata": {"name": "s"}, "spec": {"clusterIP": "None", "selector": {"a": "b"}}},
        ),
        Call("PATCH", f"{_K8S}/known", {"metadata": {"labels": {"c": "d"}}}),
        Call("POST", f"{_REVIEWS}/selfsubjectaccessreviews", {"spec": _ATTRIBUTES}),
        Call(
            "POST",
            f"{_REVIEWS}/subjectaccessreviews",
            {"spec": {**_ATTRIBUTES, "user": "system:serviceaccount:default:agent"}},
        ),
        Call("GET", "/api/v1/namespaces/default/pods", {}, {"labelSelector": "a=b"}),
        Call(
            "GET",
            "/api/v1/namespaces/default/pods",
            {},
            {"labelSelector": "a=b,c"},
            is_refused=True,
        ),
    ],
}
CALLS["plain"] = [
    Call("POST", "/groups/g", {"command": ["true"], "environments": [{"A": "b"}, {}]}),
    Call("GET", "/groups/g", {}, is_refused=True),
]
_BODIES = (b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"{}", b"[" * 3000, b'{"a": 1e999}')
_VALUES: tuple[Any, ...] = (
    None,
    "",
    "x",
    -1,
    0,
    1.5,
    True,
    [],
    {},
    [None],
    {"x": 1},
    "A b\n*",
    "9" * 5000,
    10**30,
)


@pytest.fixture
def simulator(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Simulator]:
    """A simulator whose ticks the test makes, and whose machines run nothing."""
    pytest.importorskip(_LIBRARIES[request.param])
    found = Simulator(tmp_path, SimOptions(cloud=request.param))
    machines = found.datacenter.machines

    def rent(
        task: str, command: list[str], environment: dict[str, str], **more: Any
    ) -> SimulatedMachine:
        number = len(machines) + 1
        machines[number] = SimulatedMachine(number, task, command, environment, 0.0, 0.0, **more)
        return machines[number]

    monkeypatch.setattr(found.datacenter, "rent", rent)
    monkeypatch.setattr(found.datacenter, "_persist", lambda _: None)
    monkeypatch.setattr(found, "_save_state", lambda: None)
    yield found
    found.close()


def send(simulator: Simulator, call: Call, body: bytes) -> WireResponse:
    return simulator._answer_request(call.request(body))


def run_what_was_accepted(simulator: Simulator) -> None:
    """Rent machines for it, boot them, and let their commands end."""
    simulator.cloud.tick()
    for machine in simulator.datacenter.active_machines():
        environment = {**simulator._task_environment(machine), **machine.environment}
        texts = [*environment, *environment.values(), *machine.command]
        assert all(isinstance(text, str) for text in texts), texts
        machine.state = "up"
    simulator.cloud.tick()
    for machine in simulator.datacenter.active_machines():
        machine.state, machine.exit_code = "over", 1
    simulator.cloud.tick()
    # It is stored after each change.
    encode(simulator.cloud.state)


def prepare(simulator: Simulator) -> None:
    """Empty the cloud, and create the objects that requests name."""
    cloud = simulator.options.cloud
    simulator.datacenter.machines.clear()
    simulator.cloud.state = type(simulator.cloud).State()  # type: ignore[attr-defined]
    if cloud == "kubernetes":
        simulator.cloud.state.objects = {
            kind: {} for kind in ("jobs", "pods", "secrets", "services", "nodes", "events")
        }
    create = CALLS[cloud][0]
    if cloud == "azure_batch":
        known_pool = {"id": "known", "vmSize": "s", "targetLowPriorityNodes": 1}
        assert send(simulator, create, msgspec.json.encode(known_pool)).status == 201
        job = Call("POST", "/jobs", {"id": "known", "poolInfo": {"poolId": "known"}}, _AZURE)
        assert send(simulator, job, msgspec.json.encode(job.body)).status == 201
    if cloud == "kubernetes":
        secret = Call("POST", "/api/v1/namespaces/default/secrets", {"metadata": {"name": "known"}})
        assert send(simulator, secret, msgspec.json.encode(secret.body)).status == 201
        known = copy.deepcopy(create.body)
        known["metadata"]["name"] = "known"
        assert send(simulator, create, msgspec.json.encode(known)).status == 201
    if cloud == "aws_batch":
        known = {**create.body, "jobDefinitionName": "known"}
        assert send(simulator, create, msgspec.json.encode(known)).status == 200


def check_answer(cloud: str, call: Call, reply: WireResponse, sent: bytes) -> None:
    assert reply.status < 500, (call.path, sent, reply)
    if reply.status < 400:
        return
    error = msgspec.json.decode(reply.body)
    if cloud == "aws_batch":
        assert error["message"], sent
        assert error["__type"] in (
            "ClientException",
            "SerializationException",
            "InvalidParameterException",
            "InvalidNextTokenException",
            "ImageNotFoundException",
            "ResourceNotFoundException",
        )
    elif cloud == "gcp_batch":
        assert error["error"]["code"] == reply.status
        assert error["error"]["status"] in ("INVALID_ARGUMENT", "NOT_FOUND")
    elif cloud == "azure_batch":
        inner = error.get("error", error)
        assert inner["code"], sent
        assert inner["message"], sent
    elif cloud == "plain":
        assert error["error"], sent
    else:
        assert (error["kind"], error["status"], error["code"]) == (
            "Status",
            "Failure",
            reply.status,
        )
        assert error["reason"] in ("BadRequest", "Invalid", "NotFound", "MethodNotAllowed")


def mutations(body: Any) -> Iterator[Any]:
    """Yield copies of the body with one member or item removed, replaced or added."""
    for path in _paths(body):
        for value in _VALUES:
            changed = copy.deepcopy(body)
            _parent(changed, path)[path[-1]] = value
            yield changed
        changed = copy.deepcopy(body)
        del _parent(changed, path)[path[-1]]
        yield changed
        changed = copy.deepcopy(body)
        parent = _parent(changed, path)
        if isinstance(parent, dict):
            parent["unknownMember"] = 1
            yield changed


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from _paths(one, (*path, key))


def _parent(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


@pytest.mark.parametrize("simulator", _LIBRARIES, indirect=True)
def test_valid_requests_are_accepted(simulator: Simulator) -> None:
    cloud, rented = simulator.options.cloud, set()
    for call in CALLS[cloud]:
        prepare(simulator)
        reply = send(simulator, call, msgspec.json.encode(call.body))
        check_answer(cloud, call, reply, b"")
        assert (reply.status >= 400) == call.is_refused, (call, reply)
        run_what_was_accepted(simulator)
        rented |= {machine.state for machine in simulator.datacenter.machines.values()}
    # The other tests would prove little if nothing ran.
    assert rented == {"over"}


@pytest.mark.parametrize("simulator", _LIBRARIES, indirect=True)
def test_malformed_bodies_are_answered_in_the_form_of_the_vendor(simulator: Simulator) -> None:
    cloud = simulator.options.cloud
    for call in CALLS[cloud]:
        for body in _BODIES:
            prepare(simulator)
            check_answer(cloud, call, send(simulator, call, body), body)
            run_what_was_accepted(simulator)


@pytest.mark.parametrize("simulator", _LIBRARIES, indirect=True)
def test_mutated_requests_are_answered_in_the_form_of_the_vendor(simulator: Simulator) -> None:
    cloud = simulator.options.cloud
    for call in CALLS[cloud]:
        for body in mutations(call.body):
            prepare(simulator)
            sent = msgspec.json.encode(body)
            check_answer(cloud, call, send(simulator, call, sent), sent)
            run_what_was_accepted(simulator)
        for name in call.query:
            for text in ("", "x", "-1", "9" * 5000, "\u00b2"):
                changed = call._replace(query={**call.query, name: text})
                prepare(simulator)
                sent = msgspec.json.encode(call.body)
                check_answer(cloud, changed, send(simulator, changed, sent), sent)
                run_what_was_accepted(simulator)


@pytest.mark.parametrize("simulator", ["aws_batch"], indirect=True)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"Action",
        b"Action=x",
        b"Action=GetRole",
        b"Action=SimulatePrincipalPolicy",
        b"Action=SimulatePrincipalPolicy&PolicySourceArn=sim&ActionNames.member.x=a",
        b"Action=DescribeSpotPriceHistory&InstanceType.x=a",
        b"Action=DescribeSpotPriceHistory&NextToken=-1",
        b"Action=DescribeSpotPriceHistory&StartTime=soon",
        b"Action=DescribeSpotPriceHistory&StartTime=2026-13-40T99",
        b"Action=DescribeSpotPriceHistory&MaxResults=x",
        b"Action=DescribeSpotPriceHistory&Unknown=1&InstanceType.1=g5.xlarge",
        b"Action=GetSpotPlacementScores&RegionName.=a",
    ],
)
def test_malformed_forms_are_answered_with_xml(simulator: Simulator, body: bytes) -> None:
    """EC2, IAM and STS of AWS have a protocol of their own."""
    reply = simulator._answer_request(WireRequest("POST", "/", {}, {}, body))
    assert reply.status < 500, reply
    assert reply.body.startswith(b"<")
