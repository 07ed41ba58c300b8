"""From what the user asked for to the command line and environment of mpirun or srun."""

from __future__ import annotations

import fnmatch
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from . import machine
from .hosts import Host, is_this_host, place
from .mpi import Launcher
from .pages import ask_for_huge_pages
from .problems import LaunchProblem
from .rank import ADDRESS, NO_INPUT, THREADS, TOKEN

__all__ = [
    "LAUNCHER_VARIABLES",
    "Plan",
    "Request",
    "make_plan",
    "resolve_program",
    "show",
]

_TCP_BYTES = "1100000"
"""A ring's segment of 256 KiB to 1 MiB leaves at once, instead of after a handshake."""
_KEEPALIVE = (
    ("oob_tcp_keepalive_time", "10"),
    ("oob_tcp_keepalive_intvl", "5"),
    ("oob_tcp_keepalive_probes", "3"),
)
"""Open MPI's daemons notice a host that has silently gone within half a minute, as the ranks'
parents do; of themselves they take eight."""
LAUNCHER_VARIABLES = (ADDRESS, TOKEN, THREADS, NO_INPUT)
"""Variables by which ranks find the launcher; no part of a line that a user may copy."""
# What other hosts need to know of this one's environment, where mpirun does not send all of it.
_FORWARDED = (
    "HVDLITE_*",
    "HOROVOD_*",
    "PYTHON*",
    "PATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "OMP_*",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "KERAS_*",
    "TF_*",
    "GLIBC_TUNABLES",
    "THP_MEM_ALLOC_ENABLE",
)
# Who this process is in a job of its own, if it is in one: a job inside must not believe it.
_IDENTITY = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL")
_SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_", "PRTE_MCA_", "PMIX_MCA_")


@dataclass(frozen=True)
class Request:
    """What the user wants to run, and where."""

    command: Sequence[str]
    np: int
    hosts: Sequence[Host] = ()
    """Empty: this machine, or what a resource manager has allocated."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set on all ranks."""
    forward: Sequence[str] = ()
    """Names (or patterns) of variables to forward as well."""
    interfaces: str | None = None
    agent: str | None = None
    """The command that runs something on another host, in place of ssh."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    mpi_arguments: Sequence[str] = ()
    binding: Sequence[str] | None = None
    tcp: bool = False
    working_directory: str | None = None


@dataclass(frozen=True)
class Plan:
    """A command line and the variables to add to the environment."""

    launcher: Launcher
    before: list[str]
    """The launcher and its options."""
    command: list[str]
    variables: dict[str, str]
    """Variables that are set for the launcher and the ranks."""
    base: dict[str, str]
    """The rest of the environment."""
    np: int
    remote: list[str]
    """Hosts other than this one."""
    forwarding: tuple[str, ...] = ()
    """The option by which a launcher that forwards by name takes a name."""

    def arguments(self, wrapper: Sequence[str] = (), extra: Sequence[str] = ()) -> list[str]:
        """Return the command line, with each rank inside a wrapper and more variables sent."""
        names = [word for name in extra for word in (*self.forwarding, name)]
        names = names if self.forwarding else []
        return [*self.before, *names, *wrapper, *self.command]

    def environment(self) -> dict[str, str]:
        """Return the whole environment of the launcher."""
        return {**self.base, **self.variables}


def resolve_program(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a command whose program other hosts can find: by its whole path.

    `python` becomes this interpreter, the one that hvdlite is installed in; a Python file
    that is not executable gets it put in front.

    Raises:
        LaunchProblem: there is no such program.
    """
    program, *arguments = command
    names = ("python", "python3", f"python3.{sys.version_info.minor}")
    if program in names:
        return [sys.executable, *arguments]
    if program.endswith(".py") and os.path.isfile(program) and not os.access(program, os.X_OK):
        return [sys.executable, *command]
    found = _which(program, environ)
    if found is None:
        raise LaunchProblem(f"There is no program {program!r} to run; is it in PATH?")
    return [found, *arguments]


def _which(program: str, environ: Mapping[str, str]) -> str | None:
    import shutil

    found = shutil.which(program, path=environ.get("PATH", ""))
    return None if found is None else os.path.abspath(found)


