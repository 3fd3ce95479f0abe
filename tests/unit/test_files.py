"""Files are written as a whole or not at all; one process at a time holds a lock, wherever there are locks."""

import contextlib
import errno
import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mst_scale import files
from mst_scale.files import locked, write_atomically


@pytest.mark.parametrize("remove", [False, True])
def test_one_at_a_time(tmp_path, remove):
    path, inside, most = tmp_path / "a.lock", [], []

    def enter(number: int) -> None:
        with locked(path, remove=remove):
            inside.append(number)
            most.append(len(inside))
            threading.Event().wait(0.002)
            inside.remove(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(enter, range(64)))
    assert len(most) == 64 and max(most) == 1 and path.exists() is not remove


def test_who_waits_may_say_so(tmp_path):
    waited, path = threading.Event(), tmp_path / "a.lock"

    @contextlib.contextmanager
    def waiting():
        waited.set()
        yield

    with ThreadPoolExecutor() as threads:
        with locked(path, waiting):
            assert not waited.is_set()
            second = threads.submit(lambda: locked(path, waiting).__enter__())
            assert waited.wait(10) and not second.done()
        second.result(10)


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "a.lock"):
        assert "no locks" in caplog.text
    monkeypatch.setattr(files, "WITHOUT_LOCKS", set())
    with pytest.raises(OSError, match="No locks"), locked(tmp_path / "a.lock"):
        pass


def test_text_is_written_whole_or_not_at_all(tmp_path):
    write_atomically(tmp_path / "t", "one")
    write_atomically(tmp_path / "t", "two")
    assert [p.name for p in tmp_path.iterdir()] == ["t"] and (tmp_path / "t").read_text() == "two"
