"""Makes the virtual environment of the Makefile: `python3 .ci/environment.py FOLDER TORCH_REQUIREMENT`.

Needs the standard library only. A PyTorch that the calling interpreter already has (a CUDA build, say) is used as it
is; otherwise TORCH_REQUIREMENT is installed.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
TORCH_VERSION = "import importlib.metadata as m; print(m.version('torch'))"


def folder_of_torch() -> Path | None:
    """The site-packages folder of this interpreter's torch, if it has one that is new enough."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TORCH:
        print(f"torch {version} is older than {MIN_TORCH[0]}.{MIN_TORCH[1]}: installing a newer one beside it")
        return None
    return Path(importlib.util.find_spec("torch").origin).parent.parent


def has_torch(python: Path) -> bool:
    """Whether `python` finds any torch."""
    return subprocess.run([python, "-c", TORCH_VERSION], capture_output=True, check=False).returncode == 0


def main(folder: Path, requirement: str) -> None:
    """Creates the environment where there is none, and gives it a torch."""
    if sys.version_info < MIN_PYTHON:
        sys.exit(
            f"te_dist needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; use make PYTHON=..."
        )
    python = folder / "bin" / "python"
    torch_folder = folder_of_torch()
    if not python.exists():
        venv.create(folder, with_pip=True, system_site_packages=torch_folder is not None)
    if has_torch(python):
        return
    if torch_folder is not None:  # the caller runs in an environment of its own, which a new one does not see
        site = next((folder / "lib").glob("python3.*")) / "site-packages"
        (site / "caller_torch.pth").write_text(f"{torch_folder}\n")
        return
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", requirement], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
