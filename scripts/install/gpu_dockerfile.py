"""Write Dockerfile.gpu: Dockerfile with the lines for GPUs that it names. With --check, only compare.

In Dockerfile, `# gpu: LINE` stands for LINE in place of the line above it, `# gpu+ LINE` for LINE in addition, and what
stands between `# cpu only {` and `# }` is left out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def gpu_dockerfile(text: str) -> str:
    """Return the text of Dockerfile.gpu, made from that of Dockerfile."""
    lines: list[str] = []
    is_left_out = False
    for line in text.splitlines():
        if mark := re.fullmatch(r"# gpu([:+]) ?(.*)", line):
            if mark[1] == ":":
                lines.pop()
            lines.append(mark[2])
        elif line in ("# cpu only {", "# }"):
            is_left_out = line != "# }"
        elif not is_left_out:
            lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    made, file = gpu_dockerfile((ROOT / "Dockerfile").read_text()), ROOT / "Dockerfile.gpu"
    if sys.argv[1:] != ["--check"]:
        file.write_text(made)
    elif made != file.read_text():
        raise SystemExit("Dockerfile.gpu is not what Dockerfile makes it: python scripts/install/gpu_dockerfile.py")
