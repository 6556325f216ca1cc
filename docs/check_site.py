"""Open every page of the built site in Chromium at the width of a phone, and report what is wrong with it.

python docs/check_site.py build/docs

It reports errors on the console, dollar signs of formulas that were not rendered, pages that scroll sideways, and figures
without a description. Nothing outside this machine is loaded, so errors of external scripts (MathJax) do not count.
Without Chromium it says so, and checks nothing.
"""

import functools
import http.server
import json
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_WIDTH = 390  # pixels, of a common phone
_TIME_LIMIT = 240.0  # seconds, for all pages
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr --remote-debugging-port=0"
)
_CHECKER = """<!doctype html><title>check</title><iframe id="frame" width="WIDTH" height="800"></iframe><script>
const pages = PAGES, frame = document.getElementById("frame"), found = [];
function look(page) {
  const view = frame.contentWindow, root = view.document.documentElement;
  const report = (text) => found.push(page + ": " + text);
  if (root.scrollWidth > WIDTH) {
    const isClipped = (node) => node && node !== root && (view.getComputedStyle(node).overflowX !== "visible"
      || view.getComputedStyle(node).position === "fixed" || isClipped(node.parentElement));
    const wide = [...view.document.querySelectorAll("article *")].filter(
      (node) => node.getBoundingClientRect().right > WIDTH + 1 && !isClipped(node.parentElement));
    const names = wide.slice(0, 3).map((node) => node.tagName.toLowerCase() + "." + node.className + " '"
      + node.textContent.trim().slice(0, 40) + "'");
    report("is " + root.scrollWidth + " px wide; too wide: " + names.join(", "));
  }
  for (const image of view.document.querySelectorAll("article img")) {
    const text = image.getAttribute("alt") || "", source = image.getAttribute("src") || "";
    if (!text.trim() || source.endsWith(text)) report("no description of the figure " + source.slice(0, 60));
    if (image.complete && image.naturalWidth === 0) report("the figure is not there: " + source.slice(0, 60));
  }
  const walker = view.document.createTreeWalker(view.document.querySelector("article") || root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.parentElement.closest("pre, code, script, style") && /\\$[^$]+\\$/.test(node.data))
      report("a formula is not rendered: " + node.data.trim().slice(0, 60));
  }
}
async function check() {
  for (const page of pages) {
    await new Promise((resolve) => { frame.onload = resolve; frame.src = page; });
    await new Promise((resolve) => setTimeout(resolve, 50));
    try { look(page); } catch (error) { found.push(page + ": " + error); }
  }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
}
check();
</script>"""


class _Site(http.server.SimpleHTTPRequestHandler):
    """Serve the site and the page that checks it, and receive what it found."""

    checker: bytes
    found: "queue.Queue[list[str]]"

    def do_GET(self) -> None:  # noqa: N802
        """Serve a file of the site, or the checker."""
        if self.path != "/check":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.checker)

    def do_POST(self) -> None:  # noqa: N802
        """Receive the findings."""
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Write no line for each request."""


def check_site(folder: Path, chromium: str) -> list[str]:
    """Return what is wrong with the pages of a built site, one line each."""
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
    pages = [page for page in pages if not page.startswith("_") and page not in ("search.html", "genindex.html")]
    text = _CHECKER.replace("WIDTH", str(_WIDTH)).replace("PAGES", json.dumps(pages))
    found: queue.Queue[list[str]] = queue.Queue()
    handler = type("Site", (_Site,), {"checker": text.encode(), "found": found})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work, open(Path(work) / "log", "w+") as log:
        rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        command = [chromium, *_FLAGS.split(), rules, f"--user-data-dir={work}/profile", f"{address}/check"]
        browser = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            problems = found.get(timeout=_TIME_LIMIT)
        except queue.Empty:
            problems = [f"the browser did not finish within {_TIME_LIMIT:.0f} s"]
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
        log.seek(0)
        lines = [line for line in log if "CONSOLE" in line and re.search(r"source: " + re.escape(address), line)]
    print(f"{len(pages)} pages at {_WIDTH} px: {len(problems)} problems, {len(lines)} messages on the console")
    return problems + [line.split("CONSOLE", 1)[1].strip() for line in lines]


def main() -> int:
    """Check the site in the folder that is given."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("There is no Chromium here: the pages were not opened in a browser", file=sys.stderr)
        return 0
    folder = Path(sys.argv[1]).resolve()
    if not (folder / "index.html").exists():
        print(f"{folder} has no index.html: build the site first (python -m sphinx docs {folder})", file=sys.stderr)
        return 2
    problems = check_site(folder, chromium)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
