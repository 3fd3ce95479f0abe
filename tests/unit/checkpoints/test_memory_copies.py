"""Copies in memory: parts on one host, and what a neighbor's writer keeps of them."""

import os
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch

from mst_scale.checkpoints import finding, manifests, memory_copies, neighbors
from mst_scale.checkpoints.memory_copies import Copy, MemoryJob
from mst_scale.checkpoints.neighbors import Link, Listen, Neighbor, neighbor_of
from mst_scale.checkpoints.writer import MemoryWriter
from mst_scale.errors import Damaged
from mst_scale.snapshot import Snapshot

KEY = b"a key that all writers know"


@pytest.fixture
def host(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(memory_copies, "ROOT", tmp_path)
    return memory_copies.folder_of(tmp_path / "run")


def head_of(step: int, rank: int = 0, ranks: int = 2, name: str = "a") -> dict:
    about = {"tag": finding.tag_of(step), "step": step, "ranks": ranks, "stage": 1}
    return memory_copies.describe_part(about, Copy(step, 0, "T", name, ranks), rank, False)


def captured(step: int, size: int = 5_000) -> Snapshot:
    taken = Snapshot()
    taken.begin(Path("/somewhere"))
    taken.save({"w": torch.full((size,), float(step))}, "/somewhere/w.pt")
    taken.put(Path("/somewhere/mst/masks"), b"masks")
    taken.put(Path("/zero_to_fp32.py"), b"a script")
    return taken


def job_of(host: Path, step: int, keep: str | None = None, neighbor=None, **more) -> tuple[MemoryJob, int]:
    taken = captured(step)
    return MemoryJob(str(host), head_of(step, **more), taken.files, keep, neighbor), taken.fd


def keep(host: Path, step: int, keep: str | None = None, **more) -> Path:
    job, memory = job_of(host, step, keep, **more)
    return memory_copies.write_part(host, job.head, job.files, memory, keep)


def test_a_part_is_the_files_of_a_rank_and_the_copy_before_stays_until_another_is_complete(host, tmp_path):
    keep(host, 2)
    part = keep(host, 4, "step00000002")
    assert memory_copies.list_parts(host) != [] and oct(host.parent.stat().st_mode)[-3:] == "700"
    steps = sorted(copy.step for copy, _ in memory_copies.list_parts(host))
    assert steps == [2, 4] and part == memory_copies.part_folder(host, "step00000004", 0)
    keep(host, 6, "step00000004")
    assert sorted(path.name for path in part.parent.iterdir()) == ["step00000004", "step00000006"]
    draft = tmp_path / "draft"
    head, digests = memory_copies.put_back(part, draft)
    assert head["step"] == 4 and sorted(digests) == ["mst/masks", "w.pt"]
    assert torch.equal(torch.load(draft / "w.pt")["w"], torch.full((5_000,), 4.0))
    memory_copies.clear(host)
    assert not host.parent.exists()


def test_what_is_not_complete_is_not_a_part(host):
    part = keep(host, 2)
    shutil.copytree(part, part.with_name("step00000002.partial"))
    assert memory_copies.list_parts(host) == [(Copy(2, 0, "T", "a", 2), 0)]
    text = (part / manifests.MANIFEST).read_text()
    (part / manifests.MANIFEST).write_text(text.replace('"rank": 0', '"rank": 1'))
    assert memory_copies.list_parts(host) == []
    (part / manifests.MANIFEST).write_text(text)
    content = bytearray((part / "w.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (part / "w.pt").write_bytes(content)
    with pytest.raises(Damaged, match=r"w\.pt"):
        memory_copies.put_back(part, host / "draft")


def test_parts_that_go_while_they_are_listed_are_not_returned(host, monkeypatch):
    """The writers of other ranks of the host remove theirs at any time."""
    keep(host, 2, rank=0)
    keep(host, 2, rank=1)
    inner = manifests.head

    def head(part: Path):
        shutil.rmtree(host / "rank00001", ignore_errors=True)
        return inner(part)

    monkeypatch.setattr(manifests, "head", head)
    assert [rank for _, rank in memory_copies.list_parts(host)] == [0]
    shutil.rmtree(host)
    assert memory_copies.list_parts(host) == []


def test_folders_of_others_are_not_used(host, monkeypatch):
    keep(host, 2)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert memory_copies.list_parts(host) == []
    with pytest.raises(PermissionError):
        keep(host, 4)
    monkeypatch.undo()
    other = host.parent.with_name("other")
    other.symlink_to(host.parent)
    assert memory_copies.list_parts(other / host.name) == []


def test_nodes_of_one_machine_have_their_own_folders(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert memory_copies.host_name().startswith(f"n1.{socket.gethostname()}-")
    monkeypatch.setenv("SLURMD_NODENAME", socket.gethostname())
    assert memory_copies.host_name().startswith(f"{socket.gethostname()}-")


def test_a_full_memory_is_one_error_and_leaves_nothing(host, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    writer = None
    with monkeypatch.context() as patched:
        patched.setattr(manifests, "digests_of", full)
        for step in (2, 4):
            job, memory = job_of(host, step)
            writer = writer or MemoryWriter(memory)
            assert "No space left" in writer.keep(job)
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "step 2" in caplog.text
    assert list(host.rglob("*.pt")) == [] and memory_copies.list_parts(host) == []
    job, _ = job_of(host, 6)
    assert writer.keep(job) is None and memory_copies.list_parts(host) == [(Copy(6, 0, "T", "a", 2), 0)]


# --- neighbors ---


@pytest.fixture
def there(tmp_path, host) -> tuple[Neighbor, Path]:
    """A writer on another host, which listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    folder = host.with_name("there")
    neighbors.listen(Listen(os.dup(listener.fileno()), KEY, str(folder)))
    return Neighbor("there", *listener.getsockname(), KEY), folder


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aabb", [2, 3, 0, 1]), ("aabbcc", [2, 3, 4, 5, 0, 1]), ("aaab", [3, 3, 3, 0]), ("abab", [1, 0, 3, 2])],
)
def test_the_ring_of_hosts(hosts, expected):
    assert [neighbor_of(rank, list(hosts)) for rank in range(len(hosts))] == expected


@pytest.mark.parametrize("first", ["127.0.0.1", "localhost"])
def test_rank_0_is_reached_under_the_name_that_all_ranks_know(first, monkeypatch):
    """Its own host may resolve that name to an address of the loopback interface."""
    monkeypatch.setenv("MASTER_ADDR", first)
    assert neighbors._own_address() == first


def test_a_neighbor_keeps_parts_like_its_own(host, there, monkeypatch, caplog):
    monkeypatch.setattr(neighbors, "CHUNK", 1 << 12)
    neighbor, folder = there
    job, memory = job_of(host, 2, rank=1, neighbor=neighbor)
    writer = MemoryWriter(memory)
    assert writer.keep(job) is None
    job, memory = job_of(host, 4, "step00000002", rank=1, neighbor=neighbor)
    assert MemoryWriter(memory).keep(job) is None and caplog.text == ""
    assert sorted(memory_copies.list_parts(folder)) == sorted(memory_copies.list_parts(host))
    ours, theirs = (memory_copies.part_folder(one, "step00000004", 1) for one in (host, folder))
    names = manifests.files_in(ours)
    assert names == manifests.files_in(theirs)
    assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in names)


def test_a_neighbor_without_room_says_so_and_the_connection_goes_on(host, there, monkeypatch):
    neighbor, folder = there
    part, link = keep(host, 2), Link()
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("not a folder")
    with pytest.raises(OSError, match="there"):
        link.send(neighbor, part, None)
    folder.unlink()
    assert link.send(neighbor, part, None) and memory_copies.list_parts(folder) == [(Copy(2, 0, "T", "a", 2), 0)]


def test_a_neighbor_that_is_gone_or_silent_costs_a_bounded_time_and_is_left_alone_for_a_while(host, monkeypatch):
    monkeypatch.setattr(neighbors, "SECONDS", 1.0)
    part = keep(host, 2)
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    silent = Neighbor("silent", *listener.getsockname(), KEY)
    link, began = Link(), time.monotonic()
    with pytest.raises(OSError, match="silent"):
        link.send(silent, part, None)
    assert time.monotonic() - began < 10 and not link.send(silent, part, None)
    listener.close()
    with pytest.raises(OSError, match="silent"):
        Link().send(silent, part, None)


def test_a_neighbor_that_did_not_answer_is_tried_again(host, there, monkeypatch):
    monkeypatch.setattr(neighbors, "REST_SECONDS", 0.5)
    neighbor, folder = there
    part, link = keep(host, 2), Link()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = Neighbor("gone", *closed.getsockname(), KEY)
    with pytest.raises(OSError, match="gone"):
        link.send(gone, part, None)
    assert not link.send(neighbor, part, None)
    time.sleep(0.6)
    assert link.send(neighbor, part, None) and memory_copies.list_parts(folder) == [(Copy(2, 0, "T", "a", 2), 0)]


def test_who_does_not_know_the_key_is_not_served(host, there):
    neighbor, folder = there
    with pytest.raises(OSError, match="there"):
        Link().send(Neighbor("there", neighbor.address, neighbor.port, b"another"), keep(host, 2), None)
    assert not folder.exists()
