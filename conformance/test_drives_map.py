"""`drives map`: what the system says of drives, read right, and what the command makes of it."""

from __future__ import annotations

import os
import plistlib
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commandline import Command
from test_devices import contents, durable
from test_drives_run import rewrite

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.manifest import COPY_NAME, Manifest, digest, manifest_path
from runtime.commands import map as command
from runtime.drives import hardware, identity, real
from runtime.drives.hardware import Disk, look_at
from runtime.drives.identity import UNKNOWN, identify, same_device
from runtime.drives.mounts import Mount, drives_among, mounts, parse_mount, parse_mountinfo
from runtime.drives.remembered import Known, Remembered, key_of

MOUNTINFO = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,discard,errors=remount-ro
28 27 259:1 / /boot/efi rw - vfat /dev/nvme0n1p1 rw,utf8
30 27 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw
31 27 0:45 /@home /home rw,noatime master:3 - btrfs /dev/mapper/crypt rw,compress=zstd:3
32 27 0:45 /@ /mnt/whole rw - btrfs /dev/mapper/crypt rw
33 27 0:50 / /tank/models ro,noatime - zfs tank/models ro,xattr
34 27 8:17 / /mnt/with\040blank\134and\303\251 rw - xfs /dev/sdb1 rw
35 27 7:3 / /snap/core/1 ro - squashfs /dev/loop3 ro
36 27 0:60 / /mnt/net rw - nfs4 server:/export rw,vers=4.2
37 27 0:61 / /dev/shm rw - tmpfs tmpfs rw
38 27 0:62 / /mnt/usb rw - fuseblk /dev/sdc1 rw
39 27 259:2 /etc/hosts /etc/hosts rw - ext4 /dev/nvme0n1p2 rw
40 27 0:63 / /var/lib/docker/merged rw - overlay overlay rw,lowerdir=/l,upperdir=/u
not a line at all
41 27 nonsense / /x rw - ext4 /dev/sdz rw
"""

MOUNT = """/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)
devfs on /dev (devfs, local, nobrowse)
/dev/disk3s6 on /System/Volumes/VM (apfs, local, noexec, journaled, noatime, nobrowse)
/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled, nobrowse, protect, root data)
map auto_home on /System/Volumes/Data/home (autofs, automounted, nobrowse)
/dev/disk7s1 on /Volumes/K3 on (blue) (apfs, local, nodev, nosuid, journaled, noowners)
//me@server/share on /Volumes/share (smbfs, nodev, nosuid, mounted by me)
this is no mount
"""


def test_mountinfo_is_read() -> None:
    found = {mount.point: mount for mount in parse_mountinfo(MOUNTINFO)}
    assert len(found) == 14
    assert found["/"] == Mount(
        "/", "ext4", "/dev/nvme0n1p2", ("rw", "relatime", "discard", "errors=remount-ro"), (259, 2), "/"
    )
    assert found["/home"].root == "/@home"
    assert "compress=zstd:3" in found["/home"].options
    assert found["/mnt/with blank\\andé"].source == "/dev/sdb1"


def test_of_what_is_mounted_the_drives_are_shown_once_each() -> None:
    assert [mount.point for mount in drives_among(list(parse_mountinfo(MOUNTINFO)))] == [
        *("/", "/mnt/whole", "/tank/models", "/mnt/with blank\\andé", "/mnt/net", "/mnt/usb"),
        "/var/lib/docker/merged",
    ]


def test_mount_of_macos_is_read() -> None:
    found = list(parse_mount(MOUNT))
    assert len(found) == 7
    assert found[5] == Mount(
        "/Volumes/K3 on (blue)",
        "apfs",
        "/dev/disk7s1",
        ("local", "nodev", "nosuid", "journaled", "noowners"),
    )
    assert [mount.point for mount in drives_among(found)] == [
        *("/", "/System/Volumes/Data", "/Volumes/K3 on (blue)", "/Volumes/share")
    ]


def test_where_nothing_tells_there_are_no_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.drives.mounts.MOUNTINFO", Path("/nowhere"))
    monkeypatch.setattr("runtime.drives.mounts.sys", SimpleNamespace(platform="linux"))
    assert mounts() == []
    monkeypatch.setattr("runtime.drives.mounts.sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert mounts() == []


# --- a Linux of paper ---


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two NVMe drives behind one switch, a striped volume and an encrypted one over them, and a USB disk."""
    root = tmp_path / "sys"
    for module in (identity, hardware):
        monkeypatch.setattr(module, "SYS", root)
        monkeypatch.setattr(module, "sys", SimpleNamespace(platform="linux"))

    def write(files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text + "\n")

    switch = "devices/pci0000:00/0000:00:1c.0/0000:02:00.0"
    for number in (0, 1):
        port = f"{switch}/0000:03:0{number}.0/0000:0{4 + number}:00.0"
        disk = f"{port}/nvme/nvme{number}/nvme{number}n1"
        write(
            {
                f"{port}/current_link_speed": "16.0 GT/s PCIe",
                f"{port}/current_link_width": "4",
                f"{port}/nvme/nvme{number}/model": "FAST SSD 4TB    ",
                f"{port}/nvme/nvme{number}/serial": f"S{number}",
                f"{disk}/size": "7814037168",
                f"{disk}/queue/rotational": "0",
                f"{disk}/queue/scheduler": "[none] mq-deadline",
                f"{disk}/queue/nr_requests": "1023",
                f"{disk}/queue/logical_block_size": "512",
                f"{disk}/nvme{number}n1p1/partition": "1",
            }
        )
        (root / disk / "device").symlink_to(f"../../nvme{number}")
    usb = "devices/pci0000:00/0000:00:14.0/usb2/2-1/host6/target6:0:0/6:0:0:0/block/sda"
    write(
        {f"{usb}/size": "1000", f"{usb}/queue/rotational": "1", f"{usb}/device/model": "Slow", f"{usb}/partition": ""}
    )
    (root / usb / "partition").unlink()
    for name in ("dm-0", "dm-1"):
        (root / "devices/virtual/block" / name / "slaves").mkdir(parents=True)
    volumes = root / "devices/virtual/block"
    for number in (0, 1):
        place = root / f"{switch}/0000:03:0{number}.0/0000:0{4 + number}:00.0/nvme/nvme{number}/nvme{number}n1"
        (volumes / f"dm-0/slaves/nvme{number}n1p1").symlink_to(place / f"nvme{number}n1p1")
        (root / "block").mkdir(exist_ok=True)
        (root / f"block/nvme{number}n1").symlink_to(place)
    (volumes / "dm-1/slaves/dm-0").symlink_to(volumes / "dm-0")
    (root / "block/sda").symlink_to(root / usb)
    (root / "dev/block").mkdir(parents=True)
    for number, name in (("253:1", volumes / "dm-1"), ("8:0", root / usb)):
        (root / "dev/block" / number).symlink_to(name)
    return root


