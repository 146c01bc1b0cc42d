"""Write report.html and report/ for a folder of runs. Files are renamed into place, so no reader sees half a page."""

from pathlib import Path

from fedncv.report import parts, series, table
from fedncv.report.figures import save_all
from fedncv.report.gather import gather
from fedncv.report.page import page
from fedncv.report.verdict import claims

PAGE, FILES = "report.html", "report"


def write(folder: Path, *, target: float | None = None, allow: tuple[str, ...] = ()) -> list[Path]:
    """Write the report; return the written files, the page first."""
    results = gather(folder, allow=allow)
    main = table.main_table(results)
    text = page(results, main, claims(results, main), target=target)
    files = folder / FILES
    files.mkdir(exist_ok=True)
    contents = {
        folder / PAGE: text,
        files / "table.csv": table.to_csv(main),
        files / "table.md": table.to_markdown(main),
        files / "table.tex": table.to_latex(main),
        files / "parts.md": parts.to_markdown(results),
        files / "curves.csv": series.curves_csv(results),
        files / "clients.csv": series.clients_csv(results),
        files / "work.csv": series.work_csv(results, target),
    }
    for path, content in contents.items():
        if not content:
            path.unlink(missing_ok=True)  # from an earlier report
            continue
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    return [*(path for path, content in contents.items() if content), *save_all(results, files)]