def make_plan(
    request: Request,
    launcher: Launcher,
    environ: Mapping[str, str] = os.environ,
    *,
    cores: int | None = None,
    is_root: bool | None = None,
) -> Plan:
    """Work out how to start a job.

    Args:
        request: what to run.
        launcher: what to start it by.
        environ: this process's environment.
        cores: cores of this host; found out by default.
        is_root: whether root starts the job; found out by default.

    Raises:
        LaunchProblem: it cannot be started like that.
    """
    cores = machine.cores() if cores is None else cores
    is_root = os.geteuid() == 0 if is_root is None else is_root
    placed = place(request.hosts, request.np) if request.hosts else []
    remote = [host.name for host in placed if not is_this_host(host.name)]
    variables = dict(request.environment)
    in_slurm = "SLURM_JOB_ID" in environ and not placed
    here = max([host.slots for host in placed], default=request.np)
    if not in_slurm and "OMP_NUM_THREADS" not in {**environ, **variables}:
        variables["OMP_NUM_THREADS"] = str(max(cores // here, 1))
        if remote:
            variables[THREADS] = "1"
    variables.update(ask_for_huge_pages({**environ, **variables}))
    makers = {"Open MPI": _open_mpi, "Slurm": _slurm}
    maker = makers.get(launcher.vendor, _hydra)
    make = _Making(request, launcher, environ, placed, remote, variables, here > cores, is_root)
    before = maker(make)
    forwarding: tuple[str, ...] = ()
    if launcher.vendor == "Open MPI":
        forwarding = ("-x",)
        if remote or in_slurm:
            names = _forwarded({**environ, **variables}, request)
            before += [word for name in names for word in ("-x", name)]
    base = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_IDENTITY) or name.startswith(_SETTINGS)
    }
    return Plan(
        launcher, before, list(request.command), variables, base, request.np, remote, forwarding
    )


def _forwarded(environ: Mapping[str, str], request: Request) -> list[str]:
    patterns = [*_FORWARDED, *request.forward, *request.environment]
    return sorted(
        name
        for name in environ
        if name not in LAUNCHER_VARIABLES
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    )


@dataclass(frozen=True)
class _Making:
    request: Request
    launcher: Launcher
    environ: Mapping[str, str]
    placed: Sequence[Host]
    remote: Sequence[str]
    variables: dict[str, str]
    """Filled by the makers."""
    crowded: bool
    """Whether this host gets more ranks than it has cores."""
    is_root: bool

    @property
    def ssh(self) -> list[str]:
        """The command that reaches other hosts, if it is not plain ssh."""
        words = shlex.split(self.request.agent) if self.request.agent else []
        if self.request.ssh_port is not None or self.request.ssh_identity_file is not None:
            words = words or ["ssh"]
        if self.request.ssh_port is not None:
            words += ["-p", str(self.request.ssh_port)]
        if self.request.ssh_identity_file is not None:
            words += ["-i", os.path.abspath(self.request.ssh_identity_file)]
        return words

    def interfaces(self) -> str | None:
        """Return the network to use, None where the library's own choice is as good."""
        if self.request.interfaces is not None:
            return self.request.interfaces
        if not self.remote:
            return None
        found = machine.common_network(self.remote, machine.interfaces())
        return None if found is None else found.network


def _open_mpi(make: _Making) -> list[str]:
    request, launcher, environ = make.request, make.launcher, make.environ
    words = [launcher.path]
    modern = launcher.major >= 5
    if make.is_root:
        # By environment, where tools that parse the command line do not stumble over it.
        make.variables.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        make.variables.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    words += ["-np", str(request.np)]
    if make.placed:
        words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in make.placed)]
    if not make.placed and "SLURM_JOB_ID" not in environ:
        words += ["-H", f"localhost:{request.np}"]
    words += list(request.binding) if request.binding is not None else ["--bind-to", "none"]
    if make.ssh:
        agent = shlex.join(make.ssh)
        words += ["--prtemca" if modern else "--mca"]
        words += ["plm_ssh_agent" if modern else "plm_rsh_agent", agent]

    def mca(name: str, value: str) -> None:
        if f"OMPI_MCA_{name}" not in environ:
            words.extend(["--mca", name, value])

    if request.tcp:
        mca("pml", "ob1")
        mca("btl", "self,sm,tcp" if modern else "self,vader,tcp")
    elif not machine.fabrics():
        # Looking for fabrics takes MPI_Init a second.
        mca("btl", "^ofi")
        mca("mtl", "^ofi")
        mca("osc", "^ucx")
    if make.crowded:
        mca("mpi_yield_when_idle", "1")
    if make.remote:
        network = make.interfaces()
        if network is not None:
            mca("btl_tcp_if_include", network)
            bootstrap = "prte_if_include" if modern else "oob_tcp_if_include"
            words.extend(["--prtemca" if modern else "--mca", bootstrap, network])
        for name in ("btl_tcp_eager_limit", "btl_tcp_rndv_eager_limit", "btl_tcp_max_send_size"):
            mca(name, _TCP_BYTES)
        for name, value in _KEEPALIVE:
            if f"{'PRTE' if modern else 'OMPI'}_MCA_{name}" not in environ:
                words.extend(["--prtemca" if modern else "--mca", name, value])
    if request.working_directory is not None:
        words += ["--wdir", request.working_directory]
    return [*words, *request.mpi_arguments]


