"""Carries out the steps of examples/cluster/Dockerfile in a clean Debian, where no builder of images is at hand.

    python scripts/try_image.py [--bind FOLDER]...      as root; Debian: apt-get install debootstrap

``debootstrap`` makes a bookworm, whose Python is that of the image. Both stages are carried out in that one place, which loses its
compiler between them, each step behind mounts of its own; then a short job runs there as the image's user. What pip finds by variables
(``PIP_*``) or in folders it finds there too: ``--bind`` shows a folder of this machine.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCKERFILE = REPOSITORY / "examples" / "cluster" / "Dockerfile"
JOB = "train tiny --run.num_ticks 2 --evaluation.num_prompts 8 --observability.prometheus_port 9400"
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
COMPILER = "gcc,libc6-dev,python3-dev"
"""Of the image that builds, not of the slim one."""
SHOWN = ("/proc", "/dev", "/sys", "/etc/resolv.conf", "/etc/ssl/certs")
"""Of this machine, what a container has too."""


class Image:
    """A root folder, and what the steps so far have set."""

    def __init__(self, root: Path, bind: Sequence[str]) -> None:
        self.root, self.bind = root, bind
        self.variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.variables["PATH"] = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        self.folder, self.user = "/", "root"

    def run(self, command: str) -> None:
        """A line of shell inside, with mounts that nobody else sees."""
        words = ["mount --make-rprivate /"]
        for path in (*SHOWN, *self.bind):
            make = "mkdir -p" if Path(path).is_dir() else "touch"
            words.append(f"{make} {self.root}{path} && mount --rbind {path} {self.root}{path}")
        given = " ".join(shlex.quote(f"{name}={value}") for name, value in self.variables.items())
        inside = f"cd {self.folder} && {command}"
        words.append(f"chroot --userspec={self.user} {self.root} env -i {given} sh -ec {shlex.quote(inside)}")
        subprocess.run(["unshare", "--mount", "sh", "-ec", "\n".join(words)], check=True)

    def step(self, name: str, rest: str) -> None:
        """One of the file."""
        print(f"{name} {rest}", flush=True)
        if name in ("ARG", "ENV"):
            key, _, value = rest.partition("=")
            self.variables[key] = value.replace("$PATH", self.variables["PATH"])
        elif name == "WORKDIR":
            self.folder = rest
            (self.root / rest[1:]).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            self.user = rest
        elif name == "RUN":
            self.run(rest)
        elif name == "COPY" and "--from=" not in rest:
            self._copy([word for word in rest.split() if not word.startswith("--")], executable="--chmod=755" in rest)
        elif name == "FROM" and "slim" in rest:
            self.run(f"apt-get purge -qq -y --auto-remove {COMPILER.replace(',', ' ')}")
        elif name not in ("FROM", "COPY"):
            raise SystemExit(f"what does {name} do? {__file__} does not know")

    def _copy(self, paths: Sequence[str], *, executable: bool) -> None:
        *sources, to = paths
        target = self.root / os.path.join(self.folder, to)[1:]
        for source in sources:
            if (REPOSITORY / source).is_dir():
                shutil.copytree(REPOSITORY / source, target, dirs_exist_ok=True)
                continue
            copied = Path(shutil.copy(REPOSITORY / source, target))
            copied.chmod(0o755 if executable else 0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bind", metavar="FOLDER", action="append", default=[])
    args = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise SystemExit("needs root and debootstrap (Debian: apt-get install debootstrap)")
    with tempfile.TemporaryDirectory(prefix="llamarl-image-", dir="/var/tmp") as folder:
        root = Path(folder, "root")
        words = ["--variant=minbase", f"--include={PACKAGES},{COMPILER}", "bookworm"]
        subprocess.run(["debootstrap", *words, str(root)], check=True, stdout=subprocess.DEVNULL)
        image = Image(root, args.bind)
        for line in DOCKERFILE.read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(" ")
            if rest and not name.startswith("#"):
                image.step(name, rest)
        image.run(f"export HOME=/home/llamarl && begin_or_resume runs/tiny {JOB.removeprefix('train ')}")
    print("the image's steps run in a clean Debian, and a job as its user")


if __name__ == "__main__":
    main()
