"""Execute notebooks in kernels and store their outputs, so that pictures show where they are read: `make notebooks`.

    python notebooks/store_outputs.py                        # all
    python notebooks/store_outputs.py notebooks/quickstart.ipynb
    python notebooks/store_outputs.py notebooks/howto/*.md   # pages with commands of a shell, executed here
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from tests.support import console_pages  # noqa: E402

CONFIG = """
c = get_config()
c.InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "dpi": 80}
c.HistoryManager.enabled = False
"""


def notebooks() -> list[Path]:
    """All notebooks of the guide."""
    return sorted(path for path in FOLDER.rglob("*.ipynb") if not {"_build", ".ipynb_checkpoints"} & {*path.parts})


def store(path: Path) -> None:
    """Execute one notebook and write it with its outputs, without counts and times, which would differ each time."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]  # warnings name paths of one machine
            for output in cell.outputs:
                output.metadata = {}
                if "execution_count" in output:
                    output.execution_count = None
                if "data" in output and "image/png" in output.data:
                    output.data.pop("text/plain", None)  # the size of a figure
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}
    }
    nbformat.write(notebook, path)


def main() -> None:
    """Store the outputs of the notebooks and pages that are named, or of all."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile_default"
        profile.mkdir()
        (profile / "ipython_kernel_config.py").write_text(CONFIG, encoding="utf-8")
        os.environ |= {"IPYTHONDIR": folder, "PYTHONPATH": str(FOLDER.parent)}
        for path in [Path(name).resolve() for name in sys.argv[1:]] or [*console_pages.pages(), *notebooks()]:
            (console_pages.store if path.suffix == ".md" else store)(path)
            print(path.relative_to(FOLDER.parent))


if __name__ == "__main__":
    main()
