"""A fleet as one job of Slurm: each host of the file is a node of the allocation, and runs its part with `headwater launch --host`.

A host's part that ends is started again, unless the job ends. Before the time limit, and when the job is cancelled, each part gets
SIGTERM and finishes its requests. The data folder of a host is `data_dir/HOST`: on a shared file system it survives the job, and a
job that is queued again goes on from its log.
"""

import shlex
from typing import Final, NamedTuple

from headwater.engines import registry
from headwater.ops.config.setting import ConfigError
from headwater.ops.launch import hosts
from headwater.ops.launch.fleet_file import FleetFile
from headwater.ops.start import plan

ENDING_S: Final = 60
"""Seconds that a part has to end, beside its drain timeout: engines give back GPUs, the server writes its last messages."""

RESTART_S: Final = 5


class SlurmOptions(NamedTuple):
    """What a job says beside its fleet. `time` is its limit, "" the partition's; `gpus` per node, -1: as many as its workers take.

    `container` is an image for enroot and pyxis, `mounts` what it sees; `more` are further lines of #SBATCH.
    """

    time: str = ""
    partition: str = ""
    account: str = ""
    gpus: int = -1
    container: str = ""
    mounts: str = ""
    more: tuple[str, ...] = ()


def render(fleet: FleetFile, text: str, options: SlurmOptions) -> str:
    """The job's script, which contains the fleet's file `text`. Raises `ConfigError`."""
    if not fleet.hosts:
        raise ConfigError("slurm: the file names no hosts; each node of the job is one: [hosts.a] and so on")
    if options.mounts and not options.container:
        raise ConfigError("--mounts: these are of a container; give --container")
    drain = int(hosts.shared_settings(fleet).drain_timeout)
    names = fleet.host_names
    gpus = options.gpus if options.gpus >= 0 else max(_gpus_on(fleet, name) for name in names)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=headwater-{fleet.namespace}",
        f"#SBATCH --nodes={len(names)}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --signal=B:TERM@{drain + ENDING_S}",
    ]
    lines += [
        f"#SBATCH --{name}={value}"
        for name, value in (
            ("time", options.time),
            ("partition", options.partition),
            ("account", options.account),
            ("gpus-per-node", str(gpus) if gpus else ""),
        )
        if value
    ]
    lines += [f"#SBATCH {option}" for option in options.more]
    container = []
    if options.container:
        container = [f"--container-image={options.container}", "--no-container-mount-home"]
        container += [f"--container-mounts={options.mounts}"] if options.mounts else []
    commands = " ".join(f"[{name}]={shlex.quote(fleet.host(name).command)}" for name in names)
    body = (
        _SCRIPT.replace("@HOSTS@", " ".join(names))
        .replace("@COMMANDS@", commands)
        .replace("@CONTAINER@", " ".join(map(shlex.quote, container)))
        .replace("@RESTART_S@", str(RESTART_S))
        .replace("@GRACE_S@", str(drain + ENDING_S))
        .replace("@FLEET@", "\n".join(f"# {line}".rstrip() for line in text.splitlines()))
    )
    return "\n".join(lines) + "\n" + body


def _gpus_on(fleet: FleetFile, host: str) -> int:
    wanted = hosts.plan_host(fleet, host, remote=True)
    return sum(
        plan.gpus_needed(group)
        for group in (*wanted.engines, *wanted.followers)
        if registry.traits_of(group.worker.engine).loads != "nothing"
    )


_SCRIPT: Final = r"""
# Written by `headwater slurm render`: the fleet's file is at the end of this script.
set -uo pipefail

hosts=(@HOSTS@)
declare -A commands=(@COMMANDS@)
container=(@CONTAINER@)
folder="${SLURM_SUBMIT_DIR:-$PWD}/headwater-${SLURM_JOB_ID}"
mkdir -p "$folder"
fleet="$folder/fleet.toml"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
addresses=()
for i in "${!hosts[@]}"; do
    # The address by which the other nodes reach this one.
    address=$(scontrol show node "${nodes[$i]}" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    addresses+=(--address "${hosts[$i]}=${address:-${nodes[$i]}}")
done

stopping=
# shellcheck disable=SC2317,SC2329  # called by the trap
stop() {
    stopping=yes
    echo "headwater: the job ends: each host finishes its requests"
    touch "$folder/stopping"
    # To the steps, not to this script.
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop TERM INT

# One host's part, started again when it ends by itself.
keep() {
    local host=$1 node=$2
    while true; do
        # shellcheck disable=SC2086  # the command may have arguments
        srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --job-name="headwater-$host" --kill-on-bad-exit=0 \
            ${container[@]+"${container[@]}"} \
            ${commands[$host]} launch "$fleet" --host "$host" "${addresses[@]}" >>"$folder/$host.log" 2>&1
        code=$?
        if [ -e "$folder/stopping" ] || [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then
            return "$code"
        fi
        echo "headwater: $host on $node ended with exit code $code, started again in @RESTART_S@ s"
        sleep @RESTART_S@
    done
}

rm -f "$folder/stopping"
sed -n '/^# ---- fleet.toml$/,$p' "$0" | tail -n +2 | sed 's/^# \{0,1\}//' >"$fleet"
pids=()
for i in "${!hosts[@]}"; do
    keep "${hosts[$i]}" "${nodes[$i]}" &
    pids+=($!)
done
echo "headwater: ${hosts[*]} on ${nodes[*]}; logs in $folder"

code=0
for pid in "${pids[@]}"; do
    # A trap ends `wait` before its process has ended.
    while kill -0 "$pid" 2>/dev/null; do
        wait "$pid"
        ended=$?
        if [ -n "$stopping" ]; then
            deadline=$((SECONDS + @GRACE_S@))
            while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do sleep 1; done
            break
        fi
        [ "$ended" -eq 0 ] || code=$ended
    done
done
[ -n "$stopping" ] && exit 0
exit "$code"

# ---- fleet.toml
@FLEET@
"""
