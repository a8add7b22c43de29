"""Commands that run a fleet from its file, and write it for other supervisors: Slurm, systemd, Docker Compose, Kubernetes."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from headwater import __version__
from headwater.ops.config.command import command, group
from headwater.ops.config.setting import ConfigError, Flag


@command
def launch(
    file: Annotated[str, Flag("FILE"), Meta(description="the fleet's file, TOML")] = "",
    /,
    *,
    host: Annotated[
        str,
        Meta(
            description="run this host's part, here (default: the whole fleet, over ssh where hosts are named)"
        ),
    ] = "",
    addresses: Annotated[
        tuple[str, ...],
        Flag("address"),
        Meta(
            description="NAME=ADDRESS, the address of a host in place of the file's, with --host; repeatable"
        ),
    ] = (),
    stdin: Annotated[
        bool,
        Meta(
            description="read the file from standard input, whose end stops the processes: for ssh, with --host"
        ),
    ] = False,
    show: Annotated[bool, Meta(description="print the processes of each host, and start nothing")] = False,
) -> int:
    """Run the fleet that a file describes: on this machine, or each host's part on the host over ssh.

    The guide "Fleets from a file" has the file's keys.
    """
    from headwater.ops.commands import application
    from headwater.ops.launch import run
    from headwater.ops.launch.fleet_file import read_fleet, with_addresses

    if show:
        print(run.describe(with_addresses(read_fleet(Path(file)), addresses)))
        return 0
    return run.launch(file, host, addresses, from_stdin=stdin, main=application.main)


Fleet = Annotated[str, Flag("FILE"), Meta(description="the fleet's file, TOML")]


@command
def render_slurm(
    file: Fleet,
    /,
    *,
    time: Annotated[str, Meta(description="time limit of the job (default: the partition's)")] = "",
    partition: Annotated[str, Meta(description="partition")] = "",
    account: Annotated[str, Meta(description="account that is charged")] = "",
    gpus: Annotated[
        int, Meta(ge=-1, description="GPUs of each node; -1: as many as the workers of one take, 0: none")
    ] = -1,
    container: Annotated[str, Meta(description="image that the processes run in, by enroot and pyxis")] = "",
    mounts: Annotated[str, Meta(description="folders that the container sees: FROM:TO,…")] = "",
    more: Annotated[
        tuple[str, ...], Flag("sbatch"), Meta(description="a further line of #SBATCH; repeatable")
    ] = (),
) -> int:
    """Print the job's script: `headwater slurm render fleet.toml > job.sh; sbatch job.sh`."""
    from headwater.ops.launch import slurm
    from headwater.ops.launch.fleet_file import read_fleet

    fleet = read_fleet(Path(file))
    options = slurm.SlurmOptions(time, partition, account, gpus, container, mounts, more)
    print(slurm.render(fleet, Path(file).read_bytes().decode("utf-8-sig"), options), end="")
    return 0


@command
def render_systemd(
    file: Fleet,
    /,
    *,
    out: Annotated[str, Meta(description="folder to write etc/… below; / installs")],
    host: Annotated[str, Meta(description="the host whose units to write (default: the only one)")] = "",
    program: Annotated[
        str, Meta(description="the program on that host, an absolute path")
    ] = "/usr/local/bin/headwater",
) -> int:
    """Write a host's units and configuration files."""
    from headwater.ops.launch import systemd
    from headwater.ops.launch.fleet_file import LOCAL, read_fleet

    fleet = read_fleet(Path(file))
    if fleet.hosts and not host:
        raise ConfigError(f"--host: the file has the hosts {', '.join(fleet.host_names)}; name one")
    if not program.startswith("/"):
        raise ConfigError(f"--program {program}: systemd needs an absolute path")
    for name, text in systemd.render(fleet, host or LOCAL, command=program).items():
        path = Path(out) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)
    return 0


@command
def render_compose(
    file: Fleet,
    /,
    *,
    registry: Annotated[
        str,
        Meta(
            description="where the images are: what precedes /headwater in their names (default: this machine)"
        ),
    ] = "",
    tag: Annotated[str, Meta(description="tag of the images")] = __version__,
) -> int:
    """Print a Compose file: `headwater compose render fleet.toml > compose.yaml; docker compose up`."""
    from headwater.ops.launch import compose
    from headwater.ops.launch.fleet_file import read_fleet

    print(compose.render(read_fleet(Path(file)), registry=registry, tag=tag), end="")
    return 0


@command
def render_kubernetes(file: Fleet, /) -> int:
    """Print values of the Helm chart: `headwater kubernetes render fleet.toml > values.yaml; helm install … -f values.yaml`."""
    from headwater.ops.launch import kubernetes
    from headwater.ops.launch.fleet_file import read_fleet

    print(kubernetes.render(read_fleet(Path(file))), end="")
    return 0


slurm = group("slurm", None, render=render_slurm)
systemd = group("systemd", None, render=render_systemd)
compose = group("compose", None, render=render_compose)
kubernetes = group("kubernetes", None, render=render_kubernetes)
