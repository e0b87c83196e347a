"""The watch of EndpointSlices against a real kube-apiserver with etcd, with the rights that the chart gives."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway import tasks
from gateway.config import ReplicaSettings
from gateway.replicas import kubernetes
from gateway.replicas.kubernetes import ServiceWatch
from tests.fakes.certificates import certificate
from tests.fakes.kubernetes_api import NAMESPACE, SERVICE, endpoint_slice, pod
from tests.fakes.ports import free_ports
from tests.fakes.waiting import until

BINARIES = Path.home() / ".cache/kvasir/kubernetes"
GROUP = "discovery.k8s.io/v1beta1"  # what Kubernetes 1.20 has of it, with the same fields
SLICES = f"/apis/{GROUP}/namespaces/{NAMESPACE}/endpointslices"
ACCOUNTS, ACCOUNT = "/api/v1/namespaces/prod/serviceaccounts", {"metadata": {"name": "kvasir"}}
ROLES = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
START_S = 120.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (BINARIES / "kube-apiserver").is_file(),
        reason="there is no kube-apiserver: .ci/kube-apiserver.sh builds it",
    ),
]


class Cluster:
    """etcd, and an API server that a test stops and starts. `account` is what a pod of `kvasir` has."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.folder, self.session = folder, session
        self.account = folder / "account"
        self.account.mkdir()
        self.pem = certificate(folder)
        (self.account / "ca.crt").write_text(self.pem.read_text().partition("-----END PRIVATE KEY-----\n")[2])
        (folder / "tokens.csv").write_text('admin-token,admin,1,"system:masters"\n')
        client, peer, port = free_ports(3)
        self.etcd_url, self.url = f"http://127.0.0.1:{client}", f"https://127.0.0.1:{port}"
        peers = f"http://127.0.0.1:{peer}"
        self.etcd = self._start(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={self.etcd_url}",
            f"--advertise-client-urls={self.etcd_url}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--unsafe-no-fsync",
        )
        self.start()

    def start(self) -> None:
        self.api = self._start(
            "kube-apiserver",
            f"--etcd-servers={self.etcd_url}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.url.rpartition(':')[2]}",
            "--insecure-port=0",
            f"--tls-cert-file={self.pem}",
            f"--tls-private-key-file={self.pem}",
            f"--service-account-key-file={self.pem}",
            f"--service-account-signing-key-file={self.pem}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--service-cluster-ip-range=10.0.0.0/24",
        )

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([BINARIES / name, *arguments], cwd=self.folder, stdout=log, stderr=log)

    def kill(self) -> None:
        self.api.kill()
        self.api.wait()

    async def ask(self, method: str, path: str, body: Any = None, token: str = "admin-token") -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.session.request(method, self.url + path, json=body, headers=headers, ssl=False) as answer:
            assert answer.status < 300, await answer.text()
            return await answer.json()

    async def ready(self) -> None:
        async def answers() -> bool:
            try:
                return bool(await self.ask("GET", "/version"))
            except (aiohttp.ClientError, AssertionError):
                return False

        await until(answers, START_S)

    async def rotate(self) -> None:
        """The account anew, so that its token is no longer one, and a new token in the folder."""
        if (self.account / "token").exists():
            await self.ask("DELETE", f"{ACCOUNTS}/kvasir")
        await self.ask("POST", ACCOUNTS, ACCOUNT)
        made = await self.ask("POST", f"{ACCOUNTS}/kvasir/token", {"spec": {"expirationSeconds": 600}})
        (self.account / "token").write_text(made["status"]["token"])


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """With the namespaces, the account and its role."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        found = Cluster(folder, session)
        for process in ("etcd", "api"):
            stack.callback(lambda name=process: (getattr(found, name).kill(), getattr(found, name).wait()))
        await found.ready()
        for name in ("prod", NAMESPACE):
            await found.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        for path, one in rights().items():
            await found.ask("POST", f"{ROLES}/{path}", one)
        await found.rotate()
        yield found


def rights() -> dict[str, Any]:
    """The Role and RoleBinding of the chart, by resource."""
    helm = Path(__file__).parents[3] / ".clients/kubernetes/bin/helm"
    if not helm.is_file():
        pytest.skip("there is no helm, which renders the rights: .ci/kubernetes.sh installs it")
    values = {"redis": {"url": "redis://r"}, "discovery": {"enabled": True, "namespaces": [NAMESPACE]}}
    chart = Path(__file__).parents[3] / "deploy/helm/kvasir"
    command = [
        helm,
        "template",
        "kvasir",
        chart,
        "--namespace=prod",
        "--values=-",
        "--show-only=templates/account.yaml",
    ]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True)
    import yaml

    objects = [one for one in yaml.safe_load_all(done.stdout) if one["metadata"].get("namespace") == NAMESPACE]
    return {f"{one['kind'].lower()}s": one for one in objects}


def watched(found: Cluster, namespace: str = NAMESPACE) -> ServiceWatch:
    entry = {"name": "qwen", "kind": "vllm", "url": f"k8s://{namespace}/{SERVICE}:http"}
    return ServiceWatch(ReplicaSettings.model_validate(entry), found.url, found.account, GROUP)


async def test_the_watch_follows_a_real_api_server_through_restarts_and_new_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lists: list[str] = []
    list_all = ServiceWatch._list

    async def listed(watch: ServiceWatch, session: aiohttp.ClientSession) -> None:
        await list_all(watch, session)
        lists.append(watch.url)

    monkeypatch.setattr(ServiceWatch, "_list", listed)
    monkeypatch.setattr(kubernetes, "LONGEST_RETRY_S", 0.5)
    async with cluster(tmp_path) as found:
        watch, other = watched(found), watched(found, "prod")
        running = [tasks.spawn(one.run(), name="watch") for one in (watch, other)]

        def serving() -> set[str]:
            return {name for name, change in watch.pods.changes().items() if not change.draining}

        try:
            # 1. Listed, and followed.
            await found.ask("POST", SLICES, endpoint_slice("a", pod("vllm-0", "10.0.0.1")))
            await until(lambda: serving() == {"qwen.vllm-0"})
            await found.ask("POST", SLICES, endpoint_slice("b", pod("vllm-1", "10.0.0.2")))
            await until(lambda: serving() == {"qwen.vllm-0", "qwen.vllm-1"})
            await found.ask("PUT", f"{SLICES}/a", endpoint_slice("a", pod("vllm-0", "10.0.0.1", ready=False)))
            await until(lambda: serving() == {"qwen.vllm-1"})
            # 2. The API server dies and is there again: it has forgotten the version, and does not know the token.
            old, before = (found.account / "token").read_text(), len(lists)
            await found.rotate()
            found.kill()
            assert serving() == {"qwen.vllm-1"}
            found.start()
            await found.ready()
            with pytest.raises(AssertionError, match="Unauthorized"):
                await found.ask("GET", SLICES, token=old)
            await found.ask("DELETE", f"{SLICES}/b")
            await found.ask("PUT", f"{SLICES}/a", endpoint_slice("a", pod("vllm-2", "10.0.0.3")))
            await until(lambda: serving() == {"qwen.vllm-2"})
            assert len(lists) > before
            # 3. The role holds in its namespace alone.
            assert "k8s://prod/vllm:http cannot be watched: the API server answers 403" in caplog.text
        finally:
            for task in running:
                await tasks.cancel(task)
