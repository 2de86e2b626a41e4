#!/usr/bin/env python3
"""Opens a page of `tessera report` or `tessera inspect --program` in headless Chromium, moves the mouse over it and
prints, as JSON, what a person would meet: errors, requests to the network, curves, tooltips. Prints `skipped: <reason>` and returns 77 without Chromium.

    report_in_browser.py PAGE [--width 1280] [--dark] [--screenshot FILE]
"""

import argparse
import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
LONGEST_ANSWER_S = 60
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

LOOK = """(() => {
  const text = (selector) => document.querySelector(selector)?.textContent ?? "";
  const count = (selector) => document.querySelectorAll(selector).length;
  const places = (selector) => [...document.querySelectorAll(selector)].map((each) => each.getBoundingClientRect())
    .map((box) => ({ x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height }));
  return {
    title: document.title, heading: text("h1"), notes: text("#notes"), summary: text("#summary"),
    charts: [...document.querySelectorAll(".chart")].map((chart) => chart.id),
    lossCurves: [...document.querySelectorAll("#chart-loss .curve")].filter((path) => !path.closest(".legend"))
      .map((path) => path.getAttribute("d").split("L").length),
    marks: [...document.querySelectorAll("#chart-loss .marks text")].map((each) => each.textContent),
    spans: count(".lanes [data-span]"), waits: count(".lanes .waits"), arrows: count(".lanes .arrow"),
    waitTable: text("#waits"), sharding: text("#sharding"), configuration: text("#configuration"),
    differences: [...document.querySelectorAll("tr.differs td:first-child")].map((each) => each.textContent),
    buffers: count(".lanes [data-buffer]"), instructions: count("#flow tr[id]"),
    program: text("#program"), images: count("img"), hacked: String(window.hacked),
    sections: [...document.querySelectorAll("section")].filter((each) => !each.hidden).map((each) => each.id),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    height: document.documentElement.scrollHeight,
    lossChart: places("#chart-loss > svg")[0] ?? null,
    waitPlace: places(".lanes .waits").sort((a, b) => b.width - a.width)[0] ?? null,
    spanPlace: places(".lanes .span:not(.waits)").sort((a, b) => b.width - a.width)[0] ?? null,
  };
})()"""


def find_browser():
    """The first that answers: Ubuntu's chromium-browser is there, but only says that it is a snap."""
    for program in filter(None, map(shutil.which, BROWSERS)):
        if subprocess.run([program, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
            return program
    return None


class Browser:
    """Chromium, spoken to over a pipe: JSON messages that end in a zero byte."""

    def __init__(self, program, profile):
        to_browser, self.to_browser = os.pipe()
        self.from_browser, from_browser = os.pipe()
        command = [program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
                   "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"]
        # The browser looks for the pipe at descriptors 3 and 4.
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "sh", *command],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.unread = b""
        self.last_id = 0
        self.session = None
        self.events = []

    def receive(self):
        deadline = time.monotonic() + LONGEST_ANSWER_S
        while b"\0" not in self.unread:
            if not select.select([self.from_browser], [], [], max(0, deadline - time.monotonic()))[0]:
                sys.exit("Chromium does not answer")
            part = os.read(self.from_browser, 1 << 20)
            if not part:
                sys.exit(f"Chromium ended with exit code {self.process.wait()}")
            self.unread += part
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **parameters):
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.last_id:
                if "error" in answer:
                    sys.exit(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method):
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.receive())

    def evaluate(self, script):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            sys.exit(f"script failed: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open_page(self, page, width, dark):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page)
        self.wait_for("Page.loadEventFired")
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))) && 0")

    def hover(self, place, across=0.5):
        """Scrolls a place of the page into the middle of the window and moves the mouse onto it."""
        y = place["y"] + place["height"] / 2
        self.evaluate(f"scrollTo(0, {y} - innerHeight / 2)")
        scrolled = self.evaluate("scrollY")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place["x"] + place["width"] * across, y=y - scrolled)

    def tooltip(self, within):
        return self.evaluate(f'(() => {{ const box = document.querySelector("{within} > .tooltip");'
                             ' return box && !box.hidden ? box.innerText : ""; })()')

    def close(self):
        self.process.terminate()
        self.process.wait()


def troubles(events, page):
    """(what the console says, what was asked of the network) besides the page itself."""
    errors, requests = [], []
    for event in events:
        method, what = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled":
            errors.append(what["type"] + ": " + str(what["args"]))
        elif method == "Log.entryAdded":
            errors.append(what["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = what["request"]["url"]
            if url != page and not url.startswith("data:"):
                requests.append(url)
    return errors, requests


def visit(browser, page, options):
    browser.open_page(page, options.width, options.dark)
    seen = browser.evaluate(LOOK)
    for key, place, within, across in (("lossTooltip", "lossChart", "#chart-loss", 0.5), ("waitTooltip", "waitPlace", ".lanes", 0.5),
                                       ("spanTooltip", "spanPlace", ".lanes", 0.1)):
        if seen[place]:
            browser.hover(seen[place], across)
            seen[key] = browser.tooltip(within)
    browser.evaluate('document.querySelector("#curves .switch button:last-child")?.click()')
    seen["timeAxis"] = browser.evaluate('document.querySelector("#chart-loss > svg")?.textContent ?? ""')
    browser.evaluate('document.querySelector("#curves .switch button:first-child")?.click()')
    browser.evaluate('for (const each of document.querySelectorAll("details")) each.open = true')
    browser.evaluate("new Promise((done) => setTimeout(done, 50)) && 0")
    seen["openProgram"] = browser.evaluate('document.querySelector("#program pre")?.textContent ?? ""')
    seen["openKernel"] = browser.evaluate('document.querySelector("#kernels pre")?.textContent ?? ""')
    if options.screenshot:
        browser.hover(seen["lossChart"] or {"x": 0, "y": 0, "width": 1, "height": 1}, 0.6)
        browser.evaluate("scrollTo(0, 0)")
        height = browser.evaluate("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": options.width, "height": height, "scale": 1}
        picture = browser.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        pathlib.Path(options.screenshot).write_bytes(base64.b64decode(picture["data"]))
    seen["errors"], seen["requests"] = troubles(browser.events, page)
    return seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--screenshot")
    options = parser.parse_args()
    program = find_browser()
    if program is None:
        print("skipped: no Chromium here; `make test` installs it as root, or apt-get install chromium")
        return SKIPPED
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            seen = visit(browser, options.page.resolve().as_uri(), options)
        finally:
            browser.close()
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
