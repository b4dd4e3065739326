"""The files under deploy/ agree with the scripts they start."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trillion_infer.testing.ports import free_port

REPOSITORY = Path(__file__).parents[2]
MANIFESTS = sorted((REPOSITORY / "deploy" / "kubernetes").glob("*.yaml"))


def containers() -> list[dict]:
    found = []

    def walk(node):
        if isinstance(node, dict):
            found.extend(node.get("containers", ()))
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    for path in MANIFESTS:
        walk(list(yaml.safe_load_all(path.read_text())))
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_document_is_a_named_object(path):
    for document in yaml.safe_load_all(path.read_text()):
        assert document["apiVersion"]
        assert document["kind"]
        assert document["metadata"]["name"]


@pytest.mark.parametrize("container", containers(), ids=lambda container: container["name"])
def test_every_flag_of_a_container_exists(container):
    for script, arguments in programs(container["command"][1], container["args"]):
        names = [argument.removeprefix("--").partition("=")[0] for argument in arguments]
        known = subprocess.run([sys.executable, script, "--helpfull"], cwd=REPOSITORY, capture_output=True, text=True)
        missing = [name for name in names if f"--{name}:" not in known.stdout and f"--[no]{name}:" not in known.stdout]
        assert not missing


def programs(script: str, arguments: list[str]) -> list[tuple[str, list[str]]]:
    """A script and its flags, and the script that it is told to run after "--" with those."""
    if "--" not in arguments:
        return [(script, arguments)]
    end = arguments.index("--")
    return [(script, arguments[:end]), (arguments[end + 1], arguments[end + 2 :])]


def test_the_router_s_workers_are_the_pool_s_pods():
    router = next(c for c in containers() if c["name"] == "router")
    pools = [d for p in MANIFESTS for d in yaml.safe_load_all(p.read_text()) if d["kind"] == "LeaderWorkerSet"]
    told = [*router["args"], *re.findall(r"--\S+", (MANIFESTS[0].parent / "pools.yaml").read_text())]
    for pool in pools:
        name, count = pool["metadata"]["name"], pool["spec"]["replicas"]
        urls = ",".join(f"http://{name}-{i}.{name}:8000" for i in range(count))
        assert f"--{name}={urls}" in told


def test_two_processes_start_together_and_run_the_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import jax, sys\nprint('ran', jax.process_count(), sys.argv[1])\n")
    outputs = _launch(2, ["--devices=2", "--", str(program), "--x=1"])
    for i, (status, out, err) in enumerate(outputs):
        assert status == 0, err
        assert f"process {i} of 2: 2 devices, all answered" in out
        assert "ran 2 --x=1" in out


def test_a_missing_device_ends_the_program_with_one_line():
    (status, _, err), *_ = _launch(1, ["--devices=2"])
    assert status == 1
    assert "1 devices answer where --devices=2 are wanted" in err
    assert "Traceback" not in err


def _launch(count: int, arguments: list[str]) -> list[tuple[int, str, str]]:
    port = free_port()
    environment = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    group = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}"]
    processes = [
        subprocess.Popen(
            [sys.executable, "deploy/tpu_pod.py", *group, f"--process_id={i}", *arguments],
            cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        return [(process.wait(120), *process.communicate()) for process in processes]
    finally:
        for process in processes:
            process.kill()