def _hydra(make: _Making) -> list[str]:
    """Build for MPICH and Intel MPI, whose starters are both Hydra; they send all variables."""
    request, launcher = make.request, make.launcher
    intel = launcher.vendor == "Intel MPI"
    words = [launcher.path]
    if make.placed:
        counts = [host.slots for host in make.placed]
        names = [host.name for host in make.placed]
        if not intel:
            words += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in make.placed)]
        elif len(set(counts[:-1])) <= 1 and counts[-1] <= counts[0]:
            words += ["-hosts", ",".join(names), "-ppn", str(counts[0])]
        else:
            have = ", ".join(f"{host.name}:{host.slots}" for host in make.placed)
            raise LaunchProblem(
                f"Intel MPI fills every host alike, but the last: {have} cannot be done. Order "
                "the hosts so that only the last takes fewer ranks."
            )
    words += ["-n", str(request.np)]
    if request.binding is not None:
        words += request.binding
    elif intel:
        make.variables.setdefault("I_MPI_PIN", "0")
    else:
        words += ["-bind-to", "none"]
    if make.ssh:
        words += ["-bootstrap" if intel else "-launcher", "ssh"]
        words += ["-bootstrap-exec" if intel else "-launcher-exec", _program(make.ssh[0])]
        if make.ssh[1:]:
            make.variables.setdefault("HYDRA_LAUNCHER_EXTRA_ARGS", shlex.join(make.ssh[1:]))
    if request.tcp:
        make.variables.setdefault("FI_PROVIDER", "tcp")
        if not intel:
            make.variables.setdefault("UCX_TLS", "self,sm,tcp")
    if intel and make.crowded:
        make.variables.setdefault("I_MPI_WAIT_MODE", "1")
    name = make.request.interfaces
    if name is None and make.remote:
        found = machine.common_network(make.remote, machine.interfaces())
        # Only where there is a choice: the option is an interface's name, and other hosts may
        # call theirs otherwise.
        others = [one for one in machine.interfaces() if not one.is_loopback]
        name = found.name if found is not None and len(others) > 1 else None
    if name is not None:
        first = name.partition(",")[0]
        words += ["-iface", first]
        make.variables.setdefault("FI_TCP_IFACE", first)
        if not intel:
            make.variables.setdefault("UCX_NET_DEVICES", name)
    if request.working_directory is not None:
        words += ["-wdir", request.working_directory]
    return [*words, *request.mpi_arguments]


def _program(name: str) -> str:
    return _which(name, os.environ) or name


def _slurm(make: _Making) -> list[str]:
    """Build for srun, whose `version` is the name of the process manager interface to use."""
    request = make.request
    words = [make.launcher.path, f"--mpi={make.launcher.version}", "-n", str(request.np)]
    # One rank's end must not leave the others waiting; srun's default is to let it.
    words += ["--kill-on-bad-exit=1"]
    words += list(request.binding) if request.binding is not None else ["--cpu-bind=none"]
    if make.placed:
        counts = {host.slots for host in make.placed}
        if len(counts) > 1:
            raise LaunchProblem(
                "srun is given equally many ranks on every host; --hosts asks for "
                f"{', '.join(f'{host.name}:{host.slots}' for host in make.placed)}."
            )
        words += ["-w", ",".join(host.name for host in make.placed)]
        words += [f"--ntasks-per-node={counts.pop()}"]
    if request.working_directory is not None:
        words += [f"--chdir={request.working_directory}"]
    return [*words, *request.mpi_arguments]


def show(plan: Plan) -> str:
    """Return the command as one line for a shell, with the variables in front."""
    settings = [
        f"{name}={shlex.quote(value)}"
        for name, value in sorted(plan.variables.items())
        if name not in LAUNCHER_VARIABLES
    ]
    prefix = "env " if settings else ""
    return f"{prefix}{' '.join([*settings, shlex.join(plan.arguments())])}"
