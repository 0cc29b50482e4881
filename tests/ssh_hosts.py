"""Namespace hosts with a real sshd each, and a user whose ssh knows them as a, b, c: keys, known hosts and homes lie in one folder.

Nothing is read from or written to the true home folder: a copy of /etc/passwd with another home stands in its place, for the
hosts and for the user's commands alone.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from namespace_hosts import NamespaceHost, bare_hosts

__all__ = ["PROGRAMS", "SshHosts", "ssh_hosts"]

PROGRAMS = ("ssh", "sshd", "ssh-keygen")
_NET = "10.89.0"
_BARE_PORT = 2222
_BIN = Path(sys.prefix) / "bin"


@dataclass
class SshHosts:
    """Their names are a, b, c, ...; "a-bare" is host a with no llamarl on the PATH; "nobody" an address that no host has; "a-refused"
    host a with a key that it does not take; "a-unknown" host a, whose host key is not known."""

    hosts: list[NamespaceHost]
    home: Path
    passwd: Path

    def as_user(self, command: Sequence[str]) -> list[str]:
        """``command`` as the user of those names runs it; its process is the command's own."""
        inside = 'mount --bind "$1" /etc/passwd; export HOME="$2" PATH="$3:$PATH"; shift 3; exec "$@"'
        return ["unshare", "--mount", "bash", "-ec", inside, "-", str(self.passwd), str(self.home), str(_BIN), *command]


@contextmanager
def ssh_hosts(folder: Path, count: int) -> Iterator[SshHosts]:
    """``count`` hosts to log in to; nothing of them is left afterwards.

    Args:
        folder: Empty, and the same folder on every host: not below /tmp, which is each host's own.
    """
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    for name in ("login", "other", "host"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    there, user = folder / "passwd-there", folder / "passwd-user"
    there.write_text(f"root:x:0:0:root:/tmp:/bin/bash\n{_others()}")
    user.write_text(f"root:x:0:0:root:{home}:/bin/bash\n{_others()}")
    conf = folder / "sshd_config"
    conf.write_text(_server(folder))
    names = "abcdefgh"[:count]
    addresses = {name: f"{_NET}.{number}" for number, name in enumerate(names, 1)}
    public = " ".join((folder / "host.pub").read_text().split()[:2])
    (home / ".ssh" / "known_hosts").write_text(
        "".join(
            f"{place} {public}\n" for address in addresses.values() for place in (address, f"[{address}]:{_BARE_PORT}")
        )
    )
    (home / ".ssh" / "config").write_text(_client(folder, addresses))
    before = f"mount --bind {there} /etc/passwd; mount -t tmpfs tmpfs /run; mkdir /run/sshd"
    with bare_hosts(count, lambda *_: ["/usr/sbin/sshd", "-D", "-e", "-f", str(conf)], _NET, before=before) as hosts:
        yield SshHosts(hosts, home, user)


def _others() -> str:
    return "".join(line for line in Path("/etc/passwd").read_text().splitlines(True) if not line.startswith("root:"))


def _server(folder: Path) -> str:
    return f"""\
Port 22
Port {_BARE_PORT}
HostKey {folder}/host
AuthorizedKeysFile {folder}/login.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
LogLevel ERROR
Match LocalPort 22
    SetEnv PATH={_BIN}:/usr/local/bin:/usr/bin:/bin
"""


def _client(folder: Path, addresses: dict[str, str]) -> str:
    blocks = [f"Host {name}\n  HostName {address}\n" for name, address in addresses.items()]
    first = addresses["a"]
    blocks += [
        f"Host a-bare\n  HostName {first}\n  Port {_BARE_PORT}\n",
        f"Host a-refused\n  HostName {first}\n  IdentityFile {folder}/other\n",
        f"Host a-unknown\n  HostName {first}\n  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n",
        f"Host nobody\n  HostName {_NET}.99\n",
        f"Host * !a-refused\n  IdentityFile {folder}/login\n",
        "Host *\n  IdentitiesOnly yes\n",
    ]
    return "".join(blocks)
