"""``docs/plan-example.html``, the page of a plan.

python docs/make/plan_page.py            asks the plan, which takes minutes
python docs/make/plan_page.py --again    puts the answers that it has into the page as it looks now
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

from torchtune_adaptive.cli.plan_page import page_of

PAGE = Path(__file__).parents[1] / "plan-example.html"
SUBJECT = "llama3_1/8B_full"
WORDS = (SUBJECT, "--nproc", "8", "--gpu", "h100")


def facts() -> dict[str, Any]:
    """What the page knows."""
    return dict(json.loads(_between('id="facts">', "</script>")))


def again() -> str:
    """The page, with the answers that it has."""
    answer = unescape(_between('<noscript><p class="card">', "</p>"))
    return page_of(SUBJECT, facts(), answer)


def _between(start: str, end: str) -> str:
    found = re.search(f"{re.escape(start)}(.*?){re.escape(end)}", PAGE.read_text(), re.DOTALL)
    assert found is not None, f"{PAGE} is no page of a plan"
    return found[1]


if __name__ == "__main__":
    if "--again" in sys.argv:
        PAGE.write_text(again())
    else:
        command = [sys.executable, "-m", "torchtune_adaptive", "plan", *WORDS, "--no-what-ifs"]
        subprocess.run([*command, "--html", str(PAGE)], check=True)
