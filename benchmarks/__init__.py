import sys
from pathlib import Path

# Measurements share measuring.py with the scripts, which find it beside themselves.
sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
