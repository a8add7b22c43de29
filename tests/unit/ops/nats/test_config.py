"""`headwater nats-config`: files, keys and what a real nats-server says to them."""

import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from headwater.events.jetstream import Credentials
from headwater.events.ports import AccessDenied
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.config import (
    READERS,
    Wanted,
    credentials,
    kubernetes_secret,
    make,
    new_seed,
    public_key,
    reader_kind,
    users,
    write,
    write_kubernetes,
)
from headwater.ops.nats.server import binary
from headwater.schemas.permissions import KINDS


def accepted(folder: Path, file: str) -> None:
    """The server itself reads it without complaint."""
    run = subprocess.run([binary(), "-t", "-c", str(folder / file)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_keys_are_files_of_their_owner_and_the_server_gets_public_halves(tmp_path: Path) -> None:
    """Mode 0600 for everything; no seed in the configuration."""
    names = write(Wanted("default", store=str(tmp_path / "js")), tmp_path)
    assert set(names) == {"nats.conf"} | {f"{kind}{end}" for kind in KINDS for end in (".nk", ".env")}
    for name in names:
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name
    configuration = (tmp_path / "nats.conf").read_text()
    for kind in KINDS:
        seed = (tmp_path / f"{kind}.nk").read_text().strip()
        assert seed.startswith("SU")
        assert seed not in configuration
        assert f'"{public_key(seed)}"' in configuration
    accepted(tmp_path, "nats.conf")


def test_made_again_it_keeps_the_keys(tmp_path: Path) -> None:
    """A pool more is no reason to hand out keys anew; a lost key alone is made anew."""
    write(Wanted("default"), tmp_path)
    before = {kind: (tmp_path / f"{kind}.nk").read_text() for kind in KINDS}
    (tmp_path / "edge.nk").unlink()
    write(Wanted("default", pools=("p",)), tmp_path)
    after = {kind: (tmp_path / f"{kind}.nk").read_text() for kind in KINDS}
    assert {kind for kind in KINDS if before[kind] != after[kind]} == {"edge"}
    assert "HW_default_POOL_p" in (tmp_path / "nats.conf").read_text()


def test_a_secret_for_kubernetes_has_all_keys_and_what_they_permit(tmp_path: Path) -> None:
    """Its part of a server's configuration is one that the server reads; made again, it is the same."""
    names = write_kubernetes(Wanted("chat"), "headwater-nats", tmp_path)
    assert set(names) == {"cluster.password", "secret.yaml", *(f"{kind}.nk" for kind in KINDS)}
    manifest = (tmp_path / "secret.yaml").read_text()
    document = yaml.safe_load(manifest)
    assert (document["kind"], document["metadata"]) == ("Secret", {"name": "headwater-nats"})
    data = document["stringData"]
    for kind in KINDS:
        assert data[f"{kind}.nk"] == (tmp_path / f"{kind}.nk").read_text().strip()
        assert public_key(data[f"{kind}.nk"]) in data["users.conf"]
    assert "hw.chat." in data["users.conf"]
    assert "hw.default." not in data["users.conf"]
    (tmp_path / "users.conf").write_text(data["users.conf"])
    (tmp_path / "nats.conf").write_text('include "users.conf"\n')
    accepted(tmp_path, "nats.conf")
    write_kubernetes(Wanted("chat"), "headwater-nats", tmp_path)
    assert (tmp_path / "secret.yaml").read_text() == manifest
    assert stat.S_IMODE((tmp_path / "secret.yaml").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted("n", servers=3), "--servers has no effect with --kubernetes"),
        (Wanted("n", auth="password"), "--auth has no effect"),
        (Wanted("n", tls_ca="ca.pem"), "--tls-cert, --tls-ca has no effect"),
        (Wanted("n", hosts=("h",)), "--hosts has no effect"),
    ],
)
def test_what_the_chart_says_itself_is_refused(wanted: Wanted, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kubernetes_secret(wanted, "name", {})
    with pytest.raises(ConfigError, match="--kubernetes Name: a Secret's name"):
        kubernetes_secret(Wanted("n"), "Name", {})


def test_named_actors_have_users_instead_of_their_kind() -> None:
    """Else the kind's key would still open everything."""
    made = users(("worker:a", "worker:b", "worker:a"))
    assert [user.label for user in made] == [
        "edge",
        "router",
        "shadow",
        "operator",
        "admin",
        "console",
        "tracer",
        "picker",
        "observer",
        "worker.a",
        "worker.b",
    ]
    for bad in ("worker", "worker:", "wrkr:a", ":a"):
        with pytest.raises(ConfigError, match="KIND:NAME"):
            users((bad,))
    with pytest.raises(ConfigError, match="is not a valid name"):
        make(Wanted("default", actors=("worker:a.b",)), {})


@pytest.mark.parametrize("auth", ["nkey", "password", "none"])
def test_three_servers_know_each_other(tmp_path: Path, auth: str) -> None:
    """One file each, with its own store and port, and streams kept three times."""
    wanted = Wanted("default", auth=auth, servers=3, store=str(tmp_path / "js"))  # type: ignore[arg-type]
    names = write(wanted, tmp_path)
    files = [name for name in names if name.endswith(".conf")]
    assert files == ["nats-1.conf", "nats-2.conf", "nats-3.conf"]
    for number, file in enumerate(files):
        text = (tmp_path / file).read_text()
        assert f'listen: "127.0.0.1:{4222 + number}"' in text
        assert text.count("@127.0.0.1:62") == 3
        # Other servers are asked more often than clients whether they are still there.
        assert '"ping_interval": "2s"' in text
        assert 'ping_interval: "10s"' in text
        assert f"js/headwater-{number + 1}" in text
        accepted(tmp_path, file)
    if auth != "none":
        assert "HEADWATER_REPLICAS=3" in (tmp_path / "worker.env").read_text()
    hosts = make(wanted._replace(hosts=("a", "b", "c")), {}).configurations["nats-2.conf"]
    assert 'listen: "b:4222"' in hosts


@pytest.mark.parametrize(
    ("wanted", "flag"),
    [
        (Wanted("default", tls_cert="c.pem"), "--tls-key"),
        (Wanted("default", tls_verify=True), "--tls-ca"),
        (Wanted("default", servers=3, hosts=("a", "b")), "--hosts"),
        (Wanted("a.b"), "namespace"),
        (Wanted("a", sites=("a",)), "--site a"),
        (Wanted("a", sites=("b",), hub=("h:1",)), "--site and --hub"),
        (Wanted("a", hub=("h",)), "--hub h"),
        (Wanted("a", hub=("h:1",)), "leaf.password"),
    ],
)
def test_what_does_not_fit_is_told_by_its_flag(wanted: Wanted, flag: str) -> None:
    """In one line."""
    with pytest.raises(ConfigError, match=flag):
        make(wanted, {})


@pytest.mark.parametrize("servers", [1, 3])
def test_a_hub_and_a_site_have_domains_and_one_password(tmp_path: Path, servers: int) -> None:
    """What streams take does not pass between them, and readers at the hub may read its sites' copies."""
    hub, site = tmp_path / "hub", tmp_path / "site-a"
    write(Wanted("hub", servers=servers, store=str(tmp_path / "h"), sites=("site-a",)), hub)
    site.mkdir()
    (site / "leaf.password").write_text((hub / "leaf.password").read_text())
    write(Wanted("site-a", store=str(tmp_path / "s"), hub=("127.0.0.1:7422", "127.0.0.1:7423")), site)
    password = (hub / "leaf.password").read_text().strip()
    for number, file in enumerate(sorted(hub.glob("*.conf"))):
        text = file.read_text()
        assert '"domain": "hub"' in text
        assert f'"listen": "127.0.0.1:{7422 + number}"' in text
        assert password in text
        # The operator, the console, the tracer and the observer.
        assert text.count('"_INBOX_site-a_') >= len(READERS)
        assert text.count('"$JS.site-a.API.>"') == 1
        accepted(hub, file.name)
    text = (site / "nats.conf").read_text()
    assert '"domain": "site-a"' in text
    assert f"nats-leaf://leaf:{password}@127.0.0.1:7423" in text
    assert text.count('"hw.*.pool.>"') == 2
    accepted(site, "nats.conf")


def test_each_process_takes_its_own_key_from_the_folder(tmp_path: Path) -> None:
    """By its name if there is such a key, else by its kind; and a missing one is told."""
    write(Wanted("default", actors=("worker:a",)), tmp_path)
    settings = NatsSettings(keys_dir=str(tmp_path))
    assert credentials(settings, "edge", "e1").nkey_file == str(tmp_path / "edge.nk")
    assert credentials(settings, "worker", "a").nkey_file == str(tmp_path / "worker.a.nk")
    with pytest.raises(ConfigError, match=r"worker\.b\.nk nor worker\.nk"):
        credentials(settings, "worker", "b")
    other = NatsSettings(keys_dir=str(tmp_path), nkey_file="mine.nk")
    assert credentials(other, "edge", "e1").nkey_file == "mine.nk"


def test_who_has_only_an_observers_key_looks_as_an_observer(tmp_path: Path) -> None:
    """The same commands, with another inbox."""
    assert reader_kind(NatsSettings()) == "operator"
    assert reader_kind(NatsSettings("nats://observer:pw@h:1")) == "observer"
    write(Wanted("default"), tmp_path)
    assert reader_kind(NatsSettings(keys_dir=str(tmp_path))) == "operator"
    (tmp_path / "operator.nk").unlink()
    assert reader_kind(NatsSettings(keys_dir=str(tmp_path))) == "observer"


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("nkey_file", None, "No such file"),
        ("nkey_file", "hello", "contains no nkey seed"),
        ("nkey_file", "", "contains no nkey seed"),
        ("nkey_file", "ünïcode", "contains no nkey seed"),
        ("creds_file", None, "No such file"),
        ("creds_file", "hello", "BEGIN NATS USER JWT"),
        ("creds_file", "-----BEGIN NATS USER JWT-----\nx\n", "BEGIN USER NKEY SEED"),
        ("tls_ca", None, "No such file"),
        ("tls_ca", "hello", "no certificate in PEM"),
        ("tls_cert", "hello", "belong together"),
    ],
)
def test_a_file_that_can_not_be_used_is_told_with_its_flag(
    tmp_path: Path, field: str, text: str | None, words: str
) -> None:
    """Before anything is connected: which flag, which file, what is wrong."""
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    with pytest.raises(AccessDenied, match=words) as caught:
        Credentials(**{field: str(path)}).options("nats://127.0.0.1:4222")  # type: ignore[arg-type]
    assert f"--nats-{field.replace('_', '-')}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_identities_are_one_too_many(tmp_path: Path) -> None:
    """Which of them is meant is not guessed."""
    with pytest.raises(AccessDenied, match="set one"):
        Credentials(nkey_file="a", creds_file="b").options("")


def test_a_creds_file_and_a_seed_are_taken_as_they_are(tmp_path: Path) -> None:
    """As `nsc` and `nk` write them."""
    seed = tmp_path / "a.nk"
    seed.write_text(new_seed() + "\n")
    assert Credentials(nkey_file=str(seed)).options("") == {"nkeys_seed": str(seed)}
    creds = tmp_path / "a.creds"
    creds.write_text(
        "-----BEGIN NATS USER JWT-----\nx.y.z\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{new_seed()}\n------END USER NKEY SEED------\n"
    )
    assert Credentials(creds_file=str(creds)).options("") == {"user_credentials": str(creds)}
