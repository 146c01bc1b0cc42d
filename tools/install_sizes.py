"""Print how much an installation downloads and how much disk it takes, for the table in docs/install.md.

python tools/install_sizes.py                                                   on Linux PyTorch comes with CUDA
python tools/install_sizes.py --index https://download.pytorch.org/whl/cpu      PyTorch's build for the CPU
python tools/install_sizes.py --extra flower                                    with an extra; only the download

Everything goes into a temporary folder, with this interpreter and the versions of constraints.txt.
"""

import argparse
import shutil
import subprocess
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def megabytes(folder):
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 1e6


def main(index, extra):
    with tempfile.TemporaryDirectory() as name:
        env, wheels = Path(name) / "env", Path(name) / "wheels"
        venv.create(env, with_pip=True)
        pip = [str(env / "bin" / "pip"), "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], check=True)
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # it would go into the next wheel
        (wheel,) = wheels.iterdir()
        what = f"{wheel}[{extra}]" if extra else str(wheel)
        where = ["--extra-index-url", index] if index else []
        constraints = ["-c", str(ROOT / "constraints.txt")]
        began = time.monotonic()
        subprocess.run([*pip, "download", *where, *constraints, "-d", str(wheels), what], check=True)
        print(f"{extra or 'fedncv'}: {megabytes(wheels):,.0f} MB downloaded, {time.monotonic() - began:.0f} s")
        if not extra:
            began = time.monotonic()
            command = [*pip, "install", "--no-index", "--find-links", str(wheels), *constraints, "fedncv"]
            subprocess.run(command, check=True)
            print(f"fedncv: {megabytes(env):,.0f} MB on disk, {time.monotonic() - began:.0f} s to install")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--index", default="")
    parser.add_argument("--extra", default="")
    main(**vars(parser.parse_args()))
