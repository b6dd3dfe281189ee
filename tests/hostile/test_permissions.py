"""No other user may write the engine's files, whatever the umask. No other user may read them if the umask forbids
it.
"""

import subprocess
import sys
from pathlib import Path

_LIFE = """
import os, sys
from pathlib import Path
from tests.rocketmq.messages import joined, log, write_log
from tiered_index import IndexReader, IndexService
from tiered_index.cli.main import run


def live(folder):
    for kind in ("file", "sqlite"):
        uri = f"{kind}://{folder}/{kind}/deep/storage"
        if kind == "sqlite":
            (folder / kind / "deep").mkdir(0o700, parents=True)
            (folder / kind).chmod(0o700)
        settings = {"slots": 7, "items": 20, "background": False}
        with IndexService.open(root=folder / kind / "new" / "root", storage=uri, **settings) as index:
            for number in range(3):
                index.put("t", 0, ["k"], number, 10, 1_700_000_000_000)
                if number < 2:
                    index.seal()
                index.run_lifecycle()
            index.flush()
        with IndexReader.open(uri, cache_dir=folder / kind / "far" / "cache", filter_after_probes=1) as reader:
            for key in ("k", "absent", "k"):
                reader.query("t", key)
    line = ["ingest", str(folder.parent / "store"), "--root", str(folder / "followed"), "--storage", f"file://{folder}/archive"]
    try:
        run([*line, "--slots", "7", "--items", "20", "--quiet"])
    except SystemExit as ended:
        assert not ended.code


folder = Path(sys.argv[1])
write_log(folder / "store" / "commitlog", 1 << 16, {0: joined(log(3))})
for umask in sys.argv[2:]:
    os.umask(int(umask, 8))
    (folder / umask).mkdir(0o700)
    live(folder / umask)
"""


def test_no_other_user_may_write_the_engines_files(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", _LIFE, str(tmp_path), "000", "077"], check=True, capture_output=True, timeout=120
    )
    for umask, forbidden in (("000", 0o022), ("077", 0o077)):
        folder = tmp_path / umask
        modes = {path.relative_to(folder).as_posix(): path.lstat().st_mode for path in folder.rglob("*")}
        parts = ("root/lock", "root/tiered_index.json", ".journal", ".index", "log%/", ".trailer", "followers/")
        for part in (*parts, "sqlite/deep/storage", "far/cache", "new/root", "file/deep/storage"):
            assert any(part in name for name in modes), f"{part} was not made"
        assert {name: oct(mode) for name, mode in modes.items() if mode & forbidden} == {}
