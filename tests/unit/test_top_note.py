"""What `torchobs top` says where it has no rank to show."""

from pathlib import Path

from tests.rank_files import Clock, File
from tests.scanners import scanner_of
from torchobs.cli import top


def test_files_that_cannot_be_read_are_not_called_none(tmp_path: Path) -> None:
    """As those of a later version."""
    _, note = top.views(scanner_of(tmp_path, Clock(10.0)))
    assert note.startswith("no rank trains here")
    File(tmp_path).save().path.write_bytes(b"of a later version" * 1000)
    seen, note = top.views(scanner_of(tmp_path, Clock(10.0)))
    assert (seen, note) == ([], "1 flight file here cannot be read: `torchobs runs`, with the same --dir if any, says why")
