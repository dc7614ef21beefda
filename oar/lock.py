"""One process per folder: a lock file that names its holder and cannot outlive it."""
import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from pathlib import Path

from oar.errors import UserError

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)      # some network file systems: there we go on without


@contextmanager
def hold(folder: Path):
    """Create `folder` and keep every other process out of it. UserError, naming the process, when one is in there.

    The kernel drops the lock with its process, also after SIGKILL, so a lock file left behind stops nobody.  A folder that
    is still empty at the end is removed again.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _take(path)
    except BlockingIOError:
        raise UserError(f"{folder}: process {_holder(path)} is at work in this folder") from None
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()                            # before the lock goes, so that nobody locks a file about to be removed
        os.close(handle)
        with suppress(OSError):                      # not empty
            folder.rmdir()


def _take(path: Path) -> int:
    """Lock `path` and write our process id into it; returns the open file. BlockingIOError when it is locked."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            if _is_named(handle, path):
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)                             # its holder has just removed it: once more, with the new file


def _is_named(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def _holder(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip() or "(unknown)"
    return "(unknown)"
