"""From what somebody gave as a local path to an absolute one, looked at once: what no file system takes is told here, and by its name.

Everything else (nothing there, a file in the place of a folder) is for whoever uses the path. Threads: any.
"""

from __future__ import annotations

import errno
from pathlib import Path

from tiered_index.errors import ConfigError, StorageMisconfigured

__all__ = ["absolute_path"]

_UNUSABLE = {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}


def absolute_path(given: str | Path) -> Path:
    """Return the absolute path of `given`, with the home that `~` or `~name` stands for.

    Raises `ConfigError` where no file can be called so: a name or path too long, symbolic links that lead to each other, a character that
    names don't have, the home of nobody; `StorageMisconfigured` where a folder on the way may not be entered.
    """
    shown = f"{str(given)[:100]!r}" + ("..." if len(str(given)) > 100 else "")
    try:
        path = Path(given).expanduser().absolute()
        path.stat()
    except PermissionError as error:
        raise StorageMisconfigured(f"{shown}: {error.strerror}: check the permissions of its folders") from error
    except OSError as error:
        if error.errno not in _UNUSABLE:
            return path  # told by whoever uses it
        raise ConfigError(f"not a path of this system: {shown}: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"not a path of this system: {shown}: {error}") from error
    return path