def test_a_disk_says_how_it_is_connected(sysfs: Path) -> None:
    assert look_at("nvme1n1") == Disk(
        "nvme1n1",
        "FAST SSD 4TB",
        "S1",
        "nvme",
        ("0000:00:1c.0", "0000:02:00.0", "0000:03:01.0", "0000:05:00.0"),
        "16.0 GT/s PCIe x4",
        4_000_787_030_016,
        False,
        "none",
        1023,
        512,
    )
    assert look_at("nvme0n1").pci[:2] == look_at("nvme1n1").pci[:2]
    slow = look_at("sda")
    assert (slow.bus, slow.rotational, slow.link, slow.queue_requests) == ("usb", True, UNKNOWN, None)
    nothing = look_at("nothing")
    assert (nothing.model, nothing.size_bytes, nothing.rotational, nothing.bus) == (UNKNOWN, None, None, UNKNOWN)


def on_paper(monkeypatch: pytest.MonkeyPatch, mount: Mount) -> dict[str, Any]:
    monkeypatch.setattr(identity, "mounts", lambda: [mount])
    assert mount.st_dev is not None
    return identity._on_linux(mount.point, mount.st_dev)


def test_below_volumes_of_volumes_are_the_disks(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_paper(monkeypatch, Mount("/m", "ext4", "/dev/mapper/x", (), (253, 1)))
    assert found["disks"] == ("nvme0n1", "nvme1n1")
    assert found["serial"] == UNKNOWN, "of two disks neither is the one"
    assert on_paper(monkeypatch, Mount("/m", "xfs", "/dev/sda", (), (8, 0)))["disks"] == ("sda",)
    assert on_paper(monkeypatch, Mount("/m", "overlay", "overlay", (), (0, 63)))["disks"] == ()


def test_btrfs_lies_on_all_its_devices(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = sysfs / "fs/btrfs/0e2b/devices"
    devices.mkdir(parents=True)
    for name in ("nvme0n1", "nvme1n1"):
        (devices / name).symlink_to(sysfs / "block" / name)
    found = on_paper(monkeypatch, Mount("/m", "btrfs", "/dev/nvme1n1", (), (0, 45)))
    assert found["disks"] == ("nvme0n1", "nvme1n1")
    assert on_paper(monkeypatch, Mount("/m", "btrfs", "/dev/other", (), (0, 46)))["disks"] == ()


def test_data_sets_of_one_pool_are_one_device(tmp_path: Path) -> None:
    plain = replace(identify(tmp_path), filesystem="zfs", disks=(), serial=UNKNOWN)
    drives = {
        name: replace(plain, source=source, st_dev=(0, number))
        for number, (name, source) in enumerate({"a": "tank/a", "b": "tank/b/c", "c": "tanker/a"}.items())
    }
    assert same_device(drives) == [("a", "b")]


# --- a macOS of paper ---


VOLUME = {
    "APFSContainerReference": "disk3",
    "DeviceIdentifier": "disk3s5",
    "DeviceNode": "/dev/disk3s5",
    "FilesystemType": "apfs",
    "VolumeUUID": "2D2A7B33-0000-4000-8000-1D1B2D2A7B33",
}
DISKUTIL: dict[str, dict[str, Any]] = {
    "/Volumes/K3": VOLUME,
    "disk3": {"APFSPhysicalStores": [{"APFSPhysicalStore": "disk0s2"}], "VirtualOrPhysical": "Virtual"},
    "disk0s2": {"ParentWholeDisk": "disk0"},
    "disk0": {
        "MediaName": "APPLE SSD AP2048Z",
        "BusProtocol": "Apple Fabric",
        "SolidState": True,
        "TotalSize": 2_001_111_162_880,
        "DeviceBlockSize": 4096,
        "ParentWholeDisk": "disk0",
    },
    "/Volumes/Stick": {"DeviceIdentifier": "disk4s1", "DeviceNode": "/dev/disk4s1", "FilesystemType": "exfat"},
    "disk4s1": {"ParentWholeDisk": "disk4"},
}


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """`diskutil info -plist`, as it prints, of an internal drive and a stick."""

    def run(line: list[str], **_: object) -> SimpleNamespace:
        assert line[:3] == ["diskutil", "info", "-plist"]
        if line[3] not in DISKUTIL:
            raise subprocess.CalledProcessError(1, line)
        return SimpleNamespace(stdout=plistlib.dumps(DISKUTIL[line[3]]))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(identity, "_mount_point", lambda path: path)
    monkeypatch.setattr(hardware, "sys", SimpleNamespace(platform="darwin"))


def test_diskutil_is_understood(macos: None) -> None:
    found = identity._on_macos("/Volumes/K3")
    assert (found["disks"], found["model"], found["filesystem"]) == (("disk0",), "APPLE SSD AP2048Z", "apfs")
    assert found["uuid"] == VOLUME["VolumeUUID"]
    disk = look_at("disk0")
    assert (disk.bus, disk.rotational, disk.size_bytes) == ("Apple Fabric", False, 2_001_111_162_880)
    stick = identity._on_macos("/Volumes/Stick")
    assert (stick["disks"], stick["model"], stick["uuid"]) == (("disk4",), UNKNOWN, UNKNOWN)


def test_where_diskutil_says_nothing_all_is_unknown(macos: None, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = identity._on_macos("/Volumes/none")
    assert nothing["disks"] == ()
    assert {nothing[key] for key in ("filesystem", "source", "uuid", "serial", "model")} == {UNKNOWN}
    assert look_at("disk9") == Disk("disk9", UNKNOWN, UNKNOWN, UNKNOWN, (), UNKNOWN, None, None, UNKNOWN, None, None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=b"no plist"))
    assert look_at("disk0").model == UNKNOWN


# --- the command ---


def test_named_drives_are_held_against_the_model(cli: Command, tiny: Path, tmp_path: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        packed = b"".join(part.tobytes() for part in checkpoint.read_expert(1, 3))
        every = checkpoint.experts_here.size
    for folder in ("some", "none"):
        (tmp_path / folder).mkdir()
    durable(tmp_path / "some" / "L1-E3.bin", packed)
    durable(tmp_path / "some" / "L1-E4.bin", packed[1:])
    line = ["drives", "map", "--model", tiny, "--drive", f"s={tmp_path / 'some'}", "--drive", f"n={tmp_path / 'none'}"]
    record = cli(*line, "--json").record
    assert record["schema"] == "expertstream.map/1"
    drives = record["drives"]
    assert list(drives) == ["model", "s", "n"]
    whole = {"experts": every, "of": every, "complete": True, "manifest": None}
    assert drives["model"]["holds"] == whole | {"trunk": "bf16"}
    assert drives["s"]["holds"] == whole | {"experts": 1, "complete": False, "trunk": None}
    assert "L1-E4.bin has" in drives["s"]["notes"][0]
    assert drives["n"]["holds"]["experts"] == 0
    assert drives["n"]["mode"] == "buffered: no file to probe with"
    assert ["s", "n"] in [[n for n in group if n != "model"] for group in record["one_device"]]
    assert drives["s"]["identity"]["total_bytes"] > drives["s"]["identity"]["free_bytes"] > 0
    shown = cli(*line).out
    assert f"s  {tmp_path / 'some'}\n" in shown
    assert f"holds     all {every:,} experts\n" in shown
    assert f"holds     1 of {every:,} experts\n" in shown
    assert "are one device, and give no more than one\n" in shown


def test_manifests_are_shown_and_bad_ones_told(cli: Command, tiny: Path, tmp_path: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        manifest = Manifest(checkpoint)
        manifest.put(1, 3, digest(memoryview(bytearray(checkpoint.expert_nbytes))))
        manifest.save(manifest_path(checkpoint))
    (tmp_path / COPY_NAME).write_bytes(b"no manifest")
    line = ["drives", "map", "--model", tiny, "--drive", f"a={tmp_path}"]
    drives = cli(*line, "--json").record["drives"]
    assert (drives["model"]["holds"]["manifest"], drives["a"]["holds"]["manifest"]) == (1, None)
    assert any(COPY_NAME in note for note in drives["a"]["notes"])
    assert " experts, a manifest of 1\n" in cli(*line).out


def test_experts_that_are_nowhere_are_told(cli: Command, embedded: Path, tmp_path: Path) -> None:
    bare = rewrite(embedded, tmp_path / "bare", lambda name: ".experts.7." not in name)
    model = cli("drives", "map", "--model", bare, "--json").record["drives"]["model"]
    experts = {"experts": 7 * 31, "of": 7 * 32, "complete": False}
    assert model["holds"] == experts | {"manifest": None, "trunk": "bf16"}
    assert model["notes"] == ["7 of 224 experts are on none of these drives"]


def test_without_a_model_files_are_counted_by_name(cli: Command, tmp_path: Path) -> None:
    (tmp_path / "k3-experts").mkdir()
    for name in ("L1-E0.bin", "k3-experts/L92-E895.bin", "k3-experts/L01-E2.bin", "film.mkv"):
        durable(tmp_path / name, contents())
    record = cli("drives", "map", "--drive", f"a={tmp_path}", "--json").record
    assert record["drives"]["a"]["holds"] == {"expert_files": 2}
    assert "holds     2 files with names of experts" in cli("drives", "map", "--drive", f"a={tmp_path}").out


def test_with_nothing_named_it_is_what_is_mounted(cli: Command) -> None:
    record = cli("drives", "map", "--json").record
    points = {mount.point for mount in drives_among(mounts())}
    assert set(record["drives"]) <= points
    for name, found in record["drives"].items():
        assert found["path"] == name
        assert found["identity"]["filesystem"] not in ("proc", "sysfs", "tmpfs", "cgroup", "devpts")
    assert cli("drives", "map").status == 0


def test_a_mount_that_cannot_be_looked_at_is_named_and_left_out(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Mount(str(tmp_path / "gone"), "ext4", "/dev/x", ())
    here = Mount(str(tmp_path), "ext4", "/dev/y", ())
    monkeypatch.setattr(command, "mounts", lambda: [gone, here])
    outcome = cli("drives", "map", "--json")
    assert list(outcome.record["drives"]) == [str(tmp_path)]
    assert f"drive {gone.point}: {gone.point} cannot be looked at" in outcome.err


def test_what_a_probe_found_is_shown(cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable(tmp_path / "data", contents())
    found = replace(identify(tmp_path), serial="S1", model="M")
    monkeypatch.setattr(command, "identify", lambda path: found)
    key = key_of(found, real.RealDevice("x", tmp_path).mode)
    assert key is not None
    Remembered({key: Known(3.25e9, 4, 1e-4, "2026-11-29T12:00:00+00:00")}).save()
    assert ", 3.25 GB/s at depth 4 by probe of 2026-11-29\n" in cli("drives", "map", "--drive", f"a={tmp_path}").out


@pytest.mark.parametrize("options", [("--drive", "a=/no/such/place"), ("--drive", "a")])
def test_places_that_are_not_there(cli: Command, options: tuple[str, ...]) -> None:
    outcome = cli("drives", "map", *options)
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1


def test_a_drive_is_not_probed_with_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below `/` lie other file systems, some with files that are no files."""
    for name in ("mine/small", "other/large"):
        (tmp_path / name).parent.mkdir()
        durable(tmp_path / name, contents(1000 if "mine" in name else 100_000))
    looked = real.device_of
    monkeypatch.setattr(real, "device_of", lambda path: -1 if path.endswith("other") else looked(path))
    assert real._some_files(tmp_path) == [os.fspath(tmp_path / "mine/small")]
