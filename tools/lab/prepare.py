"""Makes what guests need, once, in the lab's cache: kernels, UCX with verbs, and a root for AArch64 with trio_ucx."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
CACHE = Path(os.environ.get("LAB_CACHE", "~/.cache/trio_ucx_lab")).expanduser()
MIRROR = os.environ.get("LAB_MIRROR", "http://deb.debian.org")
UCX_VERSION = os.environ.get("LAB_UCX_VERSION", "1.22.0")
UCX_RELEASE = f"https://github.com/openucx/ucx/releases/download/v{UCX_VERSION}/ucx-{UCX_VERSION}.tar.gz"
UCX_SOURCE = os.environ.get("LAB_UCX_SOURCE", UCX_RELEASE)
RELEASE, KEYRING = "bookworm", "/usr/share/keyrings/debian-archive-keyring.gpg"
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
#: What the initramfs loads; the kernel finds everything else in the guest's /lib/modules.
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay", "crc32_generic", "crc32c_generic")
# Packages: of this machine; below its files, in two guests; of the root of a guest with AArch64.
HOST = ["mmdebstrap", "kmod", "cpio", "debian-archive-keyring"]
HOST_RDMA = ["gcc", "g++", "make", "pkg-config", "iproute2", "libibverbs-dev", "librdmacm-dev", "ibverbs-providers"]
LAYER = ["nftables", "openssh-server", "openssh-client", "openmpi-bin", "slurm-wlm", "munge"]
ARM_ROOT = ["base-files", "bash", "dash", "mount", "util-linux", "python3", "libstdc++6", "iproute2", "kmod"]


class NotAvailable(Exception):
    """Something that the lab needs is not to be had here."""


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Runs a command, and returns what it prints; raises NotAvailable with its last lines if it fails."""
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    except OSError as error:
        raise NotAvailable(f"{command[0]}: {error}") from error
    if done.returncode:
        text = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise NotAvailable(f"{' '.join(map(str, command[:4]))} ... ended with {done.returncode}:\n{text}")
    return done.stdout


def once(folder: Path, recipe: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder, which is made anew unless it was made by the same recipe."""
    mark = folder.with_name(folder.name + ".made")
    if not mark.exists() or mark.read_text() != recipe:
        print(f"lab: makes {folder}", file=sys.stderr, flush=True)
        mark.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        mark.write_text(recipe)
    return folder


def install(*packages: str) -> None:
    """Installs the packages that this machine lacks."""
    shown = run("sh", "-c", f"dpkg-query -W -f '${{Package}} ${{db:Status-Status}}\n' {' '.join(packages)} || true")
    missing = [package for package in packages if f"{package} installed" not in shown.splitlines()]
    if missing:
        print(f"lab: installs {' '.join(missing)}", file=sys.stderr, flush=True)
        run("apt-get", "update", "-q")
        run("apt-get", "install", "-qy", "--no-install-recommends", *missing, DEBIAN_FRONTEND="noninteractive")


def boot(name: str, processor: str, *packages: str) -> Path:
    """Returns a folder with vmlinuz and an initramfs, and in the folder files the kernel's modules, and packages.

    They are Debian's, with all that they depend on; not configured, as nothing here may be able to run their programs.
    """

    def make(folder: Path) -> None:
        architecture, files, tree = DEBIAN[processor], folder / "files", folder / "initramfs.d"
        options = ["--variant=extract", f"--architectures={architecture}", "--skip=check/qemu", f"--keyring={KEYRING}"]
        options += ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
        options += [f"--include={','.join([f'linux-image-{architecture}', 'busybox-static', *packages])}"]
        run("mmdebstrap", *options, RELEASE, files, f"{MIRROR}/debian")
        [image] = (files / "boot").glob("vmlinuz-*")
        image.rename(folder / "vmlinuz")
        [modules] = (files / "usr/lib/modules").iterdir()
        run("depmod", "-b", files, modules.name)
        for top in ("bin", "dev", "proc", "sys", "modules", "lower", "layer", "over", "new"):
            (tree / top).mkdir(parents=True)
        order: dict[str, None] = {}
        for module in MODULES:
            command = f"modprobe -d {files} -S {modules.name} --show-depends {module} || true"
            for path in re.findall(r"^insmod (\S+)", run("sh", "-c", command), re.MULTILINE):
                shutil.copy(path, tree / "modules")
                order[Path(path).name] = None
        (tree / "order").write_text("".join(f"{file}\n" for file in order))
        shutil.copy(files / "usr/bin/busybox", tree / "bin")
        shutil.copy(HERE / "init", tree)
        (tree / "init").chmod(0o755)
        run("sh", "-c", "find . | cpio -o -H newc --quiet | gzip -1 >../initramfs", cwd=tree)

    return once(CACHE / f"boot-{name}", f"{MODULES} {packages} {(HERE / 'init').read_text()}", make)


def ucx_with_verbs() -> Path:
    """Returns the folder in which UCX with InfiniBand transports is installed."""

    def make(folder: Path) -> None:
        source = CACHE / "ucx-source"
        shutil.rmtree(source, ignore_errors=True)
        (source / "build").mkdir(parents=True)
        address = UCX_SOURCE if "://" in UCX_SOURCE else Path(UCX_SOURCE).resolve().as_uri()
        try:
            with urllib.request.urlopen(address, timeout=60) as reply:
                (source / "tarball").write_bytes(reply.read())
        except OSError as error:
            raise NotAvailable(f"UCX's source: {UCX_SOURCE}: {error}; LAB_UCX_SOURCE may name a file") from error
        run("tar", "-x", "-f", source / "tarball", "--strip-components", "1", "-C", source)
        options = "--with-verbs --with-rdmacm --without-java --without-go --without-cuda --without-rocm --enable-mt"
        configure = f"../contrib/configure-release --prefix={folder} --disable-doxygen-doc {options} CFLAGS='-g -O2'"
        run("sh", "-c", f"{configure} && nice make -s -j{os.cpu_count()} && make -s install", cwd=source / "build")
        shutil.rmtree(source)

    return once(CACHE / f"ucx-{UCX_VERSION}", "1", make)


def add_wheel(root: Path) -> None:
    """Installs the wheel that users of AArch64 get, and what it needs, in the folder /packages of a guest's root."""

    def make(folder: Path) -> None:
        try:
            run(CHECKOUT / "tools/build_wheels.sh", CACHE / "dist", "aarch64", PYTHON=sys.executable)
        except NotAvailable as error:
            raise SystemExit(f"lab: no wheel for AArch64: {error}") from error
        [wheel] = (CACHE / "dist").glob("*.whl")
        options = [f"--platform=manylinux{version}_aarch64" for version in ("2014", "_2_17", "_2_28")]
        options += ["--python-version=3.11", "--only-binary=:all:", f"--target={folder}"]
        run(sys.executable, "-m", "pip", "install", "-q", *options, f"{wheel}[cli,rpc]", "numpy")
        run("sh", "-c", f"{sys.executable} -m compileall -q {root}/usr/lib/python3.11 || true")  # a guest takes long

    paths = sorted([*CHECKOUT.glob("*.*"), *CHECKOUT.glob("trio_ucx/**/*.*")])
    sources = [path.read_bytes() for path in paths if path.suffix in {".py", ".c", ".h", ".toml"}]
    once(root / "packages", hashlib.sha256(b"".join(sources)).hexdigest(), make)
