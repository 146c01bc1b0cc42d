"""Write report.html and report/ for a folder of runs. Files are renamed into place, so no reader sees half a page."""

from pathlib import Path

from fedncv.files import make_folder, write_atomically
from fedncv.report import metrics, parts, series, table
from fedncv.report.figures import save_all
from fedncv.report.gather import gather
from fedncv.report.page import page
from fedncv.report.verdict import claims
from fedncv.results import is_run

PAGE, FILES = "report.html", "report"


def write(
    *folders: Path, out: Path | None = None, target: float | None = None, allow: tuple[str, ...] = ()
) -> list[Path]:
    """Write the report into ``out``, by default the folder itself; return the written files, the page first."""
    folder = _place(folders, out)
    results = gather(*folders, allow=allow, out=folder)
    main = table.main_table(results)
    files = folder / FILES
    try:
        make_folder(files)
    except OSError as error:
        raise ValueError(f"cannot create the folder {files}: {error.strerror}; choose another --out") from None
    contents = {
        files / "table.csv": table.to_csv(main),
        files / "table.md": table.to_markdown(main),
        files / "table.tex": table.to_latex(main),
        files / "metrics.csv": metrics.to_csv(results),
        files / "parts.md": parts.to_markdown(results),
        files / "curves.csv": series.curves_csv(results),
        files / "clients.csv": series.clients_csv(results),
        files / "work.csv": series.work_csv(results, target),
    }
    written = [*(path for path, content in contents.items() if content), *save_all(results, files)]
    text = page(results, main, claims(results, main), target=target, written=written)
    for path, content in ({folder / PAGE: text} | contents).items():
        if not content:
            path.unlink(missing_ok=True)  # from an earlier report
            continue
        write_atomically(path, content.encode(errors="backslashreplace"))
    return [folder / PAGE, *written]


def _place(folders: tuple[Path, ...], out: Path | None) -> Path:
    """Return the folder of the page. Raise ValueError if it is not clear, or holds one of several folders' own page."""
    if out is None:
        if len(folders) > 1:
            raise ValueError(f"a report of {len(folders)} folders needs a place of its own: add --out FOLDER")
        return folders[0]
    if len(folders) > 1 and out.resolve() in [folder.resolve() for folder in folders]:
        raise ValueError(f"--out {out} is one of the reported folders and has its own page; choose another --out")
    if is_run(out) and out.resolve() not in [folder.resolve() for folder in folders]:
        raise ValueError(f"--out {out} is a run; choose another --out")
    return out
