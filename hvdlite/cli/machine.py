"""Facts about this machine: cores, limits, network interfaces."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Interface", "common_network", "cores", "cpu_quota", "fabrics", "interfaces"]

_SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCGIFFLAGS = 0x8915, 0x891B, 0x8913
_IFF_UP = 1
# Bridges and tunnels of containers and virtual machines: no way to another host, though each
# host has one, often with the same address.
_VIRTUAL = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|tun|tap|kube|lxc|podman)")


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and has an IPv4 address."""

    name: str
    address: str
    network: str
    """In CIDR notation."""

    @property
    def is_loopback(self) -> bool:
        """Whether it leads nowhere but here."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_virtual(self) -> bool:
        """Whether it looks like one that other hosts cannot be reached by."""
        return bool(_VIRTUAL.match(self.name))


def interfaces() -> list[Interface]:
    """Return the interfaces of this host, IPv4 only."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:

        def ask(request: int, name: str) -> bytes:
            return fcntl.ioctl(probe, request, struct.pack("256s", name[:15].encode()))

        for _, name in socket.if_nameindex():
            try:
                (flags,) = struct.unpack_from("H", ask(_SIOCGIFFLAGS, name), 16)
                address = socket.inet_ntoa(ask(_SIOCGIFADDR, name)[20:24])
                mask = socket.inet_ntoa(ask(_SIOCGIFNETMASK, name)[20:24])
            except OSError:
                continue  # no address
            if flags & _IFF_UP:
                network = ipaddress.ip_network(f"{address}/{mask}", strict=False)
                found.append(Interface(name, address, str(network)))
    return found


def common_network(hosts: Iterable[str], ours: Iterable[Interface]) -> Interface | None:
    """Return the interface of this host whose network has all the hosts in it.

    Args:
        hosts: names or addresses of the other hosts.
        ours: interfaces of this host.
    """
    addresses = []
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            return None
        addresses.append({ipaddress.ip_address(entry[4][0]) for entry in found})
    for candidate in ours:
        network = ipaddress.ip_network(candidate.network)
        if candidate.is_loopback:
            continue
        if addresses and all(any(a in network for a in options) for options in addresses):
            return candidate
    return None


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores' worth of time that a container may use; None without a limit."""
    try:
        quota, period = root.joinpath("cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = root.joinpath("cpu/cpu.cfs_quota_us").read_text().strip()
            period = root.joinpath("cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def cores() -> int:
    """Return how many cores ranks on this host can keep busy."""
    mine = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return mine if quota is None else max(1, min(mine, int(quota)))


def fabrics(root: Path = Path("/sys/class")) -> list[str]:
    """Return the devices of fast networks (InfiniBand, Omni-Path, EFA) of this host."""
    return sorted(
        entry.name for kind in ("infiniband", "hfi1", "cxi") for entry in (root / kind).glob("*")
    )
