"""Hosts made of namespaces: each with a network, a name, shared memory and a boot id of its own.

Every host is held by one process, and so is the switch between them. Nothing has a name in the
system and nothing is mounted outside the hosts: when the holders end, all of it is gone. They
end with this process, however it ends, because they read from a pipe that only it writes to; and
they take with them what still runs on their hosts.

Processes of all hosts see each other, as they see the files of this machine; what is tested must
not profit from that, and has no reason to.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["CLUSTER", "Cluster", "why_not"]

CLUSTER = "HVDLITE_TEST_CLUSTER"
"""Variable that tells the launch agent where the list of hosts is."""

AGENT = Path(__file__).with_name("agent")
_NETWORK = "10.99.0"
_TOOLS = ("ip", "tc", "nsenter", "unshare", "hostname", "mount")

_HOLD = """
set -e
hostname "$1"
mount -t tmpfs -o mode=1777 shm /dev/shm
mount --bind "$0/hosts" /etc/hosts
mount --bind "$0/$1.boot_id" /proc/sys/kernel/random/boot_id
ip link set lo up
echo ready
cat
mine=$(readlink /proc/$$/ns/net)
for place in /proc/[0-9]*; do
    pid=${place#/proc/}
    if [ "$pid" != $$ ] && [ "$(readlink "$place/ns/net")" = "$mine" ]; then
        kill -9 "$pid" 2>/dev/null || :
    fi
done
"""


def why_not() -> str | None:
    """Return why this machine cannot have hosts made of namespaces, None if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (packages iproute2, util-linux, hostname)"
    command = ["unshare", "--net", "--uts", "--ipc", "--mount", "--propagation", "private"]
    command += [
        "sh",
        "-c",
        "mount -t tmpfs shm /dev/shm && ip link add name t type veth peer name u",
    ]
    tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if tried.returncode:
        return f"namespaces are not allowed here: {tried.stderr.strip()}"
    return None


class Cluster:
    """Some hosts, host1 to hostN, joined by a switch.

    Args:
        count: how many.
        rate: of each link in both directions, such as "1gbit"; None for no limit.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self.names = [f"host{i + 1}" for i in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="hvdh", dir="/tmp"))
        self._holders: dict[str, subprocess.Popen[str]] = {}
        try:
            self._make()
            if rate is not None:
                self.shape(rate)
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        lines = ["127.0.0.1 localhost"]
        lines += [f"{_NETWORK}.{i + 1} {name}" for i, name in enumerate(self.names)]
        self.folder.joinpath("hosts").write_text("\n".join(lines) + "\n")
        self._hold("switch", ["unshare", "--net", "sh", "-c", "echo ready; exec cat"])
        self.inside("switch", "ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        self.inside("switch", "ip", "link", "set", "br0", "up")
        for i, name in enumerate(self.names):
            self.folder.joinpath(f"{name}.boot_id").write_text(f"{uuid.uuid4()}\n")
            spaces = ["--net", "--uts", "--ipc", "--mount", "--propagation", "private"]
            self._hold(name, ["unshare", *spaces, "sh", "-c", _HOLD, str(self.folder), name])
            peer = ["peer", "name", "eth0", "netns", str(self._holders[name].pid)]
            self.inside("switch", "ip", "link", "add", name, "type", "veth", *peer)
            self.inside("switch", "ip", "link", "set", name, "master", "br0", "up")
            self.inside(name, "ip", "addr", "add", f"{_NETWORK}.{i + 1}/24", "dev", "eth0")
            self.inside(name, "ip", "link", "set", "eth0", "up")
        holders = "".join(f"{name} {self._holders[name].pid}\n" for name in self.names)
        self.folder.joinpath("holders").write_text(holders)

    def _hold(self, name: str, command: Sequence[str]) -> None:
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} could not be made: {' '.join(command)}")

    def shape(self, rate: str) -> None:
        """Limit every link to a rate, in both directions."""
        for name in self.names:
            for place, device in ((name, "eth0"), ("switch", name)):
                limit = ["rate", rate, "burst", "256kb", "limit", "2mb"]
                self.inside(place, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    # -- what goes on there -------------------------------------------------------------

    def enter(self, name: str) -> list[str]:
        """Return the beginning of a command line that runs the rest of it on a host."""
        spaces = ["--net"] if name == "switch" else ["--net", "--uts", "--ipc", "--mount"]
        return ["nsenter", "--target", str(self._holders[name].pid), *spaces]

    def inside(self, name: str, *command: str) -> str:
        """Run a command on a host and return what it prints."""
        done = subprocess.run(
            [*self.enter(name), *command], capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode:
            raise RuntimeError(f"on {name}: {' '.join(command)}: {done.stderr}")
        return done.stdout

    def environment(self) -> Mapping[str, str]:
        """Return what makes any `mpirun` start its daemons on these hosts."""
        return {
            CLUSTER: str(self.folder),
            "PRTE_MCA_plm_ssh_agent": str(AGENT),
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": str(AGENT),
            # Every host would bind its first rank to the same core.
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        }

    def processes(self, name: str) -> Iterator[int]:
        """Find the processes of a host, but for those that hold it."""
        holder = self._holders[name].pid
        network = os.readlink(f"/proc/{holder}/ns/net")
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns" / "net") != network or int(entry.name) == holder:
                    continue
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                if parent != holder:
                    yield int(entry.name)

    def crash(self, name: str, silently: bool = True) -> None:
        """End everything that runs on a host; unless silently, its peers get to know."""
        if silently:
            self.unplug(name)
        self._end_processes(name)

    def unplug(self, name: str) -> None:
        """Cut a host's link."""
        self.inside("switch", "ip", "link", "set", name, "down")

    def plug(self, name: str) -> None:
        """Mend a host's link."""
        self.inside("switch", "ip", "link", "set", name, "up")

    def _end_processes(self, name: str) -> None:
        # Those that are about to be started may be missed at first.
        deadline = time.monotonic() + 5
        while (pids := list(self.processes(name))) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def close(self) -> None:
        """End all processes of the hosts, and the hosts."""
        for name, holder in self._holders.items():
            if holder.poll() is None:
                self._end_processes(name)
            holder.kill()
            holder.wait()
            for pipe in (holder.stdin, holder.stdout):
                if pipe is not None:
                    pipe.close()
        self._holders.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
