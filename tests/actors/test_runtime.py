"""Each in processes of its own: this one may be connected to the tests' Ray already."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def env(tmp_path):
    unset = ("RAY_ADDRESS", "RAY_AUTH_MODE", "PYTHONPATH")
    return {**{k: v for k, v in os.environ.items() if k not in unset}, "HELIOS_HOME": str(tmp_path / "home")}


def _python(code, env, **more):
    code = f"import actors.local_ray as local, actors.runtime as runtime\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], env={**env, **more}, cwd=ROOT, capture_output=True, text=True, timeout=90
    )


def test_our_own_packages_pass(env):
    assert _python("runtime.check_packages()", env).returncode == 0


def test_somebody_elses_package_is_refused_with_its_path(env, tmp_path):
    foreign = tmp_path / "foreign" / "cluster"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(foreign.parent)!r}); runtime.check_packages()"
    assert f"the package 'cluster' is {foreign}, which is not Helios' own" in _python(code, env).stderr


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("None", "no Ray cluster is known here; start one with `helios serve`"),
        ("'127.0.0.1:1'", "Ray is not reachable at 127.0.0.1:1; start it with `helios serve`"),
        ("'nonsense'", "'nonsense' is not the address of a Ray cluster"),
    ],
)
def test_a_cluster_that_cannot_be_reached_is_said_at_once_with_the_remedy(env, address, said):
    assert said in _python(f"runtime.connect_ray({address})", env).stderr


def test_what_listens_and_is_no_ray_is_seen_at_once(env):
    code = (
        "import socket; runtime.PROBE_S = 0.2; s = socket.create_server(('127.0.0.1', 0)); "
        "runtime.connect_ray('127.0.0.1:%d' % s.getsockname()[1])"
    )
    said = _python(code, env).stderr
    assert "Ray is not reachable at 127.0.0.1:" in said
    assert "gcs_client" not in said


@pytest.mark.cluster
def test_our_cluster_outlives_who_started_it_and_ends_when_told(env):
    pid = int(_python("print(local.start_local_ray(num_cpus=1).pid)", env).stdout)
    try:
        again = _python("print(local.start_local_ray().pid)", env)
        assert int(again.stdout) == pid
        joined = _python("import ray; runtime.connect_ray(); print(ray.cluster_resources()['CPU'])", env)
        assert joined.stdout == "1.0\n", joined.stderr
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        listening = {c.laddr.ip for p in tree for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    finally:
        stopped = _python("print(local.stop_local_ray(), local.stop_local_ray())", env)
    assert stopped.stdout == "True False\n"
    assert not [process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
